"""What credit by turn promises: zeros, order, sums, scale; what a turn is told; what is refused; the cost."""

import math
import random
import time
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import SettingsError
from advantages import (
    ESTIMATORS, SignalSettings, credit, discounted_returns, generalized_advantages, group_advantages,
)  # fmt: skip
from test_credit import FORMS, alike, batches, close, episode, episodes, flat, many

WITHIN_GROUPS = [name for name in FORMS if name not in ("reinforce++", "reinforce++ baseline", "gae", "gae std")]


@many
@given(st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=16), min_size=1, max_size=4))
def test_group_mean_is_bit_for_bit_what_it_was(rewards):
    def as_it_was(rewards_K):
        mean = math.fsum(rewards_K) / len(rewards_K)
        return [reward - mean if abs(reward - mean) > 1e-9 else 0.0 for reward in rewards_K]

    groups = [[episode([0.0, reward], ["s", "t"]) for reward in rewards_K] for rewards_K in rewards]
    for rewards_K, turns in zip(rewards, credit(groups, SignalSettings())):
        want = as_it_was([math.fsum([0.0, reward]) for reward in rewards_K])
        assert turns == [[a, a] for a in want] == [[a, a] for a in group_advantages(rewards_K)]


@many
@given(episodes(), st.integers(1, 8))
def test_branches_that_all_play_alike_have_exactly_zero_advantages(played, branches):
    for name in [*WITHIN_GROUPS, "reinforce++", "reinforce++ baseline"]:
        assert credit([[played] * branches], FORMS[name]) == [[[0.0] * len(played.rewards_N)] * branches], name


def test_what_rounding_leaves_of_equal_returns_is_exactly_zero():
    group = [episode([-0.1] * 3 + [1.0], list("abcd")), episode([1.0 - 0.1 - 0.1 - 0.1], ["e"])]
    assert group[0].reward != group[1].reward
    for name in ("group-mean", "group-std", "rloo", "reinforce++", "reinforce++ baseline"):
        assert flat(credit([group], FORMS[name])) == [0.0] * 5
    assert flat(credit([group], SignalSettings("turn-return", discount=1.0)))[0] == 0.0


@many
@given(batches(), st.randoms(use_true_random=False))
def test_order_of_branches_and_games_does_not_matter(groups, shuffle):
    orders = [shuffle.sample(range(len(group)), len(group)) for group in groups]
    games = shuffle.sample(range(len(groups)), len(groups))
    shuffled = [[groups[g][k] for k in orders[g]] for g in games]
    for name, chosen in FORMS.items():
        straight, other = credit(groups, chosen), credit(shuffled, chosen)
        want = [[straight[g][k] for k in orders[g]] for g in games]
        close(other, want, tolerance=1e-8) if "chain" in name else close(other, want, tolerance=0)


@many
@given(batches(smallest_group=2))
def test_sums_of_trajectory_estimators(groups):
    groups = [[e if e.rewards_N else episode([0.0], ["a"]) for e in group] for group in groups]
    for name in ("group-mean", "group-std", "rloo"):
        for group in credit(groups, FORMS[name]):
            assert math.fsum(turns[0] for turns in group) == pytest.approx(0, abs=1e-8)
            squares = math.fsum(turns[0] ** 2 for turns in group)
            assert name != "group-std" or squares == pytest.approx(len(group) - 1, rel=1e-3) or not squares
    n = sum(sum(e.tokens_N) for group in groups for e in group)
    for name in ("reinforce++", "reinforce++ baseline"):
        by_token = [(turns[0], sum(e.tokens_N)) for g, a in zip(groups, credit(groups, FORMS[name]))
                    for e, turns in zip(g, a)]  # fmt: skip
        assert math.fsum(a * tokens for a, tokens in by_token) == pytest.approx(0, abs=1e-7)
        squares = math.fsum(a * a * tokens for a, tokens in by_token)
        assert squares == pytest.approx(n - 1, rel=1e-3) or not squares


@many
@given(batches(smallest_group=2), st.sampled_from([0.5, 0.95, 1.0]))
def test_sums_of_turn_estimators(groups, discount):
    for group, turns in zip(groups, credit(groups, SignalSettings("turn-return", discount=discount))):
        for t in range(max(len(e.rewards_N) for e in group)):
            assert math.fsum(turns_N[t] for turns_N in turns if len(turns_N) > t) == pytest.approx(0, abs=1e-8)
    steps = SignalSettings("gigpo", discount=discount)
    returns = SignalSettings("state-value", discount, gae_lambda=1.0)
    chain = SignalSettings("state-value", discount, gae_lambda=0.0, state_values="chain")
    for chosen, base in ((steps, credit(groups, SignalSettings())), (returns, None), (chain, None)):
        for g, turns in enumerate(credit(groups, chosen)):
            by_state = {}
            for k, e in enumerate(groups[g]):
                for t, state in enumerate(e.states_N):
                    episode_part = base[g][k][t] if base and not alike(groups[g]) else 0.0
                    by_state.setdefault(state, []).append(turns[k][t] - episode_part)
            assert list(map(math.fsum, by_state.values())) == pytest.approx([0] * len(by_state), abs=1e-7)


@many
@given(batches(smallest_group=2), st.sampled_from([0.5, 0.95, 1.0]), st.sampled_from(["mean", "chain"]))
def test_state_value_shares_out_what_the_trajectory_earned_above_its_start(groups, discount, form):
    chosen = SignalSettings("state-value", discount, gae_lambda=0.0, state_values=form)
    for group, turns in zip(groups, credit(groups, chosen)):
        starts = [
            math.fsum(discount**t * a for t, a in enumerate(turns_N)) - discounted_returns(e.rewards_N, discount)[0]
            for e, turns_N in zip(group, turns) if e.states_N and e.states_N[0] == "a"
        ]  # fmt: skip
        if starts and not alike(group):
            assert starts == pytest.approx([starts[0]] * len(starts), abs=1e-7)  # - V(a), the same for all


@many
@given(batches(smallest_group=2), st.sampled_from([0.25, 4.0]))
def test_scale_of_rewards(groups, factor):
    scaled = [[e._replace(reward=e.reward * factor, rewards_N=[r * factor for r in e.rewards_N],
                          values_N=[v * factor for v in e.values_N]) for e in group] for group in groups]  # fmt: skip
    for name, chosen in FORMS.items():
        if name.startswith(("group-std", "reinforce++")):
            close(credit(scaled, chosen), credit(groups, chosen), tolerance=1e-3)
        elif not chosen.advantage_std:
            want = [[[factor * a for a in turns] for turns in group] for group in credit(groups, chosen)]
            close(credit(scaled, chosen), want, tolerance=1e-8)


@many
@given(batches(), st.sampled_from([-2.0, 0.5]))
def test_a_bonus_for_every_trajectory_changes_no_trajectory_estimator(groups, bonus):
    groups = [[e for e in group if e.rewards_N] or [episode([0.0], ["a"])] for group in groups]
    shifted = [[e._replace(reward=e.reward + bonus, rewards_N=[*e.rewards_N[:-1], e.rewards_N[-1] + bonus])
                for e in group] for group in groups]  # fmt: skip
    for name in ("group-mean", "group-std", "rloo", "reinforce++", "reinforce++ baseline"):
        close(credit(shifted, FORMS[name]), credit(groups, FORMS[name]), tolerance=1e-6)


# --- what a turn is told ------------------------------------------------------------------------------------------


def test_an_invalid_action_costs_its_penalty_whatever_the_trajectory_earned():
    """Fifteen invalid actions and a win, beside a branch that loses: the invalid turns are blamed, the win is not."""
    clumsy = episode([-0.1] * 15 + [0.0, 1.0], ["s"] * 16 + ["t"])
    lost = episode([0.0, 0.0], ["s", "u"])
    blamed_and_praised_alike = credit([[clumsy, lost]], SignalSettings())[0][0]
    assert blamed_and_praised_alike == pytest.approx([-0.25] * 17)
    for form in ("mean", "chain"):
        chosen = SignalSettings("state-value", discount=1.0, gae_lambda=0.0, state_values=form)
        [[turns, _]] = credit([[clumsy, lost]], chosen)
        assert turns[:15] == pytest.approx([-0.1] * 15) and turns[15] > 0.5
    # V(s) = 1/2 - 15 * 0.1 / 2 on the chain: half the ways out win, and a way out costs 7.5 invalid actions
    assert turns[15] == pytest.approx(1 - (-0.25)) and turns[16] == 0.0


def test_a_state_visited_once_has_no_td_advantage_on_the_chain_and_lambda_shares_later_ones():
    won = episode([0.0, 0.0, 0.0, 1.0], ["a", "once", "b", "c"])
    lost = episode([0.0, 0.0, 0.0, 0.0], ["a", "b", "d", "e"])
    by_lambda = {
        gae_lambda: credit([[won, lost]], SignalSettings("state-value", 1.0, gae_lambda, "chain"))[0][0]
        for gae_lambda in (0.0, 0.5, 1.0)
    }
    assert by_lambda[0.0] == pytest.approx([0, 0, 0.5, 0])  # both reach b, from which one of two wins
    assert by_lambda[0.5] == pytest.approx([0.125, 0.25, 0.5, 0])
    assert by_lambda[1.0] == pytest.approx([0.5, 0.5, 0.5, 0])
    # the mean credits the step into b, which did better for this branch than for the other
    mean = SignalSettings("state-value", 1.0, 0.0)
    assert credit([[won, lost]], mean)[0][0] == pytest.approx([0.5, -0.5, 0.5, 0])


def test_gae_needs_no_second_branch_and_values_nothing_after_the_end():
    lone = episode([0.0, 0.0], ["a", "b"], values=[0.5, 0.75])
    assert credit([[lone]], SignalSettings("gae", 1.0, 0.0)) == [[[0.25, -0.75]]]
    assert generalized_advantages([], [], 1.0, 1.0) == []


@pytest.mark.parametrize("name", FORMS)
def test_a_trajectory_without_a_turn_counts_in_its_group_and_gets_nothing(name):
    nothing, won = episode([], []), episode([1.0], ["s"])
    unplayed, turns = credit([[nothing, won]], FORMS[name])[0]
    assert unplayed == [] and len(turns) == 1
    assert name != "group-mean" or turns == [0.5]
    assert credit([[nothing]], FORMS[name]) == [[[]]]


# --- what is refused, and the cost --------------------------------------------------------------------------------

GOOD = episode([0.0, 1.0], ["s", "t"])


@pytest.mark.parametrize("groups, words", [
    ([], "without groups"),
    ([[GOOD], []], "group 1: a group without trajectories"),
    ([[GOOD, GOOD._replace(reward=math.nan)]], "group 0 branch 1: rewards must be finite"),
    ([[GOOD._replace(rewards_N=[-math.inf, 1.0])]], "group 0 branch 0: rewards must be finite"),
    ([[GOOD._replace(states_N=["s"])]], "2 rewards, 1 states, 2 token counts"),
    ([[GOOD._replace(tokens_N=[1, 1, 1])]], "2 rewards, 2 states, 3 token counts"),
    ([[GOOD._replace(reward=0.9)]], "sum to 1.0, not to 0.9"),
])  # fmt: skip
@pytest.mark.parametrize("name", FORMS)
def test_bad_input_is_refused_in_words(name, groups, words):
    with pytest.raises(ValueError, match=words):
        credit(groups, FORMS[name])


@pytest.mark.parametrize("values", [[], [0.0], [0.0, math.nan]])
def test_gae_needs_a_finite_value_for_every_turn_and_no_other_estimator_does(values):
    group = [[GOOD._replace(values_N=values)]]
    with pytest.raises(ValueError, match="group 0 branch 0: gae needs one finite value for each of 2 turns"):
        credit(group, FORMS["gae"])
    assert credit(group, SignalSettings()) == [[[0.0, 0.0]]]


@pytest.mark.parametrize("chosen, words", [
    ({"advantage": "grpo"}, "--advantage is 'grpo'; it must be one of group-mean, group-std"),
    ({"advantage": "gae", "discount": 1.5}, "--discount is 1.5"),
    ({"advantage": "gae", "gae_lambda": -0.1}, "--gae-lambda is -0.1"),
    ({"advantage": "gigpo", "step_weight": math.inf}, "--step-weight is inf"),
    ({"advantage": "gigpo", "step_weight": -1.0}, "--step-weight is -1.0"),
    ({"advantage": "state-value", "state_values": "median"}, "--state-values is 'median'"),
    ({"discount": 0.9}, "--discount is 0.9; it must be 0.95 with --advantage group-mean, which does not read it"),
    ({"advantage": "rloo", "group_baseline": True}, "--group-baseline is True; it must be False with --advantage rloo"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_the_flags_name(chosen, words):
    with pytest.raises(SettingsError, match=words):
        SignalSettings(**chosen)


def test_every_estimator_is_tried_here_and_every_setting_is_read_by_one():
    assert {chosen.advantage for chosen in FORMS.values()} == set(ESTIMATORS)
    of_loss = {"ppo_clip_low", "ppo_clip_high", "loss_sum", "kl_coefficient", "entropy_coefficient"}
    assert {name for _, read in ESTIMATORS.values() for name in read} == {
        f.name for f in fields(SignalSettings)
    } - {"advantage"} - of_loss
    assert SignalSettings().advantage == "group-mean"


@pytest.mark.parametrize("states", [30, 200, 10**9])
def test_credit_of_64_trajectories_of_50_turns_is_cheap(states):
    """Below 20 ms of processor time, measured; the bound leaves room for a slower machine."""
    draw = random.Random(0)
    groups = [
        [episode([-0.1 if draw.random() < 0.3 else 0.0 for _ in range(49)] + [draw.choice([0.0, 1.0])],
                 [str(draw.randrange(states)) for _ in range(50)]) for _ in range(8)]
        for _ in range(8)
    ]  # fmt: skip
    for name, chosen in FORMS.items():
        seconds = []
        for _ in range(5):
            start = time.process_time()
            credit(groups, chosen)
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.1, name
