"""Credit by turn: every estimator against a hand-worked example and a slow reference."""

import math
import statistics
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advantages import Episode, SignalSettings, credit, value_targets

# every estimator in every form, discounts and lambdas at their defaults
FORMS = {
    "group-mean": SignalSettings(),
    "group-std": SignalSettings("group-std"),
    "rloo": SignalSettings("rloo"),
    "reinforce++": SignalSettings("reinforce++"),
    "reinforce++ baseline": SignalSettings("reinforce++", group_baseline=True),
    "turn-return": SignalSettings("turn-return"),
    "gigpo": SignalSettings("gigpo"),
    "gigpo std": SignalSettings("gigpo", advantage_std=True),
    "state-value mean": SignalSettings("state-value"),
    "state-value mean std": SignalSettings("state-value", advantage_std=True),
    "state-value chain": SignalSettings("state-value", state_values="chain"),
    "gae": SignalSettings("gae"),
    "gae std": SignalSettings("gae", advantage_std=True),
}


def episode(rewards, states, tokens=None, values=None):
    tokens, values = tokens or [1] * len(rewards), values or [0.0] * len(rewards)
    return Episode(math.fsum(rewards), rewards, states, tokens, values)


def flat(advantages):
    return [a for group in advantages for turns in group for a in turns]


def close(got, want, tolerance=1e-8):
    assert [[len(turns) for turns in group] for group in got] == [[len(turns) for turns in group] for group in want]
    assert flat(got) == pytest.approx(flat(want), abs=tolerance, rel=tolerance)


@st.composite
def episodes(draw):
    """Up to 9 turns through 4 states; an invalid turn stays where it is, a win ends the trajectory."""
    codes = draw(st.lists(st.integers(0, 11), max_size=9))
    states, rewards = ["abcd"[code % 4] for code in codes], [-0.1 if code < 4 else 0.0 for code in codes]
    for t in range(1, len(codes)):
        states[t] = states[t - 1] if rewards[t - 1] else states[t]
    if codes and draw(st.booleans()):
        rewards[-1] = 1.0
    return episode(rewards, states, [1 + 3 * code for code in codes], [(code - 5) / 8 for code in codes[::-1]])


def batches(smallest_group=1):
    return st.lists(st.lists(episodes(), min_size=smallest_group, max_size=5), min_size=1, max_size=3)


many = settings(deadline=None, max_examples=40)

# --- by hand ------------------------------------------------------------------------------------------------------

# branch 0: s -> t -> won. branch 1: an invalid action in s, then s -> u, then cut off.
HAND = [[
    Episode(1.0, [0.0, 1.0], ["s", "t"], [1, 1], [0.5, 0.5]),
    Episode(-0.25, [-0.25, 0.0, 0.0], ["s", "s", "u"], [2, 1, 1], [0.0, 0.25, 0.0]),
]]  # fmt: skip
HALF = {"discount": 0.5}
ROOT = math.sqrt(0.5)
WHITE = 1 / math.sqrt(0.6)  # 2 tokens at 5/6 and 4 at -5/12 above the mean of 1/6


@pytest.mark.parametrize("chosen, first, second", [
    (SignalSettings(), [0.625] * 2, [-0.625] * 3),
    (SignalSettings("group-std"), [ROOT] * 2, [-ROOT] * 3),
    (SignalSettings("rloo"), [1.25] * 2, [-1.25] * 3),
    (SignalSettings("reinforce++"), [WHITE] * 2, [-WHITE / 2] * 3),
    # returns from each turn on: 1/2, 1 and -1/4, 0, 0
    (SignalSettings("turn-return", **HALF), [0.375, 0.5], [-0.375, -0.5, 0]),
    # the three visits of s: mean 1/12
    (SignalSettings("gigpo", **HALF), [0.625 + 5 / 12, 0.625], [-0.625 - 1 / 3, -0.625 - 1 / 12, -0.625]),
    (SignalSettings("gigpo", step_weight=0.0), [0.625] * 2, [-0.625] * 3),
    # V(s) = 1/12, V(t) = 1, V(u) = 0
    (SignalSettings("state-value", gae_lambda=0.0, **HALF), [5 / 12, 0], [-7 / 24, -1 / 12, 0]),
    (SignalSettings("state-value", gae_lambda=1.0, **HALF), [5 / 12, 0], [-1 / 3, -1 / 12, 0]),
    # 3 V(s) = (0 + V(t) / 2) + (-1/4 + V(s) / 2) + (0 + V(u) / 2), so V(s) = 1/10
    (SignalSettings("state-value", gae_lambda=0.0, state_values="chain", **HALF), [0.4, 0], [-0.3, -0.1, 0]),
    (SignalSettings("gae", gae_lambda=0.5, **HALF), [-0.125, 0.5], [-0.1875, -0.25, 0]),
])  # fmt: skip
def test_hand_worked_example(chosen, first, second):
    close(credit(HAND, chosen), [[first, second]], tolerance=3e-6)  # the floor of standard deviations is 1e-6


def test_the_batch_baseline_differs_from_the_groups_where_games_do():
    easy = [episode([1.0], ["s"]), episode([1.0], ["s"])]
    hard = [episode([0.0], ["s"]), episode([1.0], ["s"])]
    without, with_baseline = (credit([easy, hard], FORMS[name]) for name in ("reinforce++", "reinforce++ baseline"))
    close(without, [[[0.5], [0.5]], [[-1.5], [0.5]]], tolerance=3e-6)
    root = math.sqrt(1.5)
    close(with_baseline, [[[0.0], [0.0]], [[-root], [root]]], tolerance=6e-6)


# --- slow references, written from the equations ------------------------------------------------------------------


def exact_return(e, t, discount):
    return sum(Fraction(discount) ** (j - t) * Fraction(e.rewards_N[j]) for j in range(t, len(e.rewards_N)))


def exact_mean(numbers):
    return sum(numbers, Fraction(0)) / len(numbers)


def all_turns(group):
    return [(e, t) for e in group for t in range(len(e.rewards_N))]


def reference_scale(numbers):
    """1 / (sample standard deviation + 1e-6), from a list with one entry for every unit that counts."""
    return 1 / ((statistics.stdev(map(float, numbers)) if len(numbers) > 1 else 0.0) + 1e-6)


def reference_trajectories(group, kind):
    rewards = [Fraction(e.reward) for e in group]
    if kind == "rloo":
        others = [[rewards[j] for j in range(len(group)) if j != k] for k in range(len(group))]
        numbers = [rewards[k] - exact_mean(others[k]) if others[k] else 0 for k in range(len(group))]
    else:
        scale = reference_scale(rewards) if kind == "group-std" else 1
        numbers = [float(reward - exact_mean(rewards)) * scale for reward in rewards]
    return [[float(number)] * len(e.rewards_N) for number, e in zip(numbers, group)]


def reference_whitening(numbers, groups):
    tokens = [number for number, e in zip(numbers, sum(groups, [])) for n in e.tokens_N for _ in range(n)]
    whitened = iter([float(x - exact_mean(tokens)) * reference_scale(tokens) if tokens else 0 for x in numbers])
    return [[[next(whitened)] * len(e.rewards_N) for e in group] for group in groups]


def reference_turn_return(group, discount):
    turns = [[] for _ in group]
    for e, t in all_turns(group):
        peers = [exact_return(other, t, discount) for other in group if len(other.rewards_N) > t]
        k = next(k for k, other in enumerate(group) if other is e)
        turns[k].append(float(exact_return(e, t, discount) - exact_mean(peers)))
    return turns


def alike(group):
    return all(e.states_N == group[0].states_N and e.rewards_N == group[0].rewards_N for e in group)


def reference_gigpo(group, chosen):
    if alike(group):
        return [[0.0] * len(e.rewards_N) for e in group]
    turns = reference_trajectories(group, "group-std" if chosen.advantage_std else "group-mean")
    for k, e in enumerate(group):
        for t, state in enumerate(e.states_N):
            peers = [exact_return(o, j, chosen.discount) for o, j in all_turns(group) if o.states_N[j] == state]
            scale = reference_scale(peers) if chosen.advantage_std else 1
            step = float(exact_return(e, t, chosen.discount) - exact_mean(peers)) * scale
            turns[k][t] += chosen.step_weight * step
    return turns


def reference_values(group, chosen):
    visits = {}
    for e, t in all_turns(group):
        visits.setdefault(e.states_N[t], []).append((e, t))
    if chosen.state_values == "mean":
        return {s: float(exact_mean([exact_return(*v, chosen.discount) for v in vs])) for s, vs in visits.items()}
    values = dict.fromkeys(visits, 0.0)
    for _ in range(100):  # value iteration; discount 0.8 leaves 1e-10
        values = {
            s: statistics.fmean(
                e.rewards_N[t] + (chosen.discount * values[e.states_N[t + 1]] if t + 1 < len(e.states_N) else 0)
                for e, t in vs
            )
            for s, vs in visits.items()
        }
    return values


def reference_gae(rewards, values, discount, gae_lambda):
    after = [*values[1:], 0.0]
    errors = [rewards[t] + discount * after[t] - values[t] for t in range(len(rewards))]
    return [
        sum((discount * gae_lambda) ** (j - t) * errors[j] for j in range(t, len(rewards))) for t in range(len(rewards))
    ]


def reference_state_value(group, chosen):
    if alike(group):
        return [[0.0] * len(e.rewards_N) for e in group]
    values = reference_values(group, chosen)
    turns = [
        reference_gae(e.rewards_N, [values[s] for s in e.states_N], chosen.discount, chosen.gae_lambda) for e in group
    ]
    if chosen.advantage_std:
        every = [a for turns_N in turns for a in turns_N]
        scale, mean = reference_scale(every), statistics.fmean(every) if every else 0
        turns = [[(a - mean) * scale for a in turns_N] for turns_N in turns]
    return turns


@many
@given(batches())
def test_trajectory_estimators_equal_their_references(groups):
    for kind in ("group-mean", "group-std", "rloo"):
        close(credit(groups, SignalSettings(kind)), [reference_trajectories(group, kind) for group in groups])
    rewards = [Fraction(e.reward) for e in sum(groups, [])]
    close(credit(groups, FORMS["reinforce++"]), reference_whitening(rewards, groups), tolerance=1e-6)
    above = [Fraction(e.reward) - exact_mean([Fraction(o.reward) for o in group]) for group in groups for e in group]
    close(credit(groups, FORMS["reinforce++ baseline"]), reference_whitening(above, groups), tolerance=1e-6)


@many
@given(batches(), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans(), st.sampled_from([0.0, 0.5, 2.0]))
def test_turn_return_and_gigpo_equal_their_references(groups, discount, std, weight):
    chosen = SignalSettings("turn-return", discount=discount)
    close(credit(groups, chosen), [reference_turn_return(group, discount) for group in groups])
    chosen = SignalSettings("gigpo", discount=discount, step_weight=weight, advantage_std=std)
    close(credit(groups, chosen), [reference_gigpo(group, chosen) for group in groups], tolerance=1e-6)


@many
@given(batches(), st.sampled_from([0.0, 0.5, 0.8]), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_state_value_equals_its_references(groups, discount, gae_lambda, std):
    for form in ("mean", "chain"):
        chosen = SignalSettings("state-value", discount, gae_lambda, form, advantage_std=std)
        raw = [reference_state_value(group, replace(chosen, advantage_std=False)) for group in groups]
        nearly_equal = std and any(0 < statistics.pstdev([a for turns in g for a in turns] or [0]) < 1e-4 for g in raw)
        if not nearly_equal:  # divided by almost nothing, rounding shows
            close(credit(groups, chosen), [reference_state_value(g, chosen) for g in groups], tolerance=1e-6)


@many
@given(batches(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_and_its_value_targets_equal_their_references(groups, discount, gae_lambda):
    chosen = SignalSettings("gae", discount=discount, gae_lambda=gae_lambda)
    want = [[reference_gae(e.rewards_N, e.values_N, discount, gae_lambda) for e in group] for group in groups]
    close(credit(groups, chosen), want)
    for e, turns in zip(sum(groups, []), sum(want, [])):
        assert value_targets(e, chosen) == pytest.approx([a + v for a, v in zip(turns, e.values_N)])
    tokens = [a for group, turns in zip(groups, want) for e, turns_N in zip(group, turns)
              for a, n in zip(turns_N, e.tokens_N) for _ in range(n)]  # fmt: skip
    mean, scale = statistics.fmean(tokens or [0]), reference_scale(tokens)
    if scale < 1e4:
        whitened = [[[(a - mean) * scale for a in turns_N] for turns_N in turns] for turns in want]
        close(credit(groups, replace(chosen, advantage_std=True)), whitened, tolerance=1e-6)
