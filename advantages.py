"""The learning signal: from the trajectories of an update to what the optimizer sees. Pure functions.

In the order of an update: a group's rewards become advantages (credit); a trajectory with an advantage becomes a
training datum; the policy's log-probabilities at its sampled tokens are computed; loss and metrics follow from them.

A group is the K trajectories of one game in one update. Its advantages are what each trajectory earned above the
group's mean, so they sum to zero and a group whose rewards are all equal teaches nothing.

Shown by: `uv run --extra cpu pytest tests/test_advantages.py tests/test_update.py`
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from protocol import PrefixViolation, check_prefix_extension
from rollout import Trajectory, flag, require

# --- settings -----------------------------------------------------------------------------------------------------

LOSS_SUMS = ("trajectory-tokens", "token-mean", "turn-mean")


@dataclass(frozen=True)
class SignalSettings:
    """What an update learns from: credit and loss; the defaults are the recipe."""

    ppo_clip_low: float = flag(0.8, "lower clip threshold of the ratio")
    ppo_clip_high: float = flag(1.2, "upper clip threshold of the ratio")
    loss_sum: str = flag(
        "trajectory-tokens", "how the loss adds up: trajectory-tokens (every sampled token counts 1), token-mean (their mean "
        "over the update) or turn-mean (every turn counts the same, however wordy)",
    )  # fmt: skip
    kl_coefficient: float = flag(0.0, "weight of KL(policy || base) in the loss, to stay near the base; needs a LoRA")
    entropy_coefficient: float = flag(0.0, "weight of the entropy in the loss, to keep exploring")

    def __post_init__(self) -> None:
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


def credit(group: list[Trajectory]) -> list[list[float]]:
    """One advantage a turn, by trajectory of a group."""
    advantages_K = group_advantages([trajectory.reward for trajectory in group])
    return [[advantage] * len(trajectory.turns) for trajectory, advantage in zip(group, advantages_K)]


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
