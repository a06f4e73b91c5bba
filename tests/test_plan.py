"""The memory plan: the trainer's part against counted peaks of real updates, the engine's against vLLM's rules, layouts."""

import gc
import json
import os
import re
import subprocess
import sys

import huggingface_hub
import pytest
import torch
import transformers.masking_utils
from conftest import ROOT
from gpu_check import LiveBytes, plain_loss, standing_tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

import train
from rollout import RolloutSettings
from advantages import SignalSettings, make_datum, token_logprobs
from train import (
    GIB, OUTSIDE_ENGINE_SHARE, RECIPE_SHAPE, USABLE_SHARE, Policy, TrainSettings, cache_of_trajectory, cache_shape,
    count_weights, plan_memory, plan_run, render_plan, trainer_memory,
)  # fmt: skip

SHAPE = {
    "vocab_size": 6_000, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 4096,
}
CONFIGS = {
    "qwen3": lambda **changed: Qwen3Config(**SHAPE | {"num_hidden_layers": 3} | changed),
    "qwen3_5": lambda **changed: Qwen3_5TextConfig(**SHAPE | {
        "num_hidden_layers": 4, "tie_word_embeddings": True, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    } | changed),
}  # fmt: skip
RECIPE = Qwen3_5TextConfig(**RECIPE_SHAPE)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    for name, make in CONFIGS.items():
        AutoModelForCausalLM.from_config(make()).save_pretrained(root / name)
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"](vocab_size=30_000)).save_pretrained(root / "wide")
    deep = CONFIGS["qwen3"](vocab_size=6_000, intermediate_size=3_000, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(deep).save_pretrained(root / "deep")
    return {path.name: str(path) for path in root.iterdir()}


def datum_of(tokens, sampled):
    return make_datum([i % 5_000 for i in range(tokens)], [(tokens - sampled, tokens)], [[-8.5] * sampled], [0.5])


def counted(policy, datum, count=LiveBytes):
    """Bytes between updates and at the peak of one, of two trajectories: the second finds the first's gradients."""
    policy.accumulate(datum, SignalSettings())
    policy.step(1.0)
    gc.collect()
    with count(*standing_tensors(policy)) as live:
        resident = live.now
        for _ in range(2):
            policy.accumulate(datum, SignalSettings())
        policy.step(1.0)
    return resident, live.peak


def planned(config, tokens, head_chunk, lora_rank, dtype):
    return trainer_memory(config, count_weights(config), tokens=tokens, head_chunk=head_chunk, lora_rank=lora_rank,
                          width=dtype.itemsize)


CASES = [
    *((8, dtype, tokens, chunk) for dtype in (torch.float32, torch.bfloat16) for tokens in (150, 700) for chunk in (16, 256)),
    *((0, dtype, 500, 64) for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize(("lora_rank", "dtype", "tokens", "chunk"), CASES)
@pytest.mark.parametrize("model", CONFIGS)
def test_trainers_memory_is_as_planned(bases, model, lora_rank, dtype, tokens, chunk):
    policy = Policy(bases[model], lora_rank=lora_rank, head_chunk=chunk, device="cpu", dtype=dtype)
    sampled = tokens // 2
    resident, peak = counted(policy, datum_of(tokens, sampled))
    _, planned_resident, planned_peak = planned(CONFIGS[model](), tokens, min(chunk, sampled), lora_rank, dtype)
    assert planned_resident == pytest.approx(resident, rel=0.01)
    assert planned_peak == pytest.approx(peak, rel=0.15)
    if lora_rank:  # where the weights do not hide it
        assert planned_peak - planned_resident == pytest.approx(peak - resident, rel=0.15)


SHARDED = """
import json, sys
import torch
from torch.distributed.tensor import DTensor
from gpu_check import LiveBytes
from test_plan import counted, datum_of
from train import ShardedPolicy, joined_trainers, process_of_several

class PartBytes(LiveBytes):
    # FSDP frees a storage by giving it the size 0, so sizes are asked for anew after every operation
    def _follow(self, tensor):
        super()._follow(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        self.now = sum(storage.nbytes() for reference in [*self._alive.values()] if (storage := reference()) is not None)
        self.peak = max(self.peak, self.now)

with process_of_several(), joined_trainers() as rank:
    measured = []
    for base, dtype, tokens in json.loads(sys.argv[1]):
        policy = ShardedPolicy(base, head_chunk=64, device="cpu", dtype=getattr(torch, dtype))
        policy.split()
        measured.append(counted(policy, datum_of(tokens, tokens // 2), PartBytes))
    if rank == 0:
        print(json.dumps(measured))
"""


def test_memory_of_a_sharded_policy_is_as_planned(bases, tmp_path):
    cases = [("qwen3", "float32", 300), ("qwen3", "bfloat16", 1500), ("deep", "float32", 60), ("qwen3_5", "float32", 500)]
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script,
         json.dumps([(bases[model], dtype, tokens) for model, dtype, tokens in cases])],
        capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    for (model, dtype, tokens), (resident, peak) in zip(cases, json.loads(result.stdout), strict=True):
        config = AutoConfig.from_pretrained(bases[model])
        _, planned_resident, planned_peak = trainer_memory(
            config, count_weights(config), tokens=tokens, head_chunk=64 if tokens > 128 else tokens // 2, lora_rank=0,
            width=getattr(torch, dtype).itemsize, shards=2,
        )  # fmt: skip
        assert planned_resident == pytest.approx(resident, rel=0.01)
        assert planned_peak == pytest.approx(peak, rel=0.15)


def fake_update(config, tokens, sampled, head_chunk, lora_rank):
    """Bytes of weights and at the peak of an update in bf16, of a model that takes no memory: all tensors are fake."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    adapted = Policy._with_adapter(model, lora_rank, seed=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {}
        for module in adapted.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in fakes:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        if isinstance(tensor, torch.nn.Parameter):
                            fake = torch.nn.Parameter(fake, tensor.requires_grad)
                        fakes[id(tensor)] = tensor, fake
                    tensors[name] = fakes[id(tensor)][1] if tensor is not None else None
        head, ids_T = model.get_output_embeddings(), torch.zeros(tokens, dtype=torch.long)
        with LiveBytes(*adapted.parameters(), *adapted.buffers()) as live:
            weights = live.now
            hidden_BTD = model.get_decoder()(input_ids=ids_T[None], use_cache=False).last_hidden_state
            hidden_AD = hidden_BTD[0, torch.arange(tokens - sampled, tokens)]
            del hidden_BTD
            logprobs_A, _ = token_logprobs(hidden_AD, head.weight, None, ids_T[:sampled], 1.0, head_chunk)
            logprobs_A.sum().backward()
    return weights, live.peak


@pytest.mark.parametrize("kinds", [["linear_attention"], ["full_attention"] * 2])
def test_a_layer_of_the_recipe_at_full_length_is_as_planned(kinds, monkeypatch):
    # asks a fake tensor for its values; one sequence is not packed
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    config = Qwen3_5TextConfig(**RECIPE.to_dict() | {"num_hidden_layers": len(kinds), "layer_types": kinds})
    weights, peak = fake_update(config, 12_000, 2_800, 256, 32)
    _, resident, planned_peak = planned(config, 12_000, 256, 32, torch.bfloat16)
    moments = 2 * 4 * 32 * count_weights(config).adapter  # planned, and not there
    assert resident - moments == pytest.approx(weights, rel=0.01)
    assert planned_peak - resident == pytest.approx(peak - weights, rel=0.15)


def test_memory_does_not_grow_by_a_vocabulary_a_token(bases):
    """A token costs its hidden states and its share of one layer; full logits would cost the vocabulary several times."""
    policy = Policy(bases["wide"], lora_rank=8, head_chunk=16, device="cpu", dtype=torch.float32)

    def peak(tokens, loss):
        with LiveBytes() as live:
            loss(datum_of(tokens, tokens - 1))
        return live.peak

    def slope(loss):
        return (peak(600, loss) - peak(300, loss)) / 300

    row = 4 * 30_000  # one token's logits in fp32
    config = CONFIGS["qwen3"](vocab_size=30_000)
    by_plan = (planned(config, 600, 16, 8, torch.float32)[2] - planned(config, 300, 16, 8, torch.float32)[2]) / 300
    ours = slope(lambda datum: policy.accumulate(datum, SignalSettings()))
    assert ours == pytest.approx(by_plan, rel=0.15)
    assert ours < 0.2 * row
    assert slope(lambda datum: plain_loss(policy, datum).backward()) > 2 * row


def test_weights_are_counted_as_the_policy_has_them(bases):
    for model, make in CONFIGS.items():
        policy = Policy(bases[model], lora_rank=8, device="cpu")
        counts = count_weights(make())
        adapter = sum(parameter.numel() for parameter in policy.parameters)
        assert 8 * counts.adapter == adapter
        assert counts.model == sum(parameter.numel() for parameter in policy.model.parameters()) - adapter
    counts = count_weights(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                       num_attention_heads=2, num_key_value_heads=1))
    assert counts.largest == 16 * 24  # every linear but the head is adapted
    assert counts.adapter == 2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24)


# --- engine ---


def test_cache_of_the_recipe_is_cut_as_vllm_cuts_it():
    block, block_bytes, groups, states = cache_shape(RECIPE, 2)
    assert block == 528  # vLLM's own message for Qwen3.5-4B on a GPU: "Setting attention block size to 528 tokens"
    assert block_bytes == 8 * 528 * 2 * 4 * 256 * 2  # 8 attention layers, or 8 of the 24 Gated-DeltaNet layers
    assert (groups, states) == (1, 6)
    assert cache_of_trajectory(RECIPE, 2, 12_000) == (23 + 6) * block_bytes


def test_cache_of_a_dense_model_is_keys_and_values():
    config = CONFIGS["qwen3"]()
    assert cache_of_trajectory(config, 2, 1_600) == 1_600 * 3 * 2 * 2 * 32 * 2


# --- the whole card ---


@pytest.mark.parametrize(("gib", "layout", "room"), [(24, "turns", 25), (48, "turns", 74), (80, "together", 100),
                                                     (141, "together", 224)])  # fmt: skip
def test_layouts_of_the_recipe(gib, layout, room):
    plan = plan_memory(RECIPE, card=gib * GIB)
    assert plan.fits and plan.layout == layout and plan.layouts[layout] == room
    assert list(plan.layouts.values()) == sorted(plan.layouts.values())  # each layout has more room than the one before
    outside = sum(plan.engine[name] for name in OUTSIDE_ENGINE_SHARE)
    beside = {"together": plan.trainer_peak, "turns": plan.trainer["CUDA context"]}[layout]
    assert plan.engine_memory_share * plan.card + outside + beside <= USABLE_SHARE * plan.card
    assert (plan.host > 0) == (layout == "turns")
    assert plan.advice == (("--max-concurrent-requests 25 (asked for: 64)",) if gib == 24 else ())
    table = render_plan(plan)
    assert f"layout: {layout}" in table and f"--engine-memory-share {plan.engine_memory_share:.2f}" in table
    assert all(name in table for name, size in (plan.trainer | plan.engine).items() if size)


def test_every_weight_of_the_recipe_needs_shards_and_tensor_parallel_engines_have_more_room():
    whole = {"lora_rank": 0, "merged": True, "card": 80 * GIB, "allowed": ("together", "sleep")}
    assert not plan_memory(RECIPE, **whole).fits
    four = plan_memory(RECIPE, **whole, shards=4)
    assert four.fits and four.trainer["weights"] == four.trainer["gradients"] == count_weights(RECIPE).model
    one, two = (plan_memory(RECIPE, card=24 * GIB, tensor_parallel=size, allowed=("turns",)) for size in (1, 2))
    assert two.engine["weights"] == one.engine["weights"] // 2
    assert two.cache_of_trajectory == pytest.approx(one.cache_of_trajectory / 2, rel=0.01)
    assert two.layouts["turns"] > 2 * one.layouts["turns"]


def test_engine_sleeps_where_that_is_enough():
    plan = plan_memory(RECIPE, card=48 * GIB, concurrent=50)
    assert plan.layout == "sleep" and plan.layouts["sleep"] >= 50 > plan.layouts["together"]


@pytest.mark.parametrize(("gib", "asked", "advised"), [
    (16, {}, {"--max-trajectory-tokens"}),
    (24, {"tokens": 24_000}, {"--max-trajectory-tokens"}),
    (80, {"lora_rank": 0, "merged": True}, {"--lora-rank"}),
    (24, {"head_chunk": 8_192}, {"--head-chunk"}),
])  # fmt: skip
def test_what_does_not_fit_fits_with_any_one_piece_of_advice(gib, asked, advised):
    plan = plan_memory(RECIPE, card=gib * GIB, **asked)
    assert not plan.fits and "does not fit" in render_plan(plan)
    names = {"--max-trajectory-tokens": "tokens", "--head-chunk": "head_chunk", "--lora-rank": "lora_rank"}
    found = {}
    for text in plan.advice:
        flag, value = re.match(r"(--[a-z-]+) (\d+) \(asked for: ", text).groups()
        found[flag] = int(value)
        assert plan_memory(RECIPE, card=gib * GIB, **asked | {names[flag]: int(value)}).fits
    assert advised <= set(found)
    if tokens := found.get("--max-trajectory-tokens"):  # and no more than necessary is asked for
        assert not plan_memory(RECIPE, card=gib * GIB, **asked | {"tokens": tokens + 500}).fits


def test_a_card_for_which_nothing_helps_is_told_so():
    plan = plan_memory(RECIPE, card=8 * GIB)
    assert not plan.fits and plan.advice == ("a larger card or a smaller model: no single flag makes it fit",)


def test_the_recipe_is_planned_without_its_model_and_without_the_hub(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(train, "load_model_config", None)  # which would ask the hub
    plan = plan_run(TrainSettings(plan="80"), RolloutSettings())
    assert plan == plan_memory(RECIPE, card=80 * GIB, scored_tokens=train.PROBE_TOKENS, fused=True)
    assert "Qwen/Qwen3.5-4B is not on this machine: this is the plan for its shape as" in capsys.readouterr().out
