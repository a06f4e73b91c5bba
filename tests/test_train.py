"""The training loop's parts on the real engine: parity with it, weight sync, what stops a run; and the whole command."""

import json
import re
from dataclasses import replace

import pytest
import torch

from data import SettingsError
from rollout import (
    RolloutSettings, Sampler, WeightSync, WeightsDidNotArrive, gather_or_cancel, play_group, resolve_sync,
)  # fmt: skip
from advantages import Batch, SignalSettings, credit, episode_of, make_datum, rollout_metrics, training_data
from train import (
    PROBE_TOKENS, MismatchTooLarge, Policy, SharedCard, TrainSettings, closing_lines, learn, make_run_dir,
)  # fmt: skip

# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_steps": 0}, "--max-steps is 0"),
        ({"games_per_batch": 0}, "--games-per-batch is 0"),
        ({"group_size": 0}, "--group-size is 0"),
        ({"group_size": 257}, "--group-size is 257"),
        ({"lora_rank": -1}, "--lora-rank is -1"),
        ({"run_name": "../x"}, "--run-name is '../x'"),
        ({"keep_checkpoints": -1}, "--keep-checkpoints is -1"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"beta2": 1.0}, "--beta2 is 1.0"),
        ({"learning_rate_schedule": "step"}, "--learning-rate-schedule is 'step'"),
        ({"horizon": "20,10"}, "--horizon is '20,10'"),
        ({"horizon": "10,ten"}, "--horizon is '10,ten'"),
        ({"horizon": "0,10"}, "--horizon is '0,10'"),
        ({"epochs": 0}, "--epochs is 0"),
        ({"minibatches": 0}, "--minibatches is 0"),
        ({"fill_groups": 0}, "--fill-groups is 0"),
        ({"warmup_updates": -1}, "--warmup-updates is -1"),
        ({"save_every": -1}, "--save-every is -1"),
        ({"max_mismatch_kl": 0.0}, "--max-mismatch-kl is 0.0"),
        ({"weight_sync": "nfs"}, "--weight-sync is 'nfs'"),
    ],
)
def test_impossible_settings_are_refused_by_flag_and_value(changed, named):
    with pytest.raises(SettingsError, match=re.escape(named)):
        TrainSettings(**changed)


def test_auto_keeps_small_updates_merged_in_fp32_and_as_an_adapter_in_bf16():
    assert resolve_sync("auto", "float32") == "merged"
    assert resolve_sync("auto", "bfloat16") == "adapter"
    assert resolve_sync("adapter", "float32") == "adapter"


def test_without_adapter_weights_are_merged():
    assert resolve_sync("auto", "bfloat16", lora_rank=0) == "merged"
    with pytest.raises(SettingsError, match="--weight-sync is 'adapter'; it must be merged with --lora-rank 0"):
        TrainSettings(lora_rank=0, weight_sync="adapter")


def test_run_folder_that_exists_or_cannot_be_written_is_refused(tmp_path):
    make_run_dir(tmp_path / "run", {"a": 1})
    assert json.loads((tmp_path / "run" / "settings.json").read_text()) == {"a": 1}
    with pytest.raises(SettingsError, match="exists: choose another --run-name"):
        make_run_dir(tmp_path / "run", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot write to .*choose another --runs-dir"):
        make_run_dir(tmp_path / "file" / "run", {})


# --- rollout, update and sync against the real engine ---------------------------------------------------------------


@pytest.fixture
def policy(warm_model):
    return Policy(warm_model, lora_rank=8, learning_rate=3e-3, device="cpu", seed=1)


@pytest.fixture
def sync(run, policy, sampler, warm_model):
    """A weight sync to the session's engine, which gets its first weights back afterwards."""
    sync = WeightSync(policy, sampler, "merged", "float32")
    yield sync
    run(WeightSync(Policy(warm_model, lora_rank=8, device="cpu"), sampler, "merged", "float32").push(0))
    sampler.policy_version = "base"
    sync.close()


def roll(run, sampler, chat, pool, games, update, settings):
    groups = run(gather_or_cancel(play_group(sampler, chat, pool, game, 4, update, settings) for game in games))
    return groups, credit([[episode_of(t) for t in group] for group in groups], SIGNAL)


def difference_from_engine(policy, groups):
    """|trainer - engine| a sampled token, over all trajectories of all groups."""
    gaps = []
    for trajectory in sum(groups, []):
        datum = make_datum(trajectory.tokens, trajectory.spans, trajectory.logprobs, [1.0] * len(trajectory.turns))
        with torch.no_grad():
            logprobs, _ = policy.logprobs(datum)
        gaps.append((logprobs - datum.old_logprobs_T[datum.mask_T]).abs())
    return torch.cat(gaps)


def turn_by_turn(groups, advantages_K):
    """Of one group: each branch's advantage for all of its turns."""
    return [[[a] * len(t.turns) for a, t in zip(advantages_K, groups[0], strict=True)]]


SIGNAL = SignalSettings()


def learn_from(policy, groups, advantages):
    """Metrics of one update, and a text to probe the engine with."""
    data = training_data(groups, advantages, SIGNAL)
    settings = TrainSettings(learning_rate=policy.optimizer.param_groups[0]["lr"])
    return learn(policy, Batch(data), settings, SIGNAL), data[0].tokens_T[:PROBE_TOKENS].tolist()


def test_trainer_and_engine_agree_before_and_after_two_updates(
    run, policy, sync, sampler, chat, pool, play_settings, starter_games
):
    counted = sampler.counts
    groups, advantages = roll(run, sampler, chat, pool, starter_games[:2], 0, play_settings)
    counts = sampler.counts.since(counted)
    assert counts.computed < 0.5 * counts.prompt  # the comparison is one with prefix-cache hits
    assert difference_from_engine(policy, groups).mean() < 1e-4
    first = groups
    for update in (1, 2):
        metrics, probe = learn_from(policy, groups, advantages)
        assert metrics["mismatch/mean"] < 1e-4 and metrics["train/clip_fraction"] == 0
        run(sync.push(update, probe=probe))
        groups, advantages = roll(run, sampler, chat, pool, starter_games[:2], update, play_settings)
        gaps = difference_from_engine(policy, groups)
        assert gaps.mean() < 1e-4 and gaps.max() < 1e-3
        assert {t.policy_version for group in groups for t in group} == {f"update-{update}"}
    # and the weights have really moved: on the first tokens the policy is now elsewhere
    assert difference_from_engine(policy, first).mean() > 1e-2


@pytest.mark.slow
def test_adapter_way_changes_the_engine_as_the_merged_way_does(run, warm_model, chat, policy):
    """The other way of sync, on an engine of its own that takes LoRA requests."""
    settings = RolloutSettings(base_model=warm_model, max_trajectory_tokens=2_000)
    adapted = run(Sampler.start(settings, chat.stop_token_ids, lora_rank=8))
    try:
        prompt = chat.first_prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "Task: look. " * 20}])
        sync = WeightSync(policy, adapted, "adapter", "float32")
        base = run(adapted.sample(prompt, 5, 32))[0]
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in policy.model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.05)
            run(sync.push(version, probe=prompt))
            [completion] = run(adapted.sample(prompt, 5, 32))
            span = len(prompt), len(prompt) + len(completion.tokens)
            datum = make_datum(prompt + completion.tokens, [span], [completion.logprobs], [1.0])
            with torch.no_grad():
                logprobs, _ = policy.logprobs(datum)
            assert (logprobs - torch.tensor(completion.logprobs)).abs().mean() < 1e-4
            assert completion.tokens != base.tokens
            assert set(run(adapted._engine.list_loras())) == {version + 1}
        sync.close()
    finally:
        adapted.close()


@pytest.mark.slow
def test_two_engines_play_as_one_and_both_get_the_weights(run, warm_model, chat, pool, policy, play_settings, starter_games):
    """Fewer requests at a time change the last bits, so tokens may part late; the weights may not."""
    both = run(Sampler.start(replace(play_settings, engine_data_parallel=2, engine_cache_gb=0.5), chat.stop_token_ids))
    try:
        sync = WeightSync(policy, both, "merged", "float32")
        groups, advantages = roll(run, both, chat, pool, starter_games[:4], 0, play_settings)
        _, probe = learn_from(policy, groups, advantages)
        run(sync.push(1, probe=probe))  # raises unless the scores of both change
        expected = policy.score(probe)
        for rank in (0, 1):
            assert run(both.score(probe, rank)) == pytest.approx(expected, abs=1e-4)
        assert [both.next_rank() for _ in range(4)] == [1, 0, 1, 0]
        groups, _ = roll(run, both, chat, pool, starter_games[:4], 1, play_settings)
        assert difference_from_engine(policy, groups).mean() < 1e-4
        assert {t.policy_version for group in groups for t in group} == {"update-1"}
        sync.close()
    finally:
        both.close()


@pytest.mark.slow
def test_an_engine_split_over_two_workers_gets_the_weights_either_way(run, warm_model, chat, policy):
    split = RolloutSettings(base_model=warm_model, max_trajectory_tokens=2_000, engine_tensor_parallel=2, engine_cache_gb=0.5)
    sampler = run(Sampler.start(split, chat.stop_token_ids, lora_rank=8))
    try:
        prompt = chat.first_prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "Task: look. " * 20}])
        assert run(sampler.score(prompt)) == pytest.approx(policy.score(prompt), abs=1e-4)
        with policy.random_adapter():
            expected = policy.score(prompt)
            for version, way in enumerate(("adapter", "merged")):
                sync = WeightSync(policy, sampler, way, "float32")
                run(sync.push(version, probe=prompt))
                assert run(sampler.score(prompt)) == pytest.approx(expected, abs=1e-4)
                if way == "adapter":
                    run(sampler.drop_adapter())
                sync.close()
    finally:
        sampler.close()


class Recorded:
    """Stands where sampler and policy do and writes down what is asked of them."""

    def __init__(self):
        self.events, self.device = [], torch.device("cuda")

    async def sleep(self):
        self.events.append("sleep")

    async def wake(self):
        self.events.append("wake")

    def move(self, device):
        self.device = device
        self.events.append(device.type)


@pytest.mark.parametrize(("layout", "first", "later"), [
    ("together", [], []),
    ("sleep", ["sleep", "make", "wake"], ["sleep", "work", "wake"]),
    ("turns", ["sleep", "make", "cpu", "wake"], ["sleep", "cuda", "work", "cpu", "wake"]),
])  # fmt: skip
def test_who_shares_a_card_leaves_it_before_the_other_comes(run, layout, first, later):
    both = Recorded()
    card = SharedCard(layout, both)
    for work, expected in (("make", first), ("work", later), ("work", later)):
        both.events.clear()
        run(card.to_trainer())
        both.events.append(work)
        run(card.to_engine(both))
        assert both.events == (expected or [work])
    assert both.device.type == ("cpu" if layout == "turns" else "cuda")


def test_weights_that_do_not_reach_the_engine_stop_the_run(run, policy, sync, sampler, monkeypatch):
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)

    async def lost(folder, version):
        assert (folder / "model.safetensors").stat().st_size > 0

    monkeypatch.setattr(sampler, "reload", lost)
    with pytest.raises(WeightsDidNotArrive, match="weights update-5 .*did not reach it"):
        run(sync.push(5, probe=list(range(40))))
    monkeypatch.undo()
    run(sync.push(6, probe=list(range(40))))


def test_batch_sampled_with_other_weights_is_not_trained_on(
    run, policy, sampler, chat, pool, play_settings, starter_games
):
    groups, advantages = roll(run, sampler, chat, pool, starter_games[:1], 0, play_settings)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    moved = [parameter.detach().clone() for parameter in policy.parameters]
    with pytest.raises(MismatchTooLarge, match="above --max-mismatch-kl 0.03.*no step was taken"):
        learn_from(policy, groups, turn_by_turn(groups, [1.0, -1.0, 0.5, -0.5]))
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters, moved, strict=True))
    with pytest.raises(MismatchTooLarge):  # also where nothing would be trained
        learn_from(policy, groups, turn_by_turn(groups, [0.0] * 4))


def test_update_without_advantage_is_skipped_and_leaves_the_weights_alone(
    run, policy, sampler, chat, pool, play_settings, starter_games
):
    groups, _ = roll(run, sampler, chat, pool, starter_games[:1], 0, play_settings)
    before = [parameter.detach().clone() for parameter in policy.parameters]
    metrics, _ = learn_from(policy, groups, turn_by_turn(groups, [0.0] * 4))
    assert set(metrics) == {"mismatch/mean", "mismatch/max", "mismatch/k1", "mismatch/k3"}
    assert metrics["mismatch/mean"] < 1e-4  # measured all the same
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters, before, strict=True))
    metrics, _ = learn_from(policy, groups, turn_by_turn(groups, [0.0, 1.0, 0.0, -1.0]))
    assert metrics["tokens/trained"] == groups[0][1].sampled_tokens + groups[0][3].sampled_tokens


def test_closing_lines_pool_both_ends_of_a_run():
    lines = [{"rollout/trajectories": 64, "reward/success": won / 64, "rollout/invalid_actions": 1.0} for won in range(8)]
    first, last = closing_lines(lines).splitlines()
    assert first.startswith("first 2 updates: 1 of 128 won (0.8%, 95 % interval 0.1% to 4.3%), 1.00 invalid")
    assert last.startswith("last 2 updates: 13 of 128 won (10.2%, 95 % interval 6.0% to 16.6%)")


def test_rollout_metrics_against_the_records(run, sampler, chat, pool, play_settings, starter_games):
    groups, advantages = roll(run, sampler, chat, pool, starter_games[:2], 0, play_settings)
    records = [trajectory.record() for group in groups for trajectory in group]
    metrics = rollout_metrics(groups, advantages)
    turns = sum(r["steps"] for r in records)
    assert metrics["rollout/trajectories"] == 8
    assert metrics["reward/mean"] == pytest.approx(sum(r["reward"] for r in records) / 8)
    assert metrics["reward/success"] == sum(r["won"] for r in records) / 8
    assert metrics["rollout/invalid_actions"] == sum(r["invalid_actions"] for r in records) / 8
    assert metrics["rollout/valid_tool_calls"] == pytest.approx(sum(r["valid_tool_calls"] for r in records) / turns)
    assert metrics["rollout/admissible_actions"] == pytest.approx(sum(r["admissible_actions"] for r in records) / turns)
    assert metrics["advantage/trained_trajectories"] == sum(any(turns) for group in advantages for turns in group)
