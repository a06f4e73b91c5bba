"""Group advantages against exact rational arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advantages import group_advantages


def test_advantage_is_reward_minus_group_mean():
    assert group_advantages([1.0, 0.0, -0.5, 0.5]) == [0.75, -0.25, -0.75, 0.25]


def test_group_of_equal_rewards_has_exactly_zero_advantages():
    assert group_advantages([-0.1] * 7) == [0.0] * 7
    assert group_advantages([0.3]) == [0.0]
    equal = [1 - 0.1 * (n + 10) + 0.1 * n for n in range(40)]  # 0 but for rounding
    assert len(set(equal)) > 1 and group_advantages(equal) == [0.0] * 40


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(-50, 10), min_size=1, max_size=64))
def test_advantages_equal_exact_arithmetic_and_sum_to_zero(tenths):
    rewards = [n / 10 for n in tenths]
    mean = sum(map(Fraction, rewards)) / len(rewards)
    for got, reward in zip(group_advantages(rewards), rewards, strict=True):
        assert got == pytest.approx(float(Fraction(reward) - mean), abs=1e-14)
    assert sum(group_advantages(rewards)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [float("inf")]])
def test_bad_rewards_are_refused(rewards):
    with pytest.raises(ValueError):
        group_advantages(rewards)
