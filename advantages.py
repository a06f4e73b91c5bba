"""The learning signal: from the trajectories of an update to what the optimizer sees. Pure functions.

In the order of an update: a group's rewards become advantages (credit); a trajectory with an advantage becomes a
training datum; the policy's log-probabilities at its sampled tokens are computed; loss and metrics follow from them.

A group is the K trajectories of one game in one update. Its advantages are what each trajectory earned above the
group's mean, so they sum to zero and a group whose rewards are all equal teaches nothing.

Shown by: `uv run --extra cpu pytest tests/test_advantages.py tests/test_update.py`
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from protocol import PrefixViolation, check_prefix_extension
from rollout import Trajectory

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


def rollout_metrics(groups: list[list[Trajectory]], advantages: list[list[float]]) -> dict[str, float]:
    """What an update's trajectories say, before any training: `reward/`, `rollout/` and `advantage/`."""
    trajectories = [trajectory for group in groups for trajectory in group]
    n, turns = len(trajectories), max(1, sum(len(t.turns) for t in trajectories))
    flat = [advantage for group in advantages for advantage in group]
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
        "advantage/equal_groups": sum(not any(group) for group in advantages) / len(groups),
        "advantage/trained_trajectories": sum(map(bool, flat)),
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


def make_datum(tokens: Sequence[int], spans: Sequence[tuple[int, int]], logprobs: Sequence[Sequence[float]],
               advantage: float, name: str = "trajectory") -> TrainingDatum:
    """Build the training sequence of a trajectory; `name` says in errors which one it is.

    tokens: every token once (prompt, completions, observations). spans: [start, end) of each completion in `tokens`,
    in order. logprobs: the sampler's log-probabilities, a list a span. Tokens after the last completion predict
    nothing that was sampled and are cut off.
    Raises ValueError for spans that are out of order, outside the tokens or at position 0, for log-probabilities
    that do not match the spans in number or are not finite, and where nothing was sampled.
    """
    if len(spans) != len(logprobs):
        raise ValueError(f"{name}: {len(spans)} completions but {len(logprobs)} lists of log-probabilities")
    if not math.isfinite(advantage):
        raise ValueError(f"{name}: advantage is {advantage}")
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
    old_logprobs_T = torch.zeros(len(tokens_T) - 1)
    old_logprobs_T[positions_A] = torch.tensor([logprob for span in logprobs for logprob in span])
    return TrainingDatum(name, tokens_T[:-1], tokens_T[1:], mask_T, old_logprobs_T, mask_T.float() * advantage)


def datum_of(trajectory: Trajectory, advantage: float) -> TrainingDatum:
    name = f"{trajectory.game.game_id} branch {trajectory.branch}"
    return make_datum(trajectory.tokens, trajectory.spans, trajectory.logprobs, advantage, name)


def training_data(groups: list[list[Trajectory]], advantages: list[list[float]]) -> list[TrainingDatum]:
    """The data of an update; trajectories without advantage have no gradient and are left out.

    If none is left, one without advantage, on which trainer and engine can be compared; empty if nothing was sampled.
    """
    played = [pair for pair in zip(sum(groups, []), sum(advantages, []), strict=True) if pair[0].turns]
    trained = [pair for pair in played if pair[1]] or played[:1]
    return [datum_of(trajectory, advantage) for trajectory, advantage in trained]


# --- log-probabilities -----------------------------------------------------------------------------------------------


class _HeadLogprobs(torch.autograd.Function):
    """Language-model head and log-softmax of C rows, whose logits are computed again in backward.

    By hand rather than by checkpointing, because the logits can be turned into the gradient in place: at the peak
    there are two fp32 [C, vocab] buffers, with checkpointing three (measured).
    """

    @staticmethod
    def forward(ctx, hidden_CD, weight_VD, bias_V, targets_C, temperature):
        ctx.save_for_backward(hidden_CD, weight_VD, bias_V, targets_C)
        ctx.temperature = temperature
        logprobs_CV = _HeadLogprobs.log_softmax(hidden_CD, weight_VD, bias_V, temperature)
        logprobs_C = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
        entropies_C = logprobs_CV.exp().mul_(logprobs_CV).sum(-1).neg_()
        ctx.mark_non_differentiable(entropies_C)
        return logprobs_C, entropies_C

    @staticmethod
    def backward(ctx, grad_C, _):
        hidden_CD, weight_VD, bias_V, targets_C = ctx.saved_tensors
        probs_CV = _HeadLogprobs.log_softmax(hidden_CD, weight_VD, bias_V, ctx.temperature).exp_()
        # d logprob[target] / d logits = (onehot(target) - softmax) / temperature
        grad_CV = probs_CV.mul_(-grad_C[:, None]).scatter_add_(1, targets_C[:, None], grad_C[:, None])
        grad_CV = grad_CV.div_(ctx.temperature).to(weight_VD.dtype)
        grad_weight_VD = grad_CV.T @ hidden_CD if ctx.needs_input_grad[1] else None
        grad_bias_V = grad_CV.sum(0) if ctx.needs_input_grad[2] else None
        return grad_CV @ weight_VD, grad_weight_VD, grad_bias_V, None, None

    @staticmethod
    def log_softmax(hidden_CD, weight_VD, bias_V, temperature):
        logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float().div_(temperature)
        return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


def token_logprobs(hidden_AD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None,
                   targets_A: torch.Tensor, temperature: float, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the targets and entropies of their distributions, float32 [A] each, in nats.

    hidden_AD: the decoder's last hidden states at the positions that predict `targets_A`. Logits are divided by the
    sampling temperature and exist for `chunk` rows at a time (2 buffers of chunk * vocab * 4 bytes), in forward and
    in backward. The log-probabilities are differentiable; the entropies are a metric and are not.
    """
    parts = [
        _HeadLogprobs.apply(hidden_CD, weight_VD, bias_V, targets_C, temperature)
        for hidden_CD, targets_C in zip(hidden_AD.split(chunk), targets_A.split(chunk))
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


# --- loss and metrics ------------------------------------------------------------------------------------------------


def ppo_clip_loss(logprobs_A: torch.Tensor, old_logprobs_A: torch.Tensor, advantages_A: torch.Tensor,
                  clip_low: float, clip_high: float) -> torch.Tensor:
    """PPO-clip summed over sampled tokens: sum of -min(r A, clip(r, clip_low, clip_high) A), r = exp(new - old).

    All inputs float32 [A]; returns the scalar loss.
    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7, with two free thresholds.
    """
    ratio_A = torch.exp(logprobs_A - old_logprobs_A)
    return -torch.minimum(ratio_A * advantages_A, ratio_A.clamp(clip_low, clip_high) * advantages_A).sum()


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


def update_metrics(logprobs_A: torch.Tensor, old_logprobs_A: torch.Tensor, advantages_A: torch.Tensor,
                   entropies_A: torch.Tensor, clip_low: float, clip_high: float) -> dict[str, float]:
    """Metrics of an update over its A >= 1 trained tokens: the loss is their sum, all else means and maxima.

    A token counts as clipped where the clip decides the minimum, i.e. it has no gradient.
    """
    ratio_A = torch.exp(logprobs_A - old_logprobs_A)
    clipped_A = ratio_A.clamp(clip_low, clip_high) * advantages_A < ratio_A * advantages_A
    return {
        "tokens/trained": len(logprobs_A),
        "train/loss": ppo_clip_loss(logprobs_A, old_logprobs_A, advantages_A, clip_low, clip_high).item(),
        "train/clip_fraction": clipped_A.float().mean().item(),
        "train/ratio_mean": ratio_A.mean().item(),
        "train/ratio_max": ratio_A.max().item(),
        "train/entropy": entropies_A.mean().item(),
    } | mismatch_metrics(logprobs_A, old_logprobs_A)
