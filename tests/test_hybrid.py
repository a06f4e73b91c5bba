"""A small Qwen3.5 (Gated DeltaNet and attention, stored as a vision-language model): trainer against engine, in bf16.

The engine's Gated-DeltaNet kernel for CPUs has no fp32 path, so the bound is that of bf16.
"""

import asyncio
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data import SettingsError
from protocol import is_hybrid, load_chat_tokens
from rollout import RolloutSettings, Sampler, WeightSync, WeightsDidNotArrive, check_model, engine_dtype, resolve_sync
from advantages import make_datum
from train import Policy, SharedCard, rehearse_adapter
from eval import SavedAdapter


@pytest.fixture(scope="module")
def settings(hybrid_model):
    return RolloutSettings(base_model=hybrid_model, max_trajectory_tokens=4_000)


@pytest.fixture(scope="module")
def chat(hybrid_model):
    return load_chat_tokens(hybrid_model)


@pytest.fixture(scope="module")
def sampler(run, settings, chat):
    sampler = run(Sampler.start(settings, chat.stop_token_ids, lora_rank=8))
    yield sampler
    sampler.close()


async def converse(sampler, chat, version, turns):
    """Turns of whatever the random model says, as a datum."""
    tokens = chat.first_prompt([{"role": "system", "content": "Act."}, {"role": "user", "content": "Task: look. " * 60}])
    spans, logprobs = [], []
    for turn in range(turns):
        [completion] = await sampler.sample(list(tokens), 100 * version + turn, 24)
        spans.append((len(tokens), len(tokens) + len(completion.tokens)))
        logprobs.append(completion.logprobs)
        tokens += completion.tokens
        tokens += chat.extension(completion.tokens, f"Step {turn}: executed\nObservation: You see nothing in drawer 1." * 3)
    return make_datum(tokens, spans, logprobs, [1.0] * len(spans))


def talk(run, sampler, chat, version):
    """Eight turns; returns the datum and the engine's token counts."""
    counted = sampler.counts
    return run(converse(sampler, chat, version, 8)), sampler.counts.since(counted)


def gaps(policy, datum):
    with torch.no_grad():
        logprobs, _ = policy.logprobs(datum)
    return (logprobs - datum.old_logprobs_T[datum.mask_T]).abs()


def test_hybrid_is_recognised_and_runs_in_bf16_with_an_adapter(hybrid_model, warm_model, settings):
    assert is_hybrid(hybrid_model) and not is_hybrid(warm_model)
    assert engine_dtype(settings) == "bfloat16" and resolve_sync("auto", "bfloat16") == "adapter"
    with pytest.raises(SettingsError, match="--dtype is 'float32'.*bfloat16 only"):
        check_model(RolloutSettings(base_model=hybrid_model, dtype="float32"))


def test_a_random_adapter_is_sent_and_taken_back_in_turns_and_a_missing_part_is_noticed(
    run, sampler, chat, hybrid_model, monkeypatch
):
    """The turns are real; on a CPU the engine keeps its memory in its sleep."""
    card = SharedCard("turns", sampler)
    probe = chat.first_prompt([{"role": "user", "content": "Task: look at drawer 1. " * 20}])

    run(card.to_trainer())
    assert run(sampler._engine.is_sleeping())
    policy = Policy(hybrid_model, lora_rank=8, device="cpu", dtype=torch.bfloat16)
    run(card.to_engine(policy))
    assert not run(sampler._engine.is_sleeping())
    sync, scores = WeightSync(policy, sampler, "adapter", "bfloat16"), run(sampler.score(probe))
    assert run(rehearse_adapter(policy, sampler, sync, card, probe)) < 0.1
    assert not policy.differs_from_base() and sampler.policy_version == "base"
    assert run(sampler.adapters()) == [] and run(sampler.score(probe)) == scores

    whole = policy.save_adapter

    def times(factor, part):
        def save_adapter(folder, engine_layout=False):
            whole(folder, engine_layout)
            tensors = load_file(folder / "adapter_model.safetensors")
            spoilt = {name: tensor * (factor if part in name else 1) for name, tensor in tensors.items()}
            save_file(spoilt, folder / "adapter_model.safetensors", metadata={"format": "pt"})

        return save_adapter

    monkeypatch.setattr(policy, "save_adapter", times(0, "in_proj_z"))
    monkeypatch.setattr("train.REHEARSAL", 2_000_000)
    with pytest.raises(WeightsDidNotArrive, match="the engine ignores the adapter's in_proj_z"):
        run(rehearse_adapter(policy, sampler, sync, card, probe))
    # something arrives of every kind, but it is not what was sent
    monkeypatch.setattr(policy, "save_adapter", times(-1, "lora_B"))
    monkeypatch.setattr("train.REHEARSAL", 3_000_000)
    with pytest.raises(WeightsDidNotArrive, match="does not play with all that is trained"):
        run(rehearse_adapter(policy, sampler, sync, card, probe))
    assert run(sampler.adapters()) == []
    sync.close()


def test_trainer_and_engine_agree_before_and_after_new_weights_with_cache_hits(run, sampler, chat, hybrid_model, tmp_path):
    policy = Policy(hybrid_model, lora_rank=8, device="cpu", dtype=torch.bfloat16)
    assert policy.vision_language
    base, counts = talk(run, sampler, chat, 0)
    assert counts.computed < 1.15 * len(base.tokens_T) < 0.25 * counts.prompt  # every token about once
    assert gaps(policy, base).mean() < 0.02
    sync = WeightSync(policy, sampler, "adapter", "bfloat16")
    generator = torch.Generator().manual_seed(3)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        run(sync.push(version, probe=base.tokens_T[:64].tolist()))
        datum, counts = talk(run, sampler, chat, version)
        assert counts.computed < counts.prompt
        assert gaps(policy, datum).mean() < 0.02
        assert set(run(sampler._engine.list_loras())) == {version + 1}  # the one before is gone
        # the adapter did something: the policy is far from what sampled before it
        assert gaps(policy, base).mean() > 0.1
    sync.close()
    # and the saved adapter goes the same way without its base being loaded, as eval.py sends it
    policy.save_adapter(tmp_path / "saved")
    scores = run(sampler.score(base.tokens_T[:64].tolist()))
    saved = SavedAdapter(tmp_path / "saved", hybrid_model)
    assert saved.differs_from_base()
    again = WeightSync(saved, sampler, "adapter", "bfloat16")
    run(again.push(9))
    again.close()
    assert run(sampler.score(base.tokens_T[:64].tolist())) == scores
    assert set(run(sampler._engine.list_loras())) == {10}


@pytest.mark.slow
def test_fine_matching_has_the_most_prefix_hits_at_equal_logprobs(run, settings, chat, hybrid_model, capsys):
    """8 trajectories of 20 growing turns under each setting of the engine; `-s` shows the table."""
    policy = Policy(hybrid_model, lora_rank=8, device="cpu", dtype=torch.bfloat16)

    async def play(sampler):
        counted = sampler.counts
        data = await asyncio.gather(*(converse(sampler, chat, version, 20) for version in range(8)))
        return data, sampler.counts.since(counted)

    shares = {}
    for unit in (None, 128, 64, 32):
        sampler = run(Sampler.start(replace(settings, max_trajectory_tokens=8_000), chat.stop_token_ids, prefix_match_unit=unit))
        try:
            data, counts = run(play(sampler))
        finally:
            sampler.close()
        once = sum(len(datum.tokens_T) for datum in data) / counts.prompt
        shares[unit] = counts.computed / counts.prompt
        gap = torch.cat([gaps(policy, datum) for datum in data]).mean()
        with capsys.disabled():
            print(f"prefix_match_unit {unit}: computed / read {shares[unit]:.3f} (each token once: {once:.3f}), "
                  f"engine against trainer {gap:.4f} nats a token")  # fmt: skip
        assert gap < 0.02
    assert shares[32] == min(shares.values()) < 0.15 and shares[32] < 0.6 * shares[None]
