"""From the rewards of a group to advantages. Pure functions.

A group is the K trajectories of one game in one update. Its advantages are what each trajectory earned above the
group's mean, so they sum to zero and a group whose rewards are all equal teaches nothing.
"""

import math
from collections.abc import Sequence


def group_advantages(rewards_K: Sequence[float]) -> list[float]:
    """A_k = R_k - mean(R), one advantage a trajectory; no division by the standard deviation.

    The baseline of GRPO (Shao et al., "DeepSeekMath", 2024, section 4.1) without its normalisation, which would weigh
    games with nearly equal rewards up (Liu et al., "Understanding R1-Zero-Like Training", 2025, section 3.1).
    What is left of equal rewards by rounding (below 1e-9) is exactly 0.0, so that it can be left out of the update.
    Raises ValueError for an empty group or a reward that is not finite.
    """
    if not rewards_K:
        raise ValueError("a group without trajectories has no advantages")
    if not all(math.isfinite(reward) for reward in rewards_K):
        raise ValueError(f"rewards must be finite numbers, got {list(rewards_K)}")
    mean = math.fsum(rewards_K) / len(rewards_K)
    return [reward - mean if abs(reward - mean) > 1e-9 else 0.0 for reward in rewards_K]
