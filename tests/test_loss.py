"""The loss beyond the recipe's: other sums, KL to the base, entropy, several passes; and schedules. Against float64 or by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from data import SettingsError
from advantages import (
    Batch, SignalSettings, TokenScores, make_datum, split_data, token_logprobs, token_losses, training_data,
)  # fmt: skip
from train import Policy, TrainSettings, horizon_at, learn, learning_rate_at
from transformers import AutoModelForCausalLM, Qwen3Config

SIGNAL = SignalSettings()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def make_policy(base, **settings):
    """With an adapter that is no longer 0, so that policy and base differ."""
    policy = Policy(base, lora_rank=4, device="cpu", **{"learning_rate": 1e-2} | settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def random_datum(seed=0, advantages=(0.7, -0.2, 1.1)):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (40,), generator=generator).tolist()
    spans = [(9, 14), (20, 27), (28, 34)]
    logprobs = [(-4 + torch.randn(end - start, generator=generator) * 0.3).tolist() for start, end in spans]
    return make_datum(tokens, spans, logprobs, advantages, name=f"game {seed}")


def gradient_of(policy, *data, signal=SIGNAL):
    for parameter in policy.parameters:
        parameter.grad = None
    for datum in data:
        policy.accumulate(datum, signal)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters])


def test_a_turns_advantage_reaches_its_own_tokens_and_no_others():
    datum = random_datum(advantages=(0.5, 0.0, -2.0))
    expected = torch.zeros(33)
    expected[8:13], expected[27:33] = 0.5, -2.0  # position t predicts token t + 1
    assert torch.equal(datum.advantages_T, expected)
    scores = [torch.zeros(33, requires_grad=True), torch.zeros(33), datum.advantages_T, *torch.ones(2, 33), torch.zeros(33)]
    token_losses(TokenScores(*scores), SIGNAL).sum().backward()
    assert torch.equal(scores[0].grad, -expected)


def test_the_gradient_of_turns_is_the_sum_of_the_gradients_of_each(base):
    policy = make_policy(base)
    parts = [gradient_of(policy, random_datum(advantages=[a if i == turn else 0.0 for i, a in enumerate((0.7, -0.2, 1.1))]))
             for turn in range(3)]  # fmt: skip
    torch.testing.assert_close(gradient_of(policy, random_datum()), sum(parts), rtol=1e-4, atol=1e-6)
    assert all(part.norm() > 0 for part in parts)


@pytest.mark.parametrize("chunk", [3, 50])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_the_entropy_equals_the_full_float64_one(chunk, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((11, 8), (30, 8), (30,)))
    targets = torch.randint(0, 30, (11,), generator=generator)
    of_logprobs, of_entropies = torch.randn(2, 11, generator=generator)
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    logprobs, entropies = token_logprobs(*inputs, targets, temperature, chunk, entropy_counts=True)
    (logprobs * of_logprobs + entropies * of_entropies).sum().backward()

    doubles = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    full = (linear(*doubles) / temperature).log_softmax(-1)
    (full[torch.arange(11), targets] * of_logprobs - (full.exp() * full).sum(-1) * of_entropies).sum().backward()
    for ours, theirs in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)


def test_loss_with_kl_and_entropy_equals_plain_transformers_in_float64(base):
    """Loss and its gradient through the whole model, against full logits of the same weights in float64."""
    signal = SignalSettings(kl_coefficient=0.3, entropy_coefficient=0.05, loss_sum="turn-mean")
    policy, datum = make_policy(base), random_datum()
    weights_T = torch.zeros(33)
    for start, end in ((9, 14), (20, 27), (28, 34)):
        weights_T[start - 1 : end - 1] = 1 / (3 * (end - start))
    ours = gradient_of(policy, replace(datum, weights_T=weights_T), signal=signal)

    model = policy.model.double()

    def log_softmax():
        return model(input_ids=datum.tokens_T[None]).logits[0].log_softmax(-1)[datum.mask_T]

    full, targets = log_softmax(), datum.targets_T[datum.mask_T]
    new = full.gather(1, targets[:, None])[:, 0]
    with model.disable_adapter(), torch.no_grad():
        reference = log_softmax().gather(1, targets[:, None])[:, 0]
    advantages, old = datum.advantages_T[datum.mask_T].double(), datum.old_logprobs_T[datum.mask_T].double()
    ratio = (new - old).exp()
    pg = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (reference - new).exp() - 1 - (reference - new)
    entropy = -(full.exp() * full).sum(-1)
    loss = (weights_T[datum.mask_T] * (pg + 0.3 * kl - 0.05 * entropy)).sum()
    theirs = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, policy.parameters)])
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert kl.mean() > 1e-3  # the base is another model


def test_sums_over_tokens_by_hand():
    def trajectory(branch, *lengths):
        tokens, spans, turns = [1], [], []
        for length in lengths:
            spans.append((len(tokens), len(tokens) + length))
            tokens = tokens + [2] * length + [3]
            turns.append(SimpleNamespace(logprobs=[-1.0] * length))
        game = SimpleNamespace(game_id="g")
        return SimpleNamespace(game=game, branch=branch, tokens=tokens, spans=spans, turns=turns,
                               logprobs=[turn.logprobs for turn in turns])  # fmt: skip

    groups, advantages = [[trajectory(0, 1, 3), trajectory(1, 4)]], [[[1.0, 1.0], [0.0]]]

    def weights(loss_sum, **more):
        data = training_data(groups, advantages, SignalSettings(loss_sum=loss_sum, **more))
        return [datum.weights_T[datum.mask_T].tolist() for datum in data]

    assert weights("trajectory-tokens") == [[1.0] * 4]
    assert weights("token-mean") == [[1 / 8] * 4]  # of all that was sampled, with or without advantage
    assert weights("turn-mean") == [pytest.approx([1 / 3] + [1 / 9] * 3)]
    # another term has a gradient where there is no advantage, too
    assert weights("token-mean", kl_coefficient=0.1) == [[1 / 8] * 4, [1 / 8] * 4]


@pytest.mark.parametrize(("changed", "named"), [
    ({"loss_sum": "mean"}, "--loss-sum is 'mean'"), ({"kl_coefficient": -1.0}, "--kl-coefficient is -1.0"),
    ({"entropy_coefficient": math.inf}, "--entropy-coefficient is inf"),
    ({"ppo_clip_low": 1.3, "ppo_clip_high": 1.2}, "--ppo-clip-low is '1.3"), ({"ppo_clip_high": 0.9}, "--ppo-clip-high 0.9"),
])  # fmt: skip
def test_a_signal_that_cannot_be_is_refused_by_its_flag(changed, named):
    with pytest.raises(SettingsError, match=named):
        SignalSettings(**changed)


# --- passes and schedules ---


def test_several_passes_are_the_steps_that_one_would_take_by_hand(base):
    """Two epochs of two minibatches, against Adam in the same order by hand; the ratio stays against the rollout's."""
    data = [random_datum(seed) for seed in range(5)]
    settings = TrainSettings(epochs=2, minibatches=2, learning_rate=1e-2, max_mismatch_kl=1e9)
    policy, other = make_policy(base), make_policy(base)
    metrics = learn(policy, Batch(data, update=7), settings, SIGNAL)
    kls = []
    for epoch in (1, 2):
        gaps = []
        for part in split_data(data, 2, f"7 {epoch}"):
            scores = [other.accumulate(datum, SIGNAL) for datum in part]
            gaps += [(s.logprobs - s.old_logprobs).double() for s in scores]
            other.step(1.0)
        gap = torch.cat(gaps)
        kls.append((gap.expm1() - gap).mean().item())
    assert all(map(torch.equal, policy.parameters, other.parameters))
    assert metrics["train/optimizer_steps"] == 4 and metrics["train/kl_2"] == pytest.approx(kls[1], rel=1e-6)
    assert metrics["mismatch/k3"] != pytest.approx(kls[0], rel=1e-6)  # before the first step only


def test_stop_kl_ends_the_passes_before_the_step_that_would_be_too_far(base):
    data = [random_datum(seed) for seed in range(4)]
    policy = make_policy(base, learning_rate=2e-3)
    near = [policy.logprobs(datum)[0].detach() for datum in data]
    data = [replace(d, old_logprobs_T=d.old_logprobs_T.masked_scatter(d.mask_T, logprobs)) for d, logprobs in zip(data, near)]
    settings = TrainSettings(epochs=50, learning_rate=2e-3, stop_kl=0.0085)
    metrics = learn(policy, Batch(data), settings, SIGNAL)
    steps = metrics["train/optimizer_steps"]
    assert 1 < steps < 50
    assert metrics[f"train/kl_{steps}"] <= 0.0085
    assert all(parameter.grad is None for parameter in policy.parameters)
    gap = torch.cat([policy.measure(d) - d.old_logprobs_T[d.mask_T] for d in data]).double()
    assert (gap.expm1() - gap).mean() > 0.0085


def test_minibatches_hold_each_datum_once_in_an_order_that_the_update_decides():
    data = [random_datum(seed) for seed in range(7)]
    parts = split_data(data, 3, "1 1")
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert {datum.name for part in parts for datum in part} == {datum.name for datum in data}
    assert [[d.name for d in part] for part in parts] == [[d.name for d in part] for part in split_data(data, 3, "1 1")]
    assert [[d.name for d in part] for part in parts] != [[d.name for d in part] for part in split_data(data, 3, "2 1")]
    assert split_data(data, 1, "x") == [data] and len(split_data(data[:2], 3, "x")) == 2


def test_learning_rates_by_hand():
    def rates(**settings):
        settings = TrainSettings(learning_rate=1.0, max_steps=6, **settings)
        return [learning_rate_at(update, settings) for update in range(1, 7)]

    assert rates() == [1.0] * 6
    assert rates(warmup_updates=3) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(learning_rate_schedule="linear") == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates(learning_rate_schedule="linear", warmup_updates=2) == pytest.approx([1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4])
    cosine = rates(learning_rate_schedule="cosine")
    assert cosine == pytest.approx([(1 + math.cos(math.pi * done / 6)) / 2 for done in range(6)])


def test_horizon_rises_by_stages_and_stays():
    settings = TrainSettings(horizon="10,20,30", horizon_every=2)
    assert [horizon_at(update, settings, 50) for update in range(1, 9)] == [10, 10, 20, 20, 30, 30, 30, 30]
    assert horizon_at(5, TrainSettings(), 50) == 50 and horizon_at(9, TrainSettings(horizon="20"), 50) == 20
