"""The value head of `--advantage gae`: where it reads, what it learns, what is kept of it, and that a run goes on with it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_policies import BASES, make_policy, randomise, save_bases

import train
from advantages import Episode, SignalSettings
from data import VALUE_HEAD, CheckpointError, Progress, SettingsError, read_checkpoint
from rollout import RolloutSettings, Turn
from train import TrainSettings, ValueHead, check_run, save_checkpoint

GAE = SignalSettings("gae", discount=0.9, gae_lambda=0.5)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return save_bases(tmp_path_factory.mktemp("bases"))


def played(seed, spans, rewards):
    """A trajectory as far as the head and credit look at it."""
    tokens = torch.randint(0, 50, (spans[-1][1],), generator=torch.Generator().manual_seed(seed)).tolist()
    turns = [
        Turn(start, end, [-1.0] * (end - start), "", "stop", "look", None, "executed", "", (), f"state {n}")
        for n, (start, end) in enumerate(spans)
    ]
    return SimpleNamespace(tokens=tokens, turns=turns, rewards=rewards, reward=math.fsum(rewards))


GROUPS = [
    [played(0, [(5, 8), (12, 15)], [-0.1, 1.0]), played(1, [(5, 9)], [0.0])],
    [played(2, [(4, 6), (9, 11), (13, 18)], [0.0, -0.1, 0.0])],
]


@pytest.mark.parametrize("base", BASES)
def test_a_turns_state_is_what_its_first_token_was_sampled_from(bases, base):
    policy = randomise(make_policy(bases[base]))
    for trajectory in sum(GROUPS, []):
        found = policy.hidden_before_turns(trajectory)
        for state, turn in zip(found, trajectory.turns, strict=True):
            prompt = torch.tensor([trajectory.tokens[: turn.prompt_length]])
            with torch.no_grad():  # of the prompt alone
                output = policy.model(input_ids=prompt, output_hidden_states=True, use_cache=False)
            assert state.numpy() == pytest.approx(output.hidden_states[-1][0, -1].numpy(), abs=1e-5)
    assert all(parameter.grad is None for parameter in policy.parameters)


def test_values_begin_at_zero_and_are_linear_in_the_direction_of_the_state(bases):
    policy = make_policy(bases["qwen3"])
    head = ValueHead(policy.width, 0.1)
    judged = head.judge(policy, GROUPS)
    assert [[e.values_N for e in group] for group in judged] == [[[0, 0], [0]], [[0, 0, 0]]]
    assert judged[0][0][:4] == train.episode_of(GROUPS[0][0])[:4]
    head.fit(judged, GAE)
    weight, bias = (head.tensors()[name].double().numpy() for name in ("weight", "bias"))
    for episode, trajectory in zip(sum(head.judge(policy, GROUPS), []), sum(GROUPS, []), strict=True):
        states = policy.hidden_before_turns(trajectory).double().numpy()
        wanted = states / np.linalg.norm(states, axis=1, keepdims=True) @ weight + bias
        assert episode.values_N == pytest.approx(wanted.tolist(), abs=1e-5) and any(episode.values_N)


def adam(gradient_of, weights, learning_rate, steps):
    """Kingma and Ba 2015, algorithm 1, in float64."""
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(1, steps + 1):
        gradient = gradient_of(weights)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        weights = weights - learning_rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return weights


def test_the_fit_is_adam_on_the_squared_error_to_the_lambda_returns(bases):
    policy = make_policy(bases["qwen3"])
    head = ValueHead(policy.width, 0.02)
    judged = head.judge(policy, GROUPS)
    metrics = head.fit(judged, GAE)
    states = np.concatenate([policy.hidden_before_turns(t).double().numpy() for t in sum(GROUPS, [])])
    inputs = np.concatenate([states / np.linalg.norm(states, axis=1, keepdims=True), np.ones((6, 1))], axis=1)
    # all values were 0, so the lambda-returns are sums of rewards discounted by 0.9 * 0.5 a turn
    targets = np.array([-0.1 + 0.45, 1.0, 0.0, 0.45 * -0.1, -0.1, 0.0])
    wanted = adam(lambda w: 2 * inputs.T @ (inputs @ w - targets) / 6, np.zeros(policy.width + 1), 0.02, train.VALUE_STEPS)
    found = head.tensors()
    assert np.append(found["weight"].numpy(), found["bias"].numpy()) == pytest.approx(wanted, abs=2e-4)
    assert metrics["train/value_loss"] == pytest.approx(np.mean(targets**2), rel=1e-5)
    assert metrics["train/value_explained_variance"] == 0  # values that are all alike explain nothing


def test_explained_variance_is_that_of_the_returns():
    head = ValueHead(2, 0.1)
    head._states_ND = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    episode = Episode(0.5, [-0.5, 1.0], ["a", "b"], [1, 1], [0.4, 0.8])  # returns 0.4 and 1
    assert head.fit([[episode]], GAE)["train/value_explained_variance"] == pytest.approx(1 - 0.1**2 / 0.3**2)


def test_an_update_in_which_nothing_was_sampled_teaches_nothing(bases):
    policy = make_policy(bases["qwen3"])
    head = ValueHead(policy.width, 0.1)
    assert head.judge(policy, [[SimpleNamespace(tokens=[1], turns=[], rewards=[], reward=0.0)]])[0][0].values_N == []
    assert head.fit([[Episode(0.0, [], [], [], [])]], GAE) == {}


def test_a_head_that_was_saved_goes_on_to_the_bit(bases, tmp_path):
    policy = make_policy(bases["qwen3"])
    head, run_dir = ValueHead(policy.width, 0.05), tmp_path / "run"
    head.fit(head.judge(policy, GROUPS), GAE)
    (run_dir / "checkpoints").mkdir(parents=True)
    folder = save_checkpoint(run_dir, policy, Progress(1, 1, 0, "games", {}, {}), 0, head)
    read_checkpoint(folder)
    other = ValueHead(policy.width, 0.05)
    other.load(folder / "state" / VALUE_HEAD)
    for one in (head, other):
        one.fit(one.judge(policy, GROUPS), GAE)
    assert all(torch.equal(value, other.tensors()[name]) for name, value in head.tensors().items())
    assert sorted(head.tensors()) == sorted(
        [f"{name}{kind}" for name in ("bias", "weight") for kind in ("", ".exp_avg", ".exp_avg_sq", ".step")]
    )
    (folder / "state" / VALUE_HEAD).write_bytes(b"spoilt")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no state of this run's value head"):
        other.load(folder / "state" / VALUE_HEAD)
    with pytest.raises(CheckpointError, match="of another shape"):
        save_checkpoint(run_dir, policy, Progress(2, 2, 0, "games", {}, {}), 0, ValueHead(3, 0.05))
        other.load(run_dir / "checkpoints" / "update-0002" / "state" / VALUE_HEAD)


def test_what_cannot_go_with_it_is_refused_by_name():
    play = RolloutSettings()
    with pytest.raises(SettingsError, match="--advantage is 'gae'; it must be another with --shard-trainers"):
        check_run(TrainSettings(lora_rank=0, shard_trainers=True), GAE, play)
    with pytest.raises(SettingsError, match="--value-learning-rate is 0.5; it must be left out with --advantage rloo"):
        check_run(TrainSettings(value_learning_rate=0.5), SignalSettings("rloo"), play)
