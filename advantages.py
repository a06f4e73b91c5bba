"""The learning signal: from the trajectories of an update to what the optimizer sees. Pure functions.

In the order of an update: a group's rewards become advantages (credit); a trajectory with an advantage becomes a
training datum; the policy's log-probabilities at its sampled tokens are computed; loss and metrics follow from them.

A group is the K trajectories of one game in one update. By default all turns of a trajectory have one advantage: what
it earned above the group's mean. So they sum to zero and a group whose rewards are all equal teaches nothing. The
other estimators tell turns apart; every one is a pure function of rewards by turn and ids of the world's states.

Shown by: `uv run --extra cpu pytest tests/test_advantages.py tests/test_credit*.py tests/test_update.py`
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, islice
from operator import mul
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from data import flag, require
from protocol import PrefixViolation, check_prefix_extension
from rollout import Trajectory


# --- settings -----------------------------------------------------------------------------------------------------

LOSS_SUMS = ("trajectory-tokens", "token-mean", "turn-mean")


@dataclass(frozen=True)
class SignalSettings:
    """What an update learns from: credit and loss; the defaults are the recipe.

    A flag of credit that the chosen estimator does not read must stay at its default.
    """

    advantage: str = flag(
        "group-mean", "credit: group-mean, group-std, rloo, reinforce++, turn-return, gigpo, state-value or gae"
    )
    discount: float = flag(
        0.95, "turn-return, gigpo, state-value, gae: discount a turn; lower it to credit the turns next to a reward"
    )
    gae_lambda: float = flag(
        0.95, "state-value, gae: 1 trusts returns (poor values), 0 the states' values; try 0.5 for state-value"
    )
    state_values: str = flag(
        "mean", "state-value: mean of the returns from a state, or chain (solved on the graph) if branches meet often"
    )
    step_weight: float = flag(
        1.0, "gigpo: weight of the comparison among visits of one state; 0 where states hardly ever recur"
    )
    advantage_std: bool = flag(
        False, "gigpo, state-value, gae: divide by the standard deviation; use it where games differ in scale"
    )
    group_baseline: bool = flag(
        False, "reinforce++: subtract the group's mean before whitening; use it where games differ in difficulty"
    )
    ppo_clip_low: float = flag(0.8, "lower clip threshold of the ratio")
    ppo_clip_high: float = flag(1.2, "upper clip threshold of the ratio")
    loss_sum: str = flag(
        "trajectory-tokens", "how the loss adds up: trajectory-tokens (every sampled token counts 1), token-mean (their mean "
        "over the update) or turn-mean (every turn counts the same, however wordy)",
    )  # fmt: skip
    kl_coefficient: float = flag(0.0, "weight of KL(policy || base) in the loss, to stay near the base; needs a LoRA")
    entropy_coefficient: float = flag(0.0, "weight of the entropy in the loss, to keep exploring")

    def __post_init__(self) -> None:
        require(self.advantage in ESTIMATORS, "advantage", self.advantage, f"one of {', '.join(ESTIMATORS)}")
        require(0 <= self.discount <= 1, "discount", self.discount, "from 0 to 1")
        require(0 <= self.gae_lambda <= 1, "gae_lambda", self.gae_lambda, "from 0 to 1")
        require(0 <= self.step_weight < math.inf, "step_weight", self.step_weight, "a finite number, at least 0")
        require(self.state_values in STATE_VALUES, "state_values", self.state_values, "mean or chain")
        _, read = ESTIMATORS[self.advantage]
        for f in fields(self):
            left_alone = f"{f.default} with --advantage {self.advantage}, which does not read it"
            of_credit = any(f.name in names for _, names in ESTIMATORS.values())
            value = getattr(self, f.name)
            require(not of_credit or f.name in read or value == f.default, f.name, value, left_alone)
        require(
            0 <= self.ppo_clip_low < 1 < self.ppo_clip_high,
            "ppo_clip_low", f"{self.ppo_clip_low} (with --ppo-clip-high {self.ppo_clip_high})", "below 1, and --ppo-clip-high above 1",
        )  # fmt: skip
        require(self.loss_sum in LOSS_SUMS, "loss_sum", self.loss_sum, " or ".join(LOSS_SUMS))
        for name in ("kl_coefficient", "entropy_coefficient"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "0 or more")

    @property
    def has_other_terms(self) -> bool:
        """Whether trajectories without advantage have a gradient too."""
        return bool(self.kl_coefficient or self.entropy_coefficient)


# --- credit -------------------------------------------------------------------------------------------------------


class Episode(NamedTuple):
    """What credit needs to know of a trajectory of N turns.

    How the trajectory ended is not among it: the state behind the last turn is worth 0 whether the game was won or
    cut off at a limit. The limit is part of the task (a win after it does not count, and the model is told the
    number of its step); the value that other branches give that state has more steps left in it than this one had.
    """

    reward: float  # of the trajectory; the sum of its turns'
    rewards_N: Sequence[float]  # by turn: -0.1 if invalid, +1 on the winning turn
    states_N: Sequence[str]  # id of the world's state in which the turn was taken, equal across branches of a game
    tokens_N: Sequence[int]  # tokens sampled in the turn: how often it counts where a batch is whitened
    values_N: Sequence[float] = ()  # the value head's estimate of the state before the turn; read by gae alone


def episode_of(trajectory: Trajectory) -> Episode:
    """A trajectory as credit sees it."""
    tokens_N = [len(turn.logprobs) for turn in trajectory.turns]
    return Episode(trajectory.reward, trajectory.rewards, [turn.state_id for turn in trajectory.turns], tokens_N)


Groups = Sequence[Sequence[Episode]]  # by group, by branch
Advantages = list[list[list[float]]]  # by group, by branch, by turn


def credit(groups: Groups, settings: SignalSettings) -> Advantages:
    """For every trajectory of every group one advantage a turn, by the estimator that `settings` name.

    What is left of equal returns by rounding (below 1e-9) is exactly 0.0, so that it can be left out of the update.
    Raises ValueError, with group and branch, for a batch or a group that is empty, for rewards that are not finite or
    do not sum to the trajectory's, and for sequences that do not have one entry a turn.
    """
    if not groups:
        raise ValueError("a batch without groups has no advantages")
    for g, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {g}: a group without trajectories has no advantages")
        for k, episode in enumerate(group):
            _check_episode(episode, f"group {g} branch {k}", settings.advantage == "gae")
    estimate, _ = ESTIMATORS[settings.advantage]
    return [[[_settled(a) for a in turns] for turns in group] for group in estimate(groups, settings)]


def _check_episode(episode: Episode, where: str, valued: bool) -> None:
    n = len(episode.rewards_N)
    if not all(map(math.isfinite, (episode.reward, *episode.rewards_N))):
        raise ValueError(f"{where}: rewards must be finite numbers, got {episode.reward} = {list(episode.rewards_N)}")
    if len(episode.states_N) != n or len(episode.tokens_N) != n:
        states, tokens = len(episode.states_N), len(episode.tokens_N)
        raise ValueError(f"{where}: {n} rewards, {states} states, {tokens} token counts; every turn has one of each")
    if abs(math.fsum(episode.rewards_N) - episode.reward) > 1e-6:
        raise ValueError(f"{where}: the turns' rewards sum to {math.fsum(episode.rewards_N)}, not to {episode.reward}")
    if valued and (len(episode.values_N) != n or not all(map(math.isfinite, episode.values_N))):
        raise ValueError(f"{where}: gae needs one finite value for each of {n} turns, got {list(episode.values_N)}")


def _settled(number: float) -> float:
    """The number, or exactly 0.0 where it is what rounding leaves of equal returns."""
    return number if abs(number) > 1e-9 else 0.0


def _deviations(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """v - mean(v), where value i counts `counts[i]` times; sums are exact, so the values' order does not matter."""
    mean = math.fsum(map(mul, values, counts)) / max(1, sum(counts))
    return [_settled(value - mean) for value in values]


def _standardized(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """(v - mean(v)) / (std(v) + 1e-6), where value i counts `counts[i]` times.

    The standard deviation is the sample's (n - 1), as torch.std in the reference implementations of GRPO, GiGPO and
    REINFORCE++. Its floor of 1e-6 is theirs too: a hundred-thousandth of the smallest difference between rewards.
    """
    deviations = _deviations(values, counts)
    variance = math.fsum(n * d * d for n, d in zip(counts, deviations)) / max(1, sum(counts) - 1)
    return [d / (math.sqrt(variance) + 1e-6) for d in deviations]


def _compared(values: Sequence[float], std: bool) -> list[float]:
    return (_standardized if std else _deviations)(values, [1] * len(values))


def _every_turn(group: Sequence[Episode], numbers_K: Sequence[float]) -> list[list[float]]:
    """One number a trajectory, given to each of its turns."""
    return [[number] * len(episode.rewards_N) for episode, number in zip(group, numbers_K, strict=True)]


def _shaped(numbers: Iterable[float], groups: Groups) -> Advantages:
    """One number a turn of the whole batch, in order, cut into groups and trajectories."""
    rest = iter(numbers)
    return [[list(islice(rest, len(episode.rewards_N))) for episode in group] for group in groups]


def _play_alike(group: Sequence[Episode]) -> bool:
    """Whether the group's branches went through the same states for the same rewards: nothing to tell them apart."""
    return len({(tuple(episode.states_N), tuple(episode.rewards_N)) for episode in group}) == 1


def group_advantages(rewards_K: Sequence[float]) -> list[float]:
    """A_k = R_k - mean(R), one advantage a trajectory; no division by the standard deviation.

    The baseline of GRPO (Shao et al., "DeepSeekMath", 2024, section 4.1) without its normalisation, which would weigh
    games with nearly equal rewards up (Liu et al., "Understanding R1-Zero-Like Training", 2025, section 3.1).
    Sums to 0 over the group. What is left of equal rewards by rounding (below 1e-9) is exactly 0.0, so that it can be
    left out of the update. Raises ValueError for an empty group or a reward that is not finite.
    """
    if not rewards_K:
        raise ValueError("a group without trajectories has no advantages")
    if not all(math.isfinite(reward) for reward in rewards_K):
        raise ValueError(f"rewards must be finite numbers, got {list(rewards_K)}")
    return _deviations(rewards_K, [1] * len(rewards_K))


def _group_mean(groups: Groups, settings: SignalSettings) -> Advantages:
    """`group_advantages`, one number for all turns of a trajectory."""
    return [_every_turn(group, group_advantages([episode.reward for episode in group])) for group in groups]


def _group_std(groups: Groups, settings: SignalSettings) -> Advantages:
    """A_k = (R_k - mean(R)) / std(R), one number for all turns of a trajectory.

    Source: Shao et al., "DeepSeekMath" (2024), arXiv 2402.03300, section 4.1.2 (outcome supervision).
    Sums to 0 over the group, its squares to K - 1 where rewards differ, however little they do. So two branches that
    are one invalid action apart move the policy as much as a win and a loss: biased (Hu et al. 2025, section 2.2).
    """
    return [_every_turn(group, _compared([episode.reward for episode in group], std=True)) for group in groups]


def _rloo(groups: Groups, settings: SignalSettings) -> Advantages:
    """A_k = R_k - mean of the other branches' R = K / (K - 1) * (R_k - mean(R)); 0 where there is no other.

    Source: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019); for language models Ahmadian et
    al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024), arXiv 2402.14740, the RLOO estimator.
    Sums to 0 over the group. Unbiased, where group-mean shrinks the gradient by (K - 1) / K; for groups of one size
    that is a constant, so the two differ in the learning rate alone.
    """
    advantages = []
    for group in groups:
        larger = len(group) / max(1, len(group) - 1)
        above_mean = group_advantages([episode.reward for episode in group])
        advantages.append(_every_turn(group, [larger * a for a in above_mean]))
    return advantages


def _reinforce_plus_plus(groups: Groups, settings: SignalSettings) -> Advantages:
    """A = (B - mean(B)) / std(B) over all sampled tokens of the batch; B = R_k, with `group_baseline` R_k - mean(R).

    Source: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization"
    (2025), arXiv 2501.03262v9: equations 4 and 5 without KL penalty, with baseline 6 and 7. An advantage of theirs
    belongs to a token, so a trajectory counts as often as it has sampled tokens.
    Sums to 0 over the batch's tokens, its squares to tokens - 1. Without baseline it does not sum to 0 over a group:
    a game that every branch wins is praised, one that all lose blamed, whatever they did in it.
    """
    if settings.group_baseline:
        rewards = [a for group in groups for a in group_advantages([episode.reward for episode in group])]
    else:
        rewards = [episode.reward for group in groups for episode in group]
    whitened = iter(_standardized(rewards, [sum(episode.tokens_N) for group in groups for episode in group]))
    return [_every_turn(group, list(islice(whitened, len(group)))) for group in groups]


def discounted_returns(rewards_N: Sequence[float], discount: float) -> list[float]:
    """G_t = r_t + discount * G_(t+1) from every turn t on; nothing follows the last turn."""
    backwards = accumulate(reversed(rewards_N), lambda later, reward: reward + discount * later)
    return list(backwards)[::-1]


def _turn_return(groups: Groups, settings: SignalSettings) -> Advantages:
    """A_kt = G_kt - mean of G_jt over the branches j that have a turn t.

    Source: Chen et al., "Group Policy Gradient" (2025), arXiv 2510.03679, equation 5 with the turn's number as bin.
    Sums to 0 over the branches at every turn. A turn is not blamed for what was before it. The
    branches stand in different states at turn t, which the baseline ignores, and the last one that still plays is
    compared with nobody: 0.
    """
    advantages = []
    for group in groups:
        returns = [discounted_returns(episode.rewards_N, settings.discount) for episode in group]
        turns = [[] for _ in group]
        for t in range(max(map(len, returns))):
            playing = [k for k, returns_N in enumerate(returns) if len(returns_N) > t]
            for k, a in zip(playing, _compared([returns[k][t] for k in playing], std=False)):
                turns[k].append(a)
        advantages.append(turns)
    return advantages


def _gigpo(groups: Groups, settings: SignalSettings) -> Advantages:
    """A_kt = E_k + step_weight * S_kt: what the trajectory earned above the group's mean, plus what followed this
    visit of the state above the mean of all visits of that state in the group (0 if there was no other).

    E compares rewards R_k, S compares discounted returns G_kt; with `advantage_std` both are divided by the standard
    deviation of what they compare. Branches that all play alike have nothing to compare: 0.
    Source: Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training" (2025), arXiv 2505.10978:
    equations 3 (E), 5 (G), 6 (visits), 7 (S), 8 (sum); discount 0.95 and weight 1 there. The mean of E is over
    trajectories, as in the paper; its reference implementation weighs each by its number of turns.
    E sums to 0 over the group's trajectories, S over the visits of each state. All visits count, so a branch that
    lingers in a state makes up most of its own baseline there.
    """
    advantages = []
    for group in groups:
        if _play_alike(group):
            advantages.append(_every_turn(group, [0.0] * len(group)))
            continue
        above_mean = _compared([episode.reward for episode in group], settings.advantage_std)
        returns = [g for episode in group for g in discounted_returns(episode.rewards_N, settings.discount)]
        visits = defaultdict(list)
        for place, state in enumerate(state for episode in group for state in episode.states_N):
            visits[state].append(place)
        steps = [0.0] * len(returns)
        for places in filter(lambda places: len(places) > 1, visits.values()):
            for place, a in zip(places, _compared([returns[place] for place in places], settings.advantage_std)):
                steps[place] = settings.step_weight * a
        [turns] = _shaped(steps, [group])
        advantages.append([[e + s for s in steps_N] for e, steps_N in zip(above_mean, turns)])
    return advantages


def generalized_advantages(rewards_N: Sequence[float], values_N: Sequence[float], discount: float,
                           gae_lambda: float) -> list[float]:
    """A_t = d_t + discount * lambda * A_(t+1) with d_t = r_t + discount * V_(t+1) - V_t; V and A are 0 after the end.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2015), arXiv
    1506.02438, equations 11 and 16, here by turn rather than by token.
    lambda 1 gives G_t - V_t, whatever the later values are. With lambda 0, sum of discount^t A_t = G_0 - V_0.
    """
    advantages, later, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards_N), reversed(values_N), strict=True):
        later = reward + discount * value_after - value + discount * gae_lambda * later
        value_after = value
        advantages.append(later)
    return advantages[::-1]


def _mean_values(group: Sequence[Episode], discount: float) -> dict[str, float]:
    """V(s) = mean of G_kt over all visits (k, t) of s in the group."""
    returns = defaultdict(list)
    for episode in group:
        for state, following in zip(episode.states_N, discounted_returns(episode.rewards_N, discount)):
            returns[state].append(following)
    return {state: math.fsum(following) / len(following) for state, following in returns.items()}


def _chain_values(group: Sequence[Episode], discount: float) -> dict[str, float]:
    """V(s) = mean of r + discount * V(s') over all visits of s in the group: the values of the Markov chain that the
    branches drew, in which a branch that meets another shares its future.

    Linear equations for the S states that were visited more than once; a state visited once is worth what followed,
    up to the next of them. They have one solution for discount 1 too, as every trajectory ends.
    """
    visits = Counter(state for episode in group for state in episode.states_N)
    places = {state: i for i, state in enumerate(sorted(state for state, n in visits.items() if n > 1))}
    matrix_SS, earned_S = np.diag([float(visits[state]) for state in places]), np.zeros(len(places))
    for episode in group:
        earned, discounted, meeting = 0.0, 0.0, 0  # what follows is worth earned + discounted * V(meeting)
        for reward, state in zip(reversed(episode.rewards_N), reversed(episode.states_N)):
            earned, discounted = reward + discount * earned, discount * discounted
            if state in places:
                matrix_SS[places[state], meeting] -= discounted
                earned_S[places[state]] += earned
                earned, discounted, meeting = 0.0, 1.0, places[state]
    values = dict(zip(places, np.linalg.solve(matrix_SS, earned_S).tolist()))
    for episode in group:
        following = 0.0
        for reward, state in zip(reversed(episode.rewards_N), reversed(episode.states_N)):
            following = values.setdefault(state, reward + discount * following)
    return values


STATE_VALUES = {"mean": _mean_values, "chain": _chain_values}


def _state_value(groups: Groups, settings: SignalSettings) -> Advantages:
    """`generalized_advantages` over values of the states that the group visited; no trajectory's advantage is added.

    Branches that all play alike have nothing to compare: 0. With `advantage_std` the group's turns are standardized.
    Sources: Zhu et al., "Generalized Advantage Grouped Policy Optimization" (2026), arXiv 2605.13217: V is the mean of
    discounted returns over all visits of a state in the group, GAE over it, normalized in the group. Wang et al.,
    "Group-Graph Policy Optimization" (2026), arXiv 2606.22995: the same V of the final reward, and the TD error
    (lambda 0) standardized over all edges of the group's graph, as one of three terms. Cheng et al., "Beyond
    Trajectory-Level Attribution" (2026), arXiv 2605.26684 (GraphGPO): the same graph, but V from the shortest way to a
    win, compared among the turns that leave one state, beside the trajectory's. Built is what they share:
    a turn earns what it changes in the value that the group gives its state. `state_values` "mean" is V of the first
    two; "chain" solves for V on the graph, as the third does, but for the policy's mean rather than its best way.

    An invalid action leaves the state as it is, so with lambda 0 it costs its -0.1 and (1 - discount) V, whatever the
    trajectory earned. A state visited once has no other turn to compare with: its own return is its value, and the
    chain's TD error there is 0, the mean's what the next state is worth beyond this branch's return. lambda lets such
    turns share in the surprises that follow, the nearest most, at the price of the luck of one branch.
    With lambda 0, sum of discount^t A_t = G_0 - V(s_0) in each trajectory. Over the visits of every state A sums to 0
    for "mean" with lambda 1, for "chain" with lambda 0.
    Limits: a state is the world's, not what the model knows of it, nor the steps it has left. "mean" counts visits, so
    a branch that lingers in a state makes up most of its value; "chain" has not that fault, and leans on the first.
    """
    advantages = []
    for group in groups:
        if _play_alike(group):
            advantages.append(_every_turn(group, [0.0] * len(group)))
            continue
        values = STATE_VALUES[settings.state_values](group, settings.discount)
        turns = [
            generalized_advantages(episode.rewards_N, [values[state] for state in episode.states_N],
                                   settings.discount, settings.gae_lambda)
            for episode in group
        ]  # fmt: skip
        if settings.advantage_std:
            [turns] = _shaped(_compared([a for turns_N in turns for a in turns_N], std=True), [group])
        advantages.append(turns)
    return advantages


def _gae(groups: Groups, settings: SignalSettings) -> Advantages:
    """`generalized_advantages` over the value head's `values_N`; with `advantage_std` whitened over the batch's tokens.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), arXiv 1707.06347, equations 11 and 12.
    The one estimator that compares with what was learned rather than with the group: it needs no second branch, does
    not sum to 0 before it is whitened, and branches that all play alike are still told how they did.
    """
    turns = [
        generalized_advantages(episode.rewards_N, episode.values_N, settings.discount, settings.gae_lambda)
        for group in groups for episode in group
    ]  # fmt: skip
    flat = [a for turns_N in turns for a in turns_N]
    if settings.advantage_std:
        flat = _standardized(flat, [n for group in groups for episode in group for n in episode.tokens_N])
    return _shaped(flat, groups)


def value_targets(episode: Episode, settings: SignalSettings) -> list[float]:
    """What the value head is fitted to, one number a turn: A_t + V_t, with A before any whitening.

    The lambda-return, as PPO's implementations have it; with lambda 1 the discounted return from the turn on.
    """
    advantages = generalized_advantages(episode.rewards_N, episode.values_N, settings.discount, settings.gae_lambda)
    return [a + value for a, value in zip(advantages, episode.values_N)]


# by name: the estimator and the settings it reads
ESTIMATORS: dict[str, tuple[Callable[[Groups, SignalSettings], Advantages], tuple[str, ...]]] = {
    "group-mean": (_group_mean, ()),
    "group-std": (_group_std, ()),
    "rloo": (_rloo, ()),
    "reinforce++": (_reinforce_plus_plus, ("group_baseline",)),
    "turn-return": (_turn_return, ("discount",)),
    "gigpo": (_gigpo, ("discount", "step_weight", "advantage_std")),
    "state-value": (_state_value, ("discount", "gae_lambda", "state_values", "advantage_std")),
    "gae": (_gae, ("discount", "gae_lambda", "advantage_std")),
}


def rollout_metrics(groups: list[list[Trajectory]], advantages: list[list[list[float]]]) -> dict[str, float]:
    """What an update's trajectories say, before any training: `reward/`, `rollout/` and `advantage/`."""
    trajectories = [trajectory for group in groups for trajectory in group]
    n, turns = len(trajectories), max(1, sum(len(t.turns) for t in trajectories))
    # of a trajectory: its turns' mean, which of equal numbers is any of them
    flat = [
        by_turn[0] if len(set(by_turn)) == 1 else statistics.fmean(by_turn or [0.0])
        for group in advantages for by_turn in group
    ]  # fmt: skip
    rewards = [t.reward for t in trajectories]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/success": sum(t.won for t in trajectories) / n,
        "rollout/trajectories": n,
        "rollout/steps": sum(len(t.turns) for t in trajectories) / n,
        "rollout/truncated": sum(t.truncated for t in trajectories) / n,
        "rollout/invalid_actions": sum(t.invalid_actions for t in trajectories) / n,
        "rollout/valid_tool_calls": 1 - sum(t.malformed for t in trajectories) / turns,
        "rollout/admissible_actions": 1 - sum(t.invalid_actions for t in trajectories) / turns,
        "rollout/trajectory_tokens": sum(len(t.tokens) for t in trajectories) / n,
        "advantage/mean_abs": statistics.fmean(map(abs, flat)),
        "advantage/max": max(flat),
        "advantage/min": min(flat),
        "advantage/equal_groups": sum(not any(map(any, group)) for group in advantages) / len(groups),
        "advantage/trained_trajectories": sum(any(by_turn) for group in advantages for by_turn in group),
    }


# --- training datum --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingDatum:
    """One trajectory as one training sequence; position t predicts `targets_T[t]` from `tokens_T[: t + 1]`.

    T is one less than the end of the last completion. Where `mask_T` is true the target was sampled by the model:
    log-probability and advantage are the sampler's and the trajectory's. Elsewhere (prompt, observations) both are 0.
    """

    name: str
    tokens_T: torch.Tensor  # int64
    targets_T: torch.Tensor  # int64, the tokens one position later
    mask_T: torch.Tensor  # bool
    old_logprobs_T: torch.Tensor  # float32
    advantages_T: torch.Tensor  # float32
    weights_T: torch.Tensor  # float32, in the loss's sum over tokens


def make_datum(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], logprobs: Sequence[Sequence[float]],
    advantages: Sequence[float], weights: Sequence[float] | None = None, name: str = "trajectory",
) -> TrainingDatum:  # fmt: skip
    """Build the training sequence of a trajectory; `name` says in errors which one it is.

    tokens: every token once (prompt, completions, observations). spans: [start, end) of each completion in `tokens`,
    in order. logprobs: the sampler's log-probabilities, a list a span. advantages, weights: one a span, which each of
    its tokens gets; None weighs all tokens 1. Tokens after the last completion predict nothing that was sampled and are
    cut off. Raises ValueError for spans that are out of order, outside the tokens or at position 0, for lists that do
    not match the spans in number or are not finite, and where nothing was sampled.
    """
    weights = [1.0] * len(spans) if weights is None else weights
    if len(spans) != len(logprobs):
        raise ValueError(f"{name}: {len(spans)} completions but {len(logprobs)} lists of log-probabilities")
    for what, values in (("advantages", advantages), ("weights", weights)):
        if len(values) != len(spans) or not all(map(math.isfinite, values)):
            raise ValueError(f"{name}: {what} {list(values)} for {len(spans)} completions")
    try:
        check_prefix_extension(len(tokens), [start for start, _ in spans], spans)
    except PrefixViolation as error:
        raise PrefixViolation(f"{name}: {error}") from error
    sampled: list[int] = []
    for turn, ((start, end), span_logprobs) in enumerate(zip(spans, logprobs)):
        where = f"{name}: completion {turn} at [{start}, {end})"
        if len(span_logprobs) != end - start:
            raise ValueError(f"{where} has {len(span_logprobs)} log-probabilities for {end - start} tokens")
        if not all(map(math.isfinite, span_logprobs)):
            raise ValueError(f"{where} has a log-probability that is not finite: {list(span_logprobs)}")
        sampled.extend(range(start, end))
    if not sampled:
        raise ValueError(f"{name}: no sampled token, nothing to train on")

    tokens_T = torch.tensor(tokens[: sampled[-1] + 1])
    positions_A = torch.tensor(sampled) - 1
    mask_T = torch.zeros(len(tokens_T) - 1, dtype=torch.bool)
    mask_T[positions_A] = True
    lengths_N = torch.tensor([end - start for start, end in spans])
    old_logprobs_T, advantages_T, weights_T = torch.zeros(3, len(tokens_T) - 1)
    old_logprobs_T[positions_A] = torch.tensor([logprob for span in logprobs for logprob in span])
    advantages_T[positions_A] = torch.tensor(advantages, dtype=torch.float32).repeat_interleave(lengths_N)
    weights_T[positions_A] = torch.tensor(weights, dtype=torch.float32).repeat_interleave(lengths_N)
    return TrainingDatum(name, tokens_T[:-1], tokens_T[1:], mask_T, old_logprobs_T, advantages_T, weights_T)


def training_data(
    groups: list[list[Trajectory]], advantages: list[list[list[float]]], settings: SignalSettings
) -> list[TrainingDatum]:
    """The data of an update, from one advantage a turn, by group and trajectory.

    Trajectories without any have no gradient and are left out, unless the loss has other terms. If none is left, one
    without advantage, on which trainer and engine can be compared; empty if nothing was sampled.
    """
    played = [pair for pair in zip(sum(groups, []), sum(advantages, []), strict=True) if pair[0].turns]
    trained = [pair for pair in played if settings.has_other_terms or any(pair[1])] or played[:1]
    turns = [turn for trajectory, _ in played for turn in trajectory.turns]
    tokens = sum(len(turn.logprobs) for turn in turns)
    weigh = {
        "trajectory-tokens": lambda turn: 1.0,
        "token-mean": lambda turn: 1 / tokens,
        "turn-mean": lambda turn: 1 / (len(turns) * len(turn.logprobs)),
    }[settings.loss_sum]
    return [
        make_datum(
            trajectory.tokens, trajectory.spans, trajectory.logprobs, by_turn, [weigh(turn) for turn in trajectory.turns],
            f"{trajectory.game.game_id} branch {trajectory.branch}",
        )
        for trajectory, by_turn in trained
    ]  # fmt: skip


# --- log-probabilities -----------------------------------------------------------------------------------------------


class _HeadLogprobs(torch.autograd.Function):
    """Language-model head and log-softmax of C rows, whose logits are computed again in backward.

    By hand rather than by checkpointing, because the logits can be turned into the gradient in place: at the peak
    there are two fp32 [C, vocab] buffers, with checkpointing three (measured).
    """

    @staticmethod
    def forward(ctx, hidden_CD, weight_VD, bias_V, targets_C, temperature, entropy_counts):
        ctx.save_for_backward(hidden_CD, weight_VD, bias_V, targets_C)
        ctx.temperature, ctx.entropy_counts = temperature, entropy_counts
        logprobs_CV = _HeadLogprobs.log_softmax(hidden_CD, weight_VD, bias_V, temperature)
        logprobs_C = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
        entropies_C = logprobs_CV.exp().mul_(logprobs_CV).sum(-1).neg_()
        if not entropy_counts:
            ctx.mark_non_differentiable(entropies_C)
        return logprobs_C, entropies_C

    @staticmethod
    def backward(ctx, grad_C, entropy_grad_C):
        hidden_CD, weight_VD, bias_V, targets_C = ctx.saved_tensors
        logprobs_CV = _HeadLogprobs.log_softmax(hidden_CD, weight_VD, bias_V, ctx.temperature)
        # d logprob[target] / d logits = (onehot(target) - softmax) / temperature
        if ctx.entropy_counts:  # d entropy / d logits = -softmax (log softmax + entropy) / temperature
            probs_CV = logprobs_CV.exp()
            entropies_C1 = -(probs_CV * logprobs_CV).sum(-1, keepdim=True)
            grad_CV = probs_CV.mul_(logprobs_CV.add_(entropies_C1).mul_(-entropy_grad_C[:, None]).sub_(grad_C[:, None]))
        else:
            grad_CV = logprobs_CV.exp_().mul_(-grad_C[:, None])
        grad_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])
        grad_CV = grad_CV.div_(ctx.temperature).to(weight_VD.dtype)
        grad_weight_VD = grad_CV.T @ hidden_CD if ctx.needs_input_grad[1] else None
        grad_bias_V = grad_CV.sum(0) if ctx.needs_input_grad[2] else None
        return grad_CV @ weight_VD, grad_weight_VD, grad_bias_V, None, None, None

    @staticmethod
    def log_softmax(hidden_CD, weight_VD, bias_V, temperature):
        logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float().div_(temperature)
        return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


def token_logprobs(
    hidden_AD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, targets_A: torch.Tensor,
    temperature: float, chunk: int, entropy_counts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Log-probabilities of the targets and entropies of their distributions, float32 [A] each, in nats.

    hidden_AD: the decoder's last hidden states at the positions that predict `targets_A`. Logits are divided by the
    sampling temperature and exist for `chunk` rows at a time (2 buffers of chunk * vocab * 4 bytes), in forward and
    in backward. The log-probabilities are differentiable; so are the entropies if `entropy_counts` (one buffer more),
    else they are a metric.
    """
    parts = [
        _HeadLogprobs.apply(hidden_CD, weight_VD, bias_V, targets_C, temperature, entropy_counts)
        for hidden_CD, targets_C in zip(hidden_AD.split(chunk), targets_A.split(chunk))
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


# --- loss and metrics ------------------------------------------------------------------------------------------------


class TokenScores(NamedTuple):
    """What the loss and the metrics want of A sampled tokens, float32 [A] each."""

    logprobs: torch.Tensor  # under the weights that are trained
    old_logprobs: torch.Tensor  # the sampler's
    advantages: torch.Tensor
    entropies: torch.Tensor  # of the distributions they were drawn from
    weights: torch.Tensor  # in the sum over tokens
    base_logprobs: torch.Tensor  # the base model's, where they count; else as `logprobs`


def token_losses(scores: TokenScores, settings: SignalSettings) -> torch.Tensor:
    """The loss of each token, [A]: weight (-min(r A, clip(r) A) + kl_coefficient k3 - entropy_coefficient H).

    r = exp(new - old), clip(r) within [ppo_clip_low, ppo_clip_high]; k3 = exp(base - new) - 1 - (base - new) estimates
    KL(policy || base). Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7, with two free
    thresholds; k3 in the loss as in GRPO (Shao et al., "DeepSeekMath", 2024, eq. 4).
    """
    ratio_A = torch.exp(scores.logprobs - scores.old_logprobs)
    clipped_A = ratio_A.clamp(settings.ppo_clip_low, settings.ppo_clip_high)
    losses_A = -torch.minimum(ratio_A * scores.advantages, clipped_A * scores.advantages)
    if settings.kl_coefficient:
        gap_A = scores.base_logprobs - scores.logprobs
        losses_A = losses_A + settings.kl_coefficient * (gap_A.expm1() - gap_A)
    if settings.entropy_coefficient:
        losses_A = losses_A - settings.entropy_coefficient * scores.entropies
    return scores.weights * losses_A


def mismatch_metrics(logprobs_A: torch.Tensor, rollout_logprobs_A: torch.Tensor) -> dict[str, float]:
    """How far trainer (new) and rollout (old) are apart: |new - old|, and two estimators of KL(rollout || trainer).

    Both inputs: log-probabilities of the same A >= 1 sampled tokens, before the optimizer step, in nats. Per token
    k1 = old - new (unbiased, of either sign) and k3 = exp(new - old) - 1 - (new - old) (unbiased, never negative,
    steadier). With one step an update they are PPO's `approx_kl` too.
    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    gap_A = (logprobs_A.double() - rollout_logprobs_A.double()).detach()
    return {
        "mismatch/mean": gap_A.abs().mean().item(),
        "mismatch/max": gap_A.abs().max().item(),
        "mismatch/k1": -gap_A.mean().item(),
        "mismatch/k3": (gap_A.expm1() - gap_A).mean().item(),
    }


def update_metrics(scores: TokenScores, settings: SignalSettings) -> dict[str, float]:
    """Metrics of an update over its A >= 1 trained tokens: the loss is their sum, all else means and maxima.

    A token counts as clipped where the clip decides the minimum, i.e. its advantage gives it no gradient.
    """
    ratio_A = torch.exp(scores.logprobs - scores.old_logprobs)
    clipped_A = ratio_A.clamp(settings.ppo_clip_low, settings.ppo_clip_high)
    metrics = {
        "tokens/trained": len(ratio_A),
        "train/loss": token_losses(scores, settings).sum().item(),
        "train/clip_fraction": (clipped_A * scores.advantages < ratio_A * scores.advantages).float().mean().item(),
        "train/ratio_mean": ratio_A.mean().item(),
        "train/ratio_max": ratio_A.max().item(),
        "train/entropy": scores.entropies.mean().item(),
    }
    if settings.kl_coefficient:
        metrics["train/kl_base"] = mismatch_metrics(scores.base_logprobs, scores.logprobs)["mismatch/k3"]
    return metrics | mismatch_metrics(scores.logprobs, scores.old_logprobs)


# --- batches --------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What all trainers learn from in one update (from 1), and whether Adam's moments are saved after it."""

    data: list[TrainingDatum]
    update: int = 1
    save: bool = False


def split_data(data: Sequence[TrainingDatum], parts: int, key: str) -> list[list[TrainingDatum]]:
    """The data in so many parts that differ by one at most, dealt in an order that only `key` decides; empty ones left out."""
    if parts == 1:
        return [list(data)]
    shuffled = random.Random(key).sample(list(data), len(data))
    return [shuffled[part::parts] for part in range(min(parts, len(data)))]


def deal(data: Sequence[TrainingDatum], hands: int, in_step: bool = False) -> list[list[int]]:
    """Indices of the data by process: the longest first, each to whoever has the fewest tokens.

    in_step: one after the other instead, for processes that work on their first, second, ... at the same time.
    """
    longest_first = sorted(range(len(data)), key=lambda index: -len(data[index].tokens_T))
    if in_step:
        return [longest_first[hand::hands] for hand in range(hands)]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    held = [0] * hands
    for index in longest_first:
        hand = held.index(min(held))
        dealt[hand].append(index)
        held[hand] += len(data[index].tokens_T)
    return dealt


def join_scores(scores: Sequence[TokenScores]) -> TokenScores:
    """The tokens of several data in one."""
    return TokenScores(*map(torch.cat, zip(*scores, strict=True)))
