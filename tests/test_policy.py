"""The policy: log-probabilities, gradients, the step, merging; base models and kernels that it takes and refuses."""

import copy
import inspect
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_policies import BASES, SHAPE, make_policy, random_datum, randomise, save_bases, save_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3Config
from transformers.models.qwen3_5 import modeling_qwen3_5

from data import SettingsError
from advantages import SignalSettings, join_scores, make_datum, update_metrics
from train import check_delta_rule

SIGNAL = SignalSettings()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return save_bases(tmp_path_factory.mktemp("bases"))


def gradients(policy, *data):
    for parameter in policy.parameters:
        parameter.grad = None
    scores = join_scores([policy.accumulate(datum, SIGNAL) for datum in data])
    return [parameter.grad.clone() for parameter in policy.parameters], update_metrics(scores, SIGNAL)


def full_logprobs(model, datum, temperature=1.0):
    """Log-probabilities and entropies of the sampled tokens from a model's own logits, in float64."""
    logits_TV = model(input_ids=datum.tokens_T[None]).logits[0].double() / temperature
    logprobs_AV = logits_TV.log_softmax(-1)[datum.mask_T]
    entropies_A = -(logprobs_AV.exp() * logprobs_AV).sum(-1)
    return logprobs_AV.gather(1, datum.targets_T[datum.mask_T][:, None])[:, 0], entropies_A


# --- log-probabilities ---


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("base", BASES)
def test_policy_logprobs_equal_those_of_the_models_own_logits(bases, base, temperature):
    policy = make_policy(bases[base], temperature=temperature)
    datum = random_datum()
    logprobs, entropies = policy.logprobs(datum)
    model = AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32).eval()
    expected, expected_entropies = full_logprobs(model, datum, temperature)
    torch.testing.assert_close(logprobs.double(), expected, atol=3e-5, rtol=0)
    torch.testing.assert_close(entropies.double(), expected_entropies, atol=3e-5, rtol=0)
    assert expected.std() > 0.3  # the model says something, or equality would be cheap


def test_vision_language_checkpoint_gives_the_text_model_it_holds(bases):
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(bases["qwen3_5_vision_language"]).eval()
    policy = make_policy(bases["qwen3_5_vision_language"])
    assert policy.vision_language and not make_policy(bases["qwen3_5_text"]).vision_language
    datum = random_datum()
    torch.testing.assert_close(policy.logprobs(datum)[0].double(), full_logprobs(whole, datum)[0], atol=3e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation makes, in forward and backward."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_of_length_times_vocabulary_ever_exists(tmp_path):
    vocabulary, length, width = 1500, 60, 16
    shape = SHAPE | {"vocab_size": vocabulary, "num_hidden_layers": 1, "head_dim": 8}
    base = save_model(tmp_path / "wide", Qwen3Config(**shape))
    policy = make_policy(base, head_chunk=4)
    datum = make_datum(list(range(length)), [(1, length)], [[-7.0] * (length - 1)], [1.0])
    with LargestTensor() as largest:
        policy.accumulate(datum, SIGNAL)
    assert largest.numel <= vocabulary * width  # the head's own weight; 4 rows of logits are less
    with LargestTensor() as largest, torch.no_grad():
        policy.model(input_ids=datum.tokens_T[None])
    assert largest.numel >= vocabulary * (length - 1)  # the recorder would have seen them


# --- policy ---


def test_layers_recompute_in_backward(bases):
    policy = make_policy(bases["qwen3"])
    calls = []
    for layer in policy._decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda module, _: calls.append(module))
    policy.accumulate(random_datum(), SIGNAL)
    assert [calls.count(layer.mlp) for layer in policy._decoder.layers] == [2, 2]


def test_dropout_in_the_config_is_not_applied(bases, tmp_path):
    base = tmp_path / "dropout"
    shutil.copytree(bases["qwen3"], base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    datum = random_datum()
    expected = make_policy(bases["qwen3"]).logprobs(datum)[0]
    assert torch.equal(make_policy(str(base)).logprobs(datum)[0], expected)


@pytest.mark.parametrize("lora_rank", [4, 0])
@pytest.mark.parametrize("base", ["qwen3", "qwen3_5_text"])
def test_gradient_is_the_same_to_the_bit_whether_activations_are_kept_or_computed_again(bases, base, lora_rank):
    kept, recomputed = (make_policy(bases[base], lora_rank=lora_rank, recompute=recompute) for recompute in (False, True))
    for seed in (1, 2):
        ours, theirs = (each.accumulate(random_datum(seed), SIGNAL) for each in (kept, recomputed))
        assert all(map(torch.equal, ours, theirs))
    for ours, theirs in zip(kept.parameters, recomputed.parameters, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("base", ["qwen3", "qwen3_5_text"])
def test_gradient_equals_that_of_full_logits_without_recomputation(bases, base):
    policy, datum = randomise(make_policy(bases[base])), random_datum()
    ours, metrics = gradients(policy, datum)
    plain = copy.deepcopy(policy.model).eval()  # eval: no gradient checkpointing
    logprobs_A, entropies_A = full_logprobs(plain, datum)
    ratio_A = (logprobs_A - datum.old_logprobs_T[datum.mask_T].double()).exp()
    loss = -torch.minimum(ratio_A * 0.7, ratio_A.clamp(0.8, 1.2) * 0.7).sum()
    loss.backward()
    theirs = [parameter.grad for parameter in plain.parameters() if parameter.requires_grad]
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=2e-4, rtol=2e-3)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["train/entropy"] == pytest.approx(entropies_A.mean().item(), rel=1e-4)
    assert max(gradient.abs().max() for gradient in ours) > 1e-2


@pytest.mark.parametrize("base", BASES)
def test_gradients_of_trajectories_add_up_and_zero_advantage_adds_nothing(bases, base):
    policy = randomise(make_policy(bases[base]))
    first, second, nothing = random_datum(1, 0.9), random_datum(2, -0.4), random_datum(3, 0.0)
    gradients_1, metrics_1 = gradients(policy, first)
    gradients_2, metrics_2 = gradients(policy, second)
    together, metrics = gradients(policy, first, nothing, second)
    for one, two, both in zip(gradients_1, gradients_2, together, strict=True):
        torch.testing.assert_close(one + two, both, atol=1e-5, rtol=1e-4)
    assert metrics["train/loss"] == pytest.approx(metrics_1["train/loss"] + metrics_2["train/loss"])
    assert all(not gradient.any() for gradient in gradients(policy, nothing)[0])


@pytest.mark.parametrize("base", BASES)
def test_only_the_adapter_is_trained(bases, base):
    policy = make_policy(bases[base])
    frozen = {name: value.clone() for name, value in policy.model.state_dict().items() if "lora_" not in name}
    adapter = [parameter.detach().clone() for parameter in policy.parameters]
    for seed in range(2):
        policy.accumulate(random_datum(seed), SIGNAL)
        assert all(("lora_" in name) == (p.grad is not None) for name, p in policy.model.named_parameters())
        policy.step(1.0)
        assert all(parameter.grad is None for parameter in policy.parameters)
    state = policy.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in frozen.items())
    assert all(not torch.equal(now, before) for now, before in zip(policy.parameters, adapter))


@pytest.mark.parametrize(("base", "modules"), [
    ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ("qwen3_5_text", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                      "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}),
])  # fmt: skip
def test_every_linear_but_the_head_has_an_adapter(bases, base, modules):
    policy = make_policy(bases[base])
    names = {name for name, _ in policy.merged_tensors()}
    assert {name.split(".")[-2] for name in names} == modules
    model = AutoModelForCausalLM.from_pretrained(bases[base])
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert names == linears - {"lm_head.weight"}


def test_step_is_clipped_adam(bases):
    policy = make_policy(bases["qwen3"], learning_rate=0.01, betas=(0.9, 0.95))
    weights = [parameter.detach().double() for parameter in policy.parameters]
    first, second = [torch.zeros_like(weight) for weight in weights], [torch.zeros_like(weight) for weight in weights]
    for update in (1, 2, 3):
        gradient = [value.double() for value in gradients(policy, random_datum(update, 0.1 * update))[0]]
        norm = math.sqrt(sum((value**2).sum().item() for value in gradient))
        assert norm > 0.05
        assert policy.step(0.05) == pytest.approx(norm, rel=1e-5)
        for i, value in enumerate(gradient):
            value = value * 0.05 / norm
            first[i] = 0.9 * first[i] + 0.1 * value
            second[i] = 0.95 * second[i] + 0.05 * value**2
            scale = (second[i] / (1 - 0.95**update)).sqrt() + 1e-8
            weights[i] = weights[i] - 0.01 * first[i] / (1 - 0.9**update) / scale
    for ours, theirs in zip(policy.parameters, weights):
        # Where a gradient is about 1e-8, Adam's quotient magnifies rounding; the bound is 2 % of one step.
        torch.testing.assert_close(ours.detach().double(), theirs, atol=2e-4, rtol=0)


def test_steps_on_a_positive_advantage_make_the_tokens_likelier(bases):
    policy, datum = make_policy(bases["qwen3_5_text"]), random_datum()
    before = policy.logprobs(datum)[0].detach()
    datum = replace(datum, old_logprobs_T=datum.old_logprobs_T.masked_scatter(datum.mask_T, before))
    metrics = update_metrics(policy.accumulate(datum, SIGNAL), SIGNAL)
    assert metrics["train/loss"] == pytest.approx(-0.7 * 18, rel=1e-5)  # ratio 1 everywhere
    assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-5) and metrics["mismatch/max"] < 1e-5
    policy.step(1.0)
    assert policy.logprobs(datum)[0].sum() > before.sum() + 0.1


def test_infinite_loss_stops_before_its_gradient(bases):
    policy = make_policy(bases["qwen3"])
    datum = random_datum(5, -1.0)
    datum = replace(datum, old_logprobs_T=datum.old_logprobs_T * 100)
    with pytest.raises(FloatingPointError, match="^game 5: loss is inf"):
        policy.accumulate(datum, SIGNAL)
    assert all(parameter.grad is None for parameter in policy.parameters)


def test_gradient_that_is_not_finite_stops_before_the_step(bases):
    policy = make_policy(bases["qwen3"])
    policy.accumulate(random_datum(), SIGNAL)
    before = [parameter.detach().clone() for parameter in policy.parameters]
    policy.parameters[3].grad[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="gradient norm is nan; no step was taken"):
        policy.step(1.0)
    assert all(torch.equal(now, then) for now, then in zip(policy.parameters, before))


def test_start_is_the_base_and_repeats_with_the_seed(bases):
    state = torch.random.get_rng_state()
    one, same, other = (make_policy(bases["qwen3"], seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, same.parameters))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters, other.parameters))
    base = load_file(f"{bases['qwen3']}/model.safetensors")
    assert all(torch.equal(value, base[name]) for name, value in one.merged_tensors())


def test_bf16_base_keeps_an_fp32_adapter_and_merges_in_fp32(bases):
    policy = randomise(make_policy(bases["qwen3"], dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in policy.parameters} == {torch.float32}
    state = policy.model.state_dict()
    name, merged = next(policy.merged_tensors())
    layer = f"base_model.model.{name.removesuffix('.weight')}"
    base, b, a = (state[f"{layer}.{part}.weight"] for part in ("base_layer", "lora_B.default", "lora_A.default"))
    assert base.dtype == torch.bfloat16 and merged.dtype == torch.float32
    torch.testing.assert_close(merged, base.float() + 32 / 4 * b @ a, atol=1e-6, rtol=0)
    assert [part.shape for part in policy.accumulate(random_datum(), SIGNAL)] == [(18,)] * 6
    policy.step(1.0)


@pytest.mark.parametrize("base", BASES)
def test_merged_weights_in_a_plain_model_give_the_policys_logits(bases, base):
    policy = randomise(make_policy(bases[base]))
    plain = AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32).eval()
    tokens = random_datum().tokens_T[None]
    with torch.no_grad():
        expected = policy.model(input_ids=tokens).logits
        assert (plain(input_ids=tokens).logits - expected).abs().max() > 0.1  # the adapter does something
        assert not plain.load_state_dict(dict(policy.merged_tensors()), strict=False).unexpected_keys
        torch.testing.assert_close(plain(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)


# --- base models ---


def test_checkpoint_without_a_weight_is_refused_by_its_name(bases, tmp_path):
    base = tmp_path / "broken"
    shutil.copytree(bases["qwen3_5_vision_language"], base)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.language_model.layers.0.linear_attn.out_proj.weight"]
    tensors["model.language_model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="2 weights are missing .*layers.0.linear_attn.out_proj.*layers.1.mlp.up_proj"):
        make_policy(str(base))


def test_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"base model '{tmp_path}' is no model folder"):
        make_policy(str(tmp_path))


def test_architecture_that_scales_its_logits_is_refused(bases):
    with pytest.raises(ValueError, match="granite changes its logits after the head"):
        make_policy(bases["granite"])


# --- kernels ---


def test_a_kernel_with_a_wrong_backward_is_refused_and_a_right_one_is_not():
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    check_delta_rule(reference, reference, "cpu")

    def wrong_for_beta(q, k, v, g, beta, **how):
        return reference(q, k, v, g=g, beta=beta.detach() + 0.5 * (beta - beta.detach()), **how)

    def wrong_forward(q, k, v, **how):
        output, state = reference(q, k, v, **how)
        return output * 1.2, state

    with pytest.raises(SettingsError, match=r"gradient of beta is off by 50\.\d%"):
        check_delta_rule(wrong_for_beta, reference, "cpu")
    with pytest.raises(SettingsError, match=r"output is off by 20\.\d%"):
        check_delta_rule(wrong_forward, reference, "cpu")
