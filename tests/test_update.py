"""One update: datum, PPO-clip loss, chunked log-probabilities, and the LoRA policy's step, saving and merging."""

import copy
import inspect
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig, Qwen3Config,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from advantages import (
    SignalSettings, TokenScores, make_datum, mismatch_metrics, token_logprobs, token_losses, update_metrics,
)  # fmt: skip
from rollout import SettingsError
from train import Policy, check_delta_rule, join_scores

VOCABULARY = 64
SIGNAL = SignalSettings()
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256,
}
HYBRID_SHAPE = SHAPE | {
    "num_hidden_layers": 2, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "tie_word_embeddings": True,
}
VISION_SHAPE = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
BASES = ["qwen3", "qwen3_5_text", "qwen3_5_vision_language"]


def save_model(folder, config, model_class=AutoModelForCausalLM):
    torch.manual_seed(0)
    build = model_class if model_class is not AutoModelForCausalLM else AutoModelForCausalLM.from_config
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the default 0.02 gives logits that are all alike
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of tiny random models, by architecture."""
    root = tmp_path_factory.mktemp("bases")
    vision_language = Qwen3_5Config(
        text_config=HYBRID_SHAPE, vision_config=VISION_SHAPE, tie_word_embeddings=True, image_token_id=60,
        video_token_id=61, vision_start_token_id=58, vision_end_token_id=59,
    )
    dense = SHAPE | {"num_hidden_layers": 2}
    return {
        "qwen3": save_model(root / "qwen3", Qwen3Config(**dense, head_dim=8)),
        "qwen3_other": save_model(root / "other", Qwen3Config(**dense | {"intermediate_size": 20}, head_dim=8)),
        "qwen3_5_text": save_model(root / "text", Qwen3_5TextConfig(**HYBRID_SHAPE)),
        "qwen3_5_vision_language": save_model(
            root / "vision_language", vision_language, Qwen3_5ForConditionalGeneration
        ),
        "llama": save_model(root / "llama", LlamaConfig(**dense)),
        "granite": save_model(root / "granite", GraniteConfig(**dense, logits_scaling=4.0)),
    }


def make_policy(base, **changed):
    return Policy(base, **{"lora_rank": 4, "learning_rate": 1e-2, "head_chunk": 3, "device": "cpu"} | changed)


def randomise(policy, seed=1):
    """Give the adapter's B values: a fresh one is 0 and proves nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return policy


def random_datum(seed=0, advantage=0.7):
    """Three completions in 40 tokens; log-probabilities near a uniform guess."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (40,), generator=generator).tolist()
    spans = [(9, 14), (20, 27), (28, 34)]
    logprobs = [(-4 + torch.randn(end - start, generator=generator) * 0.3).tolist() for start, end in spans]
    return make_datum(tokens, spans, logprobs, [advantage] * 3, name=f"game {seed}")


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


# --- datum ---


def test_golden_datum():
    tokens = [7, 8, 9, 1, 2, 5, 6, 3, 4, 4]
    datum = make_datum(tokens, [(3, 5), (7, 8)], [[-0.5, -0.25], [-1.0]], [0.75, 0.75], name="put mug/1")
    assert datum.name == "put mug/1"
    assert datum.tokens_T.tolist() == [7, 8, 9, 1, 2, 5, 6]
    assert datum.targets_T.tolist() == [8, 9, 1, 2, 5, 6, 3]
    assert datum.mask_T.tolist() == [False, False, True, True, False, False, True]
    assert datum.old_logprobs_T.tolist() == [0, 0, -0.5, -0.25, 0, 0, -1]
    assert datum.advantages_T.tolist() == [0, 0, 0.75, 0.75, 0, 0, 0.75]
    assert datum.tokens_T.dtype == datum.targets_T.dtype == torch.int64
    assert datum.old_logprobs_T.dtype == datum.advantages_T.dtype == torch.float32


@settings(max_examples=100, deadline=None)
@given(strategies.lists(strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 4)), min_size=1),
       strategies.integers(0, 3))
def test_every_sampled_token_is_trained_once(turns, tail):
    tokens, spans, sampled, logprobs = [100], [], [], []
    for observation, completion in turns:
        tokens += range(len(tokens) + 100, len(tokens) + 100 + observation)
        spans.append((len(tokens), len(tokens) + completion))
        tokens += range(len(tokens) + 100, len(tokens) + 100 + completion)
        sampled += tokens[spans[-1][0]:]
        logprobs.append([-0.5 * token for token in tokens[spans[-1][0]:]])
    datum = make_datum(tokens + [1] * tail, spans, logprobs, [1.0] * len(spans))
    assert datum.targets_T[datum.mask_T].tolist() == sampled
    assert datum.old_logprobs_T[datum.mask_T].tolist() == [-0.5 * token for token in sampled]
    assert not datum.old_logprobs_T[~datum.mask_T].any() and not datum.advantages_T[~datum.mask_T].any()
    assert datum.mask_T[-1] and len(datum.tokens_T) == len(datum.targets_T) == sampled[-1] - 100


@pytest.mark.parametrize(("spans", "logprobs", "advantage", "message"), [
    ([(0, 2)], [[-1, -1]], 1.0, "its prompt has 0 tokens"),
    ([(2, 4), (3, 5)], [[-1, -1], [-1, -1]], 1.0, "turn 1: its prompt has 3 tokens, but 4 were there"),
    ([(2, 4), (4, 5)], [[-1, -1], [-1]], 1.0, "turn 1: its prompt has 4 tokens, but 4 were there"),
    ([(4, 9)], [[-1] * 5], 1.0, r"completion at tokens 4..9 of 6"),
    ([(4, 4)], [[]], 1.0, "completion at tokens 4..4 of 6"),
    ([(2, 4)], [[-1]], 1.0, "1 log-probabilities for 2 tokens"),
    ([(2, 4)], [[-1, -1], [-1]], 1.0, "1 completions but 2 lists"),
    ([(2, 4)], [[-1, math.nan]], 1.0, "not finite"),
    ([(2, 4)], [[-1, -math.inf]], 1.0, "not finite"),
    ([(2, 4)], [[-1, -1]], math.nan, r"advantages \[nan\]"),
    ([], [], 1.0, "no sampled token"),
])  # fmt: skip
def test_bad_trajectory_is_refused_by_name(spans, logprobs, advantage, message):
    with pytest.raises(ValueError, match=f"^game 3, branch 5: .*{message}"):
        make_datum([1, 2, 3, 4, 5, 6], spans, logprobs, [advantage] * len(spans), name="game 3, branch 5")


# --- loss ---

RATIOS = [0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0]


def reference_loss(new, old, advantages, low, high):
    total = 0.0
    for logprob, old_logprob, advantage in zip(new, old, advantages, strict=True):
        ratio = math.exp(logprob - old_logprob)
        total -= min(ratio * advantage, min(max(ratio, low), high) * advantage)
    return total


@pytest.mark.parametrize("advantage", [1.7, -0.6])
def test_loss_and_gradient_equal_the_reference_in_every_clip_region(advantage):
    old = [-0.1 - 0.7 * i for i in range(len(RATIOS))]
    new = [value + math.log(ratio) for value, ratio in zip(old, RATIOS)]
    advantages = [advantage] * len(RATIOS)
    logprobs = torch.tensor(new, requires_grad=True)
    entropies, ones = torch.rand(len(RATIOS)), torch.ones(len(RATIOS))
    scores = TokenScores(logprobs, torch.tensor(old), torch.tensor(advantages), entropies, ones, logprobs.detach())
    loss = token_losses(scores, SIGNAL).sum()
    loss.backward()
    assert loss.item() == pytest.approx(reference_loss(new, old, advantages, 0.8, 1.2), abs=1e-5)

    for i, ratio in enumerate(RATIOS):
        step = 1e-6
        above = reference_loss(new[:i] + [new[i] + step] + new[i + 1:], old, advantages, 0.8, 1.2)
        below = reference_loss(new[:i] + [new[i] - step] + new[i + 1:], old, advantages, 0.8, 1.2)
        assert logprobs.grad[i].item() == pytest.approx((above - below) / (2 * step), abs=1e-5)
        clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
        assert logprobs.grad[i].item() == pytest.approx(0.0 if clipped else -advantage * ratio, abs=1e-5)

    metrics = update_metrics(scores._replace(logprobs=logprobs.detach()), SIGNAL)
    assert metrics["tokens/trained"] == len(RATIOS)
    assert metrics["train/clip_fraction"] == pytest.approx(2 / len(RATIOS))  # the two above 1.2, or the two below 0.8
    assert metrics["train/loss"] == loss.item()
    assert metrics["train/ratio_mean"] == pytest.approx(sum(RATIOS) / len(RATIOS), rel=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(3.0, rel=1e-5)
    assert metrics["train/entropy"] == pytest.approx(sum(entropies.tolist()) / len(RATIOS), rel=1e-5)


def test_mismatch_by_hand():
    metrics = mismatch_metrics(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5]))
    assert metrics["mismatch/mean"] == pytest.approx(1.5 / 3)
    assert metrics["mismatch/max"] == pytest.approx(1.0)
    assert metrics["mismatch/k1"] == pytest.approx((-0.5 + 1.0) / 3)
    assert metrics["mismatch/k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1) - 1 + 1) / 3)


def test_kl_estimators_agree_with_the_exact_kl():
    torch.manual_seed(0)
    rollout_V, trainer_V = torch.randn(2, 20).log_softmax(-1)
    samples = torch.multinomial(rollout_V.exp(), 200_000, replacement=True)
    metrics = mismatch_metrics(trainer_V[samples], rollout_V[samples])
    exact = (rollout_V.exp() * (rollout_V - trainer_V)).sum().item()
    assert metrics["mismatch/k1"] == pytest.approx(exact, rel=0.02)
    assert metrics["mismatch/k3"] == pytest.approx(exact, rel=0.02)


# --- log-probabilities ---


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_chunked_logprobs_entropies_and_gradients_equal_the_full_float64_ones(chunk, biased, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator)
    weight = torch.randn(30, 8, generator=generator)
    bias = torch.randn(30, generator=generator) if biased else None
    targets = torch.randint(0, 30, (11,), generator=generator)
    coefficients = torch.randn(11, generator=generator)

    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    logprobs, entropies = token_logprobs(*inputs, *([] if biased else [None]), targets, temperature, chunk)
    (logprobs * coefficients).sum().backward()

    doubles = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    full = (torch.nn.functional.linear(*doubles) / temperature).log_softmax(-1)
    expected = full[torch.arange(11), targets]
    (expected * coefficients).sum().backward()

    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), -(full.exp() * full).sum(-1), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)


def test_softmax_is_fp32_for_a_bf16_head():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8).bfloat16(), torch.randn(30, 8).bfloat16()
    targets = torch.arange(5)
    logprobs, _ = token_logprobs(hidden, weight, None, targets, 1.0, 2)
    expected = (hidden @ weight.T).double().log_softmax(-1)[torch.arange(5), targets]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=1e-6)


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


# --- saved adapters ---


@pytest.mark.parametrize("base", BASES)
def test_saved_adapter_is_the_same_model_in_stock_peft(bases, base, tmp_path):
    policy = randomise(make_policy(bases[base]))
    policy.save_adapter(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32)
    reloaded = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    tokens = random_datum().tokens_T[None]
    with torch.no_grad():
        torch.testing.assert_close(reloaded(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, bases[base])
    assert config["target_modules"] == sorted(config["target_modules"])


def test_engine_layout_names_the_layers_of_a_vision_language_model(bases, tmp_path):
    policy = randomise(make_policy(bases["qwen3_5_vision_language"]))
    policy.save_adapter(tmp_path, engine_layout=True)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert names and all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(bases["qwen3_5_vision_language"], dtype=torch.float32)
    whole = PeftModel.from_pretrained(whole, str(tmp_path)).eval()  # has the names that the engine has
    tokens = random_datum().tokens_T[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)

    other = make_policy(bases["qwen3_5_vision_language"])
    other.load_adapter(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters, policy.parameters))


def test_engine_layout_changes_nothing_for_a_text_model(bases, tmp_path):
    policy = make_policy(bases["qwen3_5_text"])
    policy.save_adapter(tmp_path / "plain")
    policy.save_adapter(tmp_path / "engine", engine_layout=True)
    files = [(tmp_path / layout / "adapter_model.safetensors").read_bytes() for layout in ("plain", "engine")]
    assert files[0] == files[1]


def test_training_goes_on_from_a_loaded_adapter(bases, tmp_path, monkeypatch):
    policy = randomise(make_policy(bases["qwen3"]))
    policy.save_adapter(tmp_path / "saved")
    monkeypatch.chdir(tmp_path.parent)
    resumed = make_policy(bases["qwen3"], seed=9)
    resumed.load_adapter("../" + str((tmp_path / "saved").relative_to(tmp_path.parent.parent)))
    datum = random_datum()
    for _ in range(2):
        assert torch.equal(resumed.logprobs(datum)[0], policy.logprobs(datum)[0])
        for one in (policy, resumed):
            one.accumulate(datum, SIGNAL)
            one.step(1.0)


def test_adapter_of_another_base_is_refused(bases, tmp_path):
    make_policy(bases["qwen3_other"]).save_adapter(tmp_path)
    policy = randomise(make_policy(bases["qwen3"]))
    before = [parameter.detach().clone() for parameter in policy.parameters]
    with pytest.raises(ValueError, match=f"trained on another base, {bases['qwen3_other']}, not on"):
        policy.load_adapter(tmp_path)

    config = json.loads((tmp_path / "adapter_config.json").read_text())  # a base renamed to look right
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": bases["qwen3"]}))
    with pytest.raises(ValueError, match="trained on another base: .*mlp.* has shape"):
        policy.load_adapter(tmp_path)
    assert all(torch.equal(now, then) for now, then in zip(policy.parameters, before))


def test_adapter_of_another_rank_or_no_adapter_is_refused(bases, tmp_path):
    make_policy(bases["qwen3"], lora_rank=2).save_adapter(tmp_path)
    with pytest.raises(ValueError, match="LoRA rank 2, .* pass --lora-rank 2"):
        make_policy(bases["qwen3"]).load_adapter(tmp_path)
    with pytest.raises(ValueError, match="no adapter in .*adapter_config.json is missing"):
        make_policy(bases["qwen3"]).load_adapter(bases["qwen3"])


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
