"""Saved adapters: the policy's own, and anyone's, of which what peft computes is played, or the reason said why not."""

import json
from dataclasses import fields

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_policies import BASES, SHAPE, make_policy, random_datum, randomise, save_bases, save_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3_5ForConditionalGeneration

import eval as evaluation
from data import SettingsError
from protocol import HARMLESS_OPTIONS, HARMLESS_VALUES, MODULE_OPTIONS, SCALE_OPTIONS, check_adapter, load_chat_tokens
from rollout import RolloutSettings, Sampler, WeightSync
from advantages import SignalSettings
from train import Policy, mean_gap
from eval import SavedAdapter


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return save_bases(tmp_path_factory.mktemp("bases"))


# --- the policy's own ---


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
            one.accumulate(datum, SignalSettings())
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


def test_a_run_goes_on_with_its_own_scale_only(bases, tmp_path):
    make_policy(bases["qwen3"]).save_adapter(tmp_path)
    policy, path = make_policy(bases["qwen3"]), tmp_path / "adapter_config.json"
    about = json.loads(path.read_text())
    for name, value in (("lora_alpha", 7), ("use_rslora", True), ("alpha_pattern", {"q_proj": 64}), ("rank_pattern", {"q_proj": 2})):
        path.write_text(json.dumps(about | {name: value}))
        with pytest.raises(SettingsError, match=f"has {name} .*, not .*: take a checkpoint that train.py saved"):
            policy.load_adapter(tmp_path)


# --- anyone's ---
#
# Options of peft that are refused, each with a value that is not peft's default. What HARMLESS_VALUES names is refused with others.

REFUSED = {
    "task_type": "SEQ_CLS", "revision": "v2", "init_lora_weights": "olora", "fan_in_fan_out": True, "bias": "lora_only",
    "modules_to_save": ["lm_head"], "megatron_config": {"a": 1}, "trainable_token_indices": [1], "use_dora": True,
    "velora_config": {}, "alora_invocation_tokens": [1], "use_qalora": True, "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 1]], "lora_bias": True, "target_parameters": ["x.weight"],
    "use_bdlora": {}, "arrow_config": {}, "kasa_config": {}, "ensure_weight_tying": True,
}  # fmt: skip
QUERY_1 = "model.layers.1.self_attn.q_proj"
FOLLOWED = {
    "plain": {"task_type": None},
    "another alpha": {"lora_alpha": 7},
    "rank-stabilised": {"use_rslora": True},
    "alpha by module": {"alpha_pattern": {"q_proj": 64, "layers.1.mlp.up_proj": 3}},
    "alpha of one layer": {"alpha_pattern": {QUERY_1: 64}},
    "alpha by expression": {"alpha_pattern": {r".*layers\.1\..*_proj": 5}},
    "rank by module": {"rank_pattern": {"q_proj": 2, "down_proj": 5}},
    "all of them": {"use_rslora": True, "rank_pattern": {QUERY_1: 6}, "alpha_pattern": {"q_proj": 64, "up_proj": 1}},
    "fewer targets": {"target_modules": ["q_proj", "down_proj"]},
    "targets by expression": {"target_modules": r".*layers\.1\.(mlp|self_attn)\.(q|up|k)_proj"},
    "excluded": {"exclude_modules": ["k_proj"]},
    "one layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "initialised otherwise, with dropout": {"init_lora_weights": "gaussian", "lora_dropout": 0.4},
}


def save_foreign(base, folder, dtype=torch.float32, **options):
    """An adapter that peft has made, with random weights; returns the logits that peft computes with it."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options)
    model = randomise(PolicyOf(get_peft_model(plain, config))).model.to(dtype)
    model.save_pretrained(folder)
    return stock_logits(base, folder)


class PolicyOf:
    """A bare model for `randomise`."""

    def __init__(self, model):
        self.model = model


def stock_model(base, folder):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder)).eval()


@torch.no_grad()
def stock_logits(base, folder):
    return stock_model(base, folder)(input_ids=random_datum().tokens_T[None]).logits


def test_every_option_of_the_installed_peft_is_followed_harmless_or_refused():
    """A later peft may bring new ones: whether they change what saved weights mean is for a person to say."""
    kinds = [SCALE_OPTIONS, MODULE_OPTIONS, HARMLESS_OPTIONS, REFUSED]
    assert sorted(name for kind in kinds for name in kind) == sorted(f.name for f in fields(LoraConfig))
    assert HARMLESS_VALUES.keys() < REFUSED.keys()


@pytest.mark.parametrize("base", ["qwen3", "qwen3_5_vision_language"])
@pytest.mark.parametrize("options", FOLLOWED.values(), ids=FOLLOWED)
def test_merged_it_is_what_peft_computes(bases, base, options, tmp_path):
    expected = save_foreign(bases[base], tmp_path, **options)
    plain = AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32).eval()
    tokens = random_datum().tokens_T[None]
    with torch.no_grad():
        assert (plain(input_ids=tokens).logits - expected).abs().max() > 0.01  # the adapter does something
        merged = dict(SavedAdapter(tmp_path, bases[base], torch.float32).merged_tensors())
        assert merged and not plain.load_state_dict(merged, strict=False).unexpected_keys
        torch.testing.assert_close(plain(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("base", ["qwen3", "qwen3_5_vision_language"])
@pytest.mark.parametrize("options", FOLLOWED.values(), ids=FOLLOWED)
def test_as_an_adapter_the_engine_adds_what_peft_adds(bases, base, options, tmp_path):
    """By vLLM's own reading of the folder that it is given: rank, scale and weights of every module."""
    from vllm.lora.peft_helper import PEFTHelper

    save_foreign(bases[base], tmp_path / "saved", **options)
    adapter = SavedAdapter(tmp_path / "saved", bases[base])
    assert adapter.differs_from_base()
    adapter.save_adapter(tmp_path / "engine", engine_layout=True)
    tensors = load_file(tmp_path / "engine" / "adapter_model.safetensors")
    helper = PEFTHelper.from_local_dir(str(tmp_path / "engine"), None)
    assert not helper._validate_features()
    stock, seen = dict(stock_model(bases[base], tmp_path / "saved").named_modules()), 0
    for name in [name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name]:
        module = stock[name.replace(".language_model", "")]
        rank, scale = helper.get_rank_and_scaling(name.removeprefix("base_model.model."))
        a, b = (tensors[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        assert rank == a.shape[0] == b.shape[1] and ("language_model" in name) == (base != "qwen3")
        torch.testing.assert_close(scale * b @ a, module.get_delta_weight("default"), atol=1e-6, rtol=1e-6)
        seen += 1
    assert seen == sum(hasattr(module, "lora_A") for module in stock.values())


def test_linears_are_merged_with_all_that_the_engine_makes_one_of(tmp_path):
    """vLLM leaves what it is not given of q, k and v, or of weight and bias, without a value."""
    config = Qwen2Config(**SHAPE, num_hidden_layers=2)
    base = save_model(tmp_path / "biased", config)
    save_foreign(base, tmp_path / "adapter", target_modules=["q_proj"], layers_to_transform=[1])
    model = AutoModelForCausalLM.from_pretrained(base)
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    expected = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in linears}
    assert "model.layers.0.self_attn.k_proj.bias" in expected
    merged = dict(SavedAdapter(tmp_path / "adapter", base, torch.float32).merged_tensors())
    assert merged.keys() == expected == dict(make_policy(base).merged_tensors()).keys()
    changed = {name for name, value in merged.items() if not torch.equal(value, model.state_dict()[name])}
    assert changed == {"model.layers.1.self_attn.q_proj.weight"}


def test_weights_in_half_precision_and_in_the_engines_layout_are_taken(bases, tmp_path):
    base = bases["qwen3_5_vision_language"]
    expected = save_foreign(base, tmp_path / "half", torch.bfloat16, use_rslora=True)
    SavedAdapter(tmp_path / "half", base).save_adapter(tmp_path / "engine", engine_layout=True)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    plain.load_state_dict(dict(SavedAdapter(tmp_path / "engine", base, torch.float32).merged_tensors()), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=random_datum().tokens_T[None]).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def plain_adapter(bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    save_foreign(bases["qwen3"], folder)
    return folder


def reconfigured(plain_adapter, folder, **changed):
    for path in plain_adapter.glob("adapter_*"):
        (folder / path.name).write_bytes(path.read_bytes())
    about = json.loads((plain_adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(about | changed))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_not_be_followed_is_refused_by_its_name(bases, plain_adapter, tmp_path, name):
    reconfigured(plain_adapter, tmp_path, **{name: REFUSED[name]})
    with pytest.raises(SettingsError, match=f"is an adapter with {name} = .*, which is not supported: merge it") as refused:
        check_adapter(tmp_path, bases["qwen3"])
    assert "another base" not in str(refused.value) and "--lora-rank" not in str(refused.value)


def test_options_of_a_later_peft_are_refused_unless_they_are_off(bases, plain_adapter, tmp_path):
    reconfigured(plain_adapter, tmp_path, later_option=None, other_option=False, modules_to_save=[], revision="main")
    check_adapter(tmp_path, bases["qwen3"])
    reconfigured(plain_adapter, tmp_path, later_option={"a": "\x1b[31m\u202e"})
    with pytest.raises(SettingsError, match="later_option = .*, which the installed peft does not know") as refused:
        check_adapter(tmp_path, bases["qwen3"])
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(("changed", "reason"), [
    ({"peft_type": "ADALORA"}, "is of the kind 'ADALORA', not LORA"),
    ({"r": True}, "names no base model and rank"),
    ({"r": 0}, "has a rank that is none"),
    ({"rank_pattern": {"q_proj": "2"}}, "has a rank that is none"),
    ({"rank_pattern": [1]}, "is no LoRA adapter's config"),
    ({"base_model_name_or_path": ""}, "names no base model"),
    ({"target_modules": ["nothing"]}, "peft makes no adapter of its adapter_config.json: .*nothing.* not found"),
    ({"target_modules": "("}, "peft makes no adapter of"),
    ({"lora_alpha": "x"}, "peft makes no adapter of"),
    ({"alpha_pattern": 3}, "peft makes no adapter of"),
    ({"alpha_pattern": {"language_model.layers.0.self_attn.q_proj": 3}}, "alpha_pattern names language_model.layers.0"),
    ({"target_modules": ["down_proj", "q_proj"]}, "by its config 20 weights have no place in this base, as .*gate_proj"),
    ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, "by its config 4 weights have no place .*q_proj"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, "weights have no place in this base, as .*layers.0.mlp"),
    ({"target_modules": "all-linear", "r": 5}, "trained on another base: .* has shape"),
])  # fmt: skip
def test_a_config_that_is_not_of_its_weights_is_refused_with_the_reason(bases, plain_adapter, tmp_path, changed, reason):
    reconfigured(plain_adapter, tmp_path, **changed)
    with pytest.raises(SettingsError, match=reason):
        SavedAdapter(tmp_path, bases["qwen3"])


def test_an_adapter_outside_the_decoders_layers_is_refused(bases, tmp_path):
    save_foreign(bases["qwen3"], tmp_path, target_modules=["q_proj", "lm_head"])
    with pytest.raises(SettingsError, match="adapts .*lm_head; supported are linears of the decoder's layers: merge"):
        SavedAdapter(tmp_path, bases["qwen3"])


def test_names_from_files_cannot_rule_a_terminal(bases, plain_adapter, tmp_path):
    reconfigured(plain_adapter, tmp_path, base_model_name_or_path=str(tmp_path / "a\x1b[2Jb\u202ec\n"))
    (tmp_path / "a\x1b[2Jb\u202ec\n").mkdir()
    with pytest.raises(SettingsError, match="trained on another base, .*pass --base-model") as refused:
        check_adapter(tmp_path, "other/model")
    assert str(refused.value).isprintable()


def test_weights_that_are_missing_are_named(bases, plain_adapter, tmp_path):
    tensors = load_file(reconfigured(plain_adapter, tmp_path) / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    save_file(tensors | {"a\x1b[2J": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(SettingsError, match=r"1 weights have no place .* and 1 weights are missing, as .*1\.mlp\.up_proj") as refused:
        SavedAdapter(tmp_path, bases["qwen3"])
    assert str(refused.value).isprintable()


# --- in the engine ---

PROBE = [(7 * i) % 500 + 3 for i in range(120)]
TELLING = {
    "by module": lambda layer: {
        "use_rslora": True, "rank_pattern": {f"model.layers.{layer}.self_attn.q_proj": 6},
        "alpha_pattern": {"q_proj": 64, "up_proj": 1},
    },
    "some modules of one layer": lambda layer: {
        "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [layer], "lora_alpha": 30, "use_rslora": True,
    },
}  # fmt: skip


def load_into(run, folder, base, sampler, way, chat):
    """As eval.py does it; the engine's scores of a text with the adapter, and peft's."""
    play = RolloutSettings(base_model=base)
    model = evaluation.describe_model(evaluation.EvalSettings(model_path=str(folder)), base)
    run(evaluation.load_weights(model, play, sampler, way, chat))
    with torch.no_grad():
        logits_TV = stock_model(base, folder)(input_ids=torch.tensor([PROBE])).logits[0, :-1]
    expected = logits_TV.log_softmax(-1).gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0].tolist()
    return run(sampler.score(PROBE)), expected


@pytest.mark.parametrize("options", TELLING.values(), ids=TELLING)
def test_the_engine_plays_with_merged_weights_as_peft_does(run, warm_model, sampler, chat, tmp_path, options):
    before = run(sampler.score(PROBE))
    save_foreign(warm_model, tmp_path, **options(layer=1))
    try:
        scores, expected = load_into(run, tmp_path, warm_model, sampler, "merged", chat)
        assert mean_gap(scores, expected) < 1e-4 < 100 * mean_gap(scores, before)
    finally:  # the engine gets its first weights back
        run(WeightSync(Policy(warm_model, device="cpu"), sampler, "merged", "float32").push(0))
        sampler.policy_version = "base"
    assert mean_gap(run(sampler.score(PROBE)), before) < 1e-4


def test_the_engine_plays_with_an_adapter_as_peft_does(run, hybrid_model, tmp_path):
    chat, play = load_chat_tokens(hybrid_model), RolloutSettings(base_model=hybrid_model, max_trajectory_tokens=2_000)
    sampler = run(Sampler.start(play, chat.stop_token_ids, lora_rank=8))
    try:
        before = run(sampler.score(PROBE))
        for name, options in TELLING.items():
            save_foreign(hybrid_model, tmp_path / name, **options(layer=3))  # the one with attention
            scores, expected = load_into(run, tmp_path / name, hybrid_model, sampler, "adapter", chat)
            assert mean_gap(scores, expected) < 0.1 * mean_gap(scores, before), name
            run(sampler.drop_adapter())
    finally:
        sampler.close()
