"""One update: datum, PPO-clip loss, chunked log-probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies

from advantages import (
    SignalSettings, TokenScores, make_datum, mismatch_metrics, token_logprobs, token_losses, update_metrics,
)  # fmt: skip

SIGNAL = SignalSettings()

# --- datum ---


def test_golden_datum():
    tokens = [7, 8, 9, 1, 2, 5, 6, 3, 4, 4]
    datum = make_datum(tokens, [(3, 5), (7, 8)], [[-0.5, -0.25], [-1.0]], [0.75, 0.75], name="put mug/1")
    assert datum.name == "put mug/1"
    assert datum.tokens_T.tolist() == [7, 8, 9, 1, 2, 5, 6]
    assert datum.targets_T.tolist() == [8, 9, 1, 2, 5, 6, 3]
    assert datum.mask_T.tolist() == [False, False, True, True, False, False, True]
    assert datum.old_logprobs_T.tolist() == [0, 0, -0.5, -0.25, 0, 0, -1]
    assert datum.advantages_T.tolist() == [0, 0, 0.75, 0.75, 0, 0, 0.75]
    assert datum.tokens_T.dtype == datum.targets_T.dtype == torch.int64
    assert datum.old_logprobs_T.dtype == datum.advantages_T.dtype == torch.float32


@settings(max_examples=100, deadline=None)
@given(strategies.lists(strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 4)), min_size=1),
       strategies.integers(0, 3))
def test_every_sampled_token_is_trained_once(turns, tail):
    tokens, spans, sampled, logprobs = [100], [], [], []
    for observation, completion in turns:
        tokens += range(len(tokens) + 100, len(tokens) + 100 + observation)
        spans.append((len(tokens), len(tokens) + completion))
        tokens += range(len(tokens) + 100, len(tokens) + 100 + completion)
        sampled += tokens[spans[-1][0]:]
        logprobs.append([-0.5 * token for token in tokens[spans[-1][0]:]])
    datum = make_datum(tokens + [1] * tail, spans, logprobs, [1.0] * len(spans))
    assert datum.targets_T[datum.mask_T].tolist() == sampled
    assert datum.old_logprobs_T[datum.mask_T].tolist() == [-0.5 * token for token in sampled]
    assert not datum.old_logprobs_T[~datum.mask_T].any() and not datum.advantages_T[~datum.mask_T].any()
    assert datum.mask_T[-1] and len(datum.tokens_T) == len(datum.targets_T) == sampled[-1] - 100


@pytest.mark.parametrize(("spans", "logprobs", "advantage", "message"), [
    ([(0, 2)], [[-1, -1]], 1.0, "its prompt has 0 tokens"),
    ([(2, 4), (3, 5)], [[-1, -1], [-1, -1]], 1.0, "turn 1: its prompt has 3 tokens, but 4 were there"),
    ([(2, 4), (4, 5)], [[-1, -1], [-1]], 1.0, "turn 1: its prompt has 4 tokens, but 4 were there"),
    ([(4, 9)], [[-1] * 5], 1.0, r"completion at tokens 4..9 of 6"),
    ([(4, 4)], [[]], 1.0, "completion at tokens 4..4 of 6"),
    ([(2, 4)], [[-1]], 1.0, "1 log-probabilities for 2 tokens"),
    ([(2, 4)], [[-1, -1], [-1]], 1.0, "1 completions but 2 lists"),
    ([(2, 4)], [[-1, math.nan]], 1.0, "not finite"),
    ([(2, 4)], [[-1, -math.inf]], 1.0, "not finite"),
    ([(2, 4)], [[-1, -1]], math.nan, r"advantages \[nan\]"),
    ([], [], 1.0, "no sampled token"),
])  # fmt: skip
def test_bad_trajectory_is_refused_by_name(spans, logprobs, advantage, message):
    with pytest.raises(ValueError, match=f"^game 3, branch 5: .*{message}"):
        make_datum([1, 2, 3, 4, 5, 6], spans, logprobs, [advantage] * len(spans), name="game 3, branch 5")


# --- loss ---

RATIOS = [0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0]


def reference_loss(new, old, advantages, low, high):
    total = 0.0
    for logprob, old_logprob, advantage in zip(new, old, advantages, strict=True):
        ratio = math.exp(logprob - old_logprob)
        total -= min(ratio * advantage, min(max(ratio, low), high) * advantage)
    return total


@pytest.mark.parametrize("advantage", [1.7, -0.6])
def test_loss_and_gradient_equal_the_reference_in_every_clip_region(advantage):
    old = [-0.1 - 0.7 * i for i in range(len(RATIOS))]
    new = [value + math.log(ratio) for value, ratio in zip(old, RATIOS)]
    advantages = [advantage] * len(RATIOS)
    logprobs = torch.tensor(new, requires_grad=True)
    entropies, ones = torch.rand(len(RATIOS)), torch.ones(len(RATIOS))
    scores = TokenScores(logprobs, torch.tensor(old), torch.tensor(advantages), entropies, ones, logprobs.detach())
    loss = token_losses(scores, SIGNAL).sum()
    loss.backward()
    assert loss.item() == pytest.approx(reference_loss(new, old, advantages, 0.8, 1.2), abs=1e-5)

    for i, ratio in enumerate(RATIOS):
        step = 1e-6
        above = reference_loss(new[:i] + [new[i] + step] + new[i + 1:], old, advantages, 0.8, 1.2)
        below = reference_loss(new[:i] + [new[i] - step] + new[i + 1:], old, advantages, 0.8, 1.2)
        assert logprobs.grad[i].item() == pytest.approx((above - below) / (2 * step), abs=1e-5)
        clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
        assert logprobs.grad[i].item() == pytest.approx(0.0 if clipped else -advantage * ratio, abs=1e-5)

    metrics = update_metrics(scores._replace(logprobs=logprobs.detach()), SIGNAL)
    assert metrics["tokens/trained"] == len(RATIOS)
    assert metrics["train/clip_fraction"] == pytest.approx(2 / len(RATIOS))  # the two above 1.2, or the two below 0.8
    assert metrics["train/loss"] == loss.item()
    assert metrics["train/ratio_mean"] == pytest.approx(sum(RATIOS) / len(RATIOS), rel=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(3.0, rel=1e-5)
    assert metrics["train/entropy"] == pytest.approx(sum(entropies.tolist()) / len(RATIOS), rel=1e-5)


def test_mismatch_by_hand():
    metrics = mismatch_metrics(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5]))
    assert metrics["mismatch/mean"] == pytest.approx(1.5 / 3)
    assert metrics["mismatch/max"] == pytest.approx(1.0)
    assert metrics["mismatch/k1"] == pytest.approx((-0.5 + 1.0) / 3)
    assert metrics["mismatch/k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1) - 1 + 1) / 3)


def test_kl_estimators_agree_with_the_exact_kl():
    torch.manual_seed(0)
    rollout_V, trainer_V = torch.randn(2, 20).log_softmax(-1)
    samples = torch.multinomial(rollout_V.exp(), 200_000, replacement=True)
    metrics = mismatch_metrics(trainer_V[samples], rollout_V[samples])
    exact = (rollout_V.exp() * (rollout_V - trainer_V)).sum().item()
    assert metrics["mismatch/k1"] == pytest.approx(exact, rel=0.02)
    assert metrics["mismatch/k3"] == pytest.approx(exact, rel=0.02)


# --- log-probabilities ---


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_chunked_logprobs_entropies_and_gradients_equal_the_full_float64_ones(chunk, biased, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator)
    weight = torch.randn(30, 8, generator=generator)
    bias = torch.randn(30, generator=generator) if biased else None
    targets = torch.randint(0, 30, (11,), generator=generator)
    coefficients = torch.randn(11, generator=generator)

    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    logprobs, entropies = token_logprobs(*inputs, *([] if biased else [None]), targets, temperature, chunk)
    (logprobs * coefficients).sum().backward()

    doubles = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    full = (torch.nn.functional.linear(*doubles) / temperature).log_softmax(-1)
    expected = full[torch.arange(11), targets]
    (expected * coefficients).sum().backward()

    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), -(full.exp() * full).sum(-1), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)


def test_softmax_is_fp32_for_a_bf16_head():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8).bfloat16(), torch.randn(30, 8).bfloat16()
    targets = torch.arange(5)
    logprobs, _ = token_logprobs(hidden, weight, None, targets, 1.0, 2)
    expected = (hidden @ weight.T).double().log_softmax(-1)[torch.arange(5), targets]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=1e-6)
