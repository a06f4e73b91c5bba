"""How much signal an update's gradient holds, before a run is paid for; all weights, the base model, temperature 1.

    uv run python tests/gradient_signal.py --batches 16 --test-batches 12 --steps 0.003 0.006 0.01 0.02
    uv run python tests/gradient_signal.py --advantage group-mean gigpo state-value,gae_lambda=0.5 --steps 0.01

Plays batches of the recipe's size, takes the gradient of each, and prints the mean cosine between two of them: the share
of a batch's squared gradient that is signal (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, call
its inverse, in batches, the noise scale). Then moves the weights along the mean gradient, scaled by its root mean square as
Adam does, by each of `--steps`, and plays other games with the base and with these weights, with the same seeds.
Several `--advantage` are compared on the same rollouts, their steps made as long as the first one's. For gae the values of
a batch come from a value head that has learned on every second other batch.
"""

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from data import batch_of_games, find_games, shuffle_games
from environment import EnvironmentSettings, WorldPool
from protocol import load_chat_tokens
from rollout import DEMO_MODEL, RolloutSettings, Sampler, gather_or_cancel, play_group
from advantages import SignalSettings, TokenScores, credit, episode_of, token_losses, training_data
from train import Policy, TrainSettings, ValueHead

GAMES, GROUP, FIRST = 8, 8, 300  # the recipe's batch; the first update of a run that would see these games


def choice(text: str) -> tuple[str, SignalSettings]:
    """What to call an estimator, and its settings: `name` or `name,setting=value,...`."""
    name, *more = text.split(",")
    given = dict(one.split("=") for one in more)
    kinds = {"discount": float, "gae_lambda": float, "step_weight": float, "state_values": str}
    return text, SignalSettings(name, **{key: kinds.get(key, bool)(value) for key, value in given.items()})


def episodes_of(policy: Policy, batches: list, valued: bool) -> list:
    """Each batch as credit sees it."""
    if not valued:
        return [[[episode_of(t) for t in group] for group in groups] for groups in batches]
    judged = [None] * len(batches)
    for half in (0, 1):
        head = ValueHead(policy.width, TrainSettings.value_learning_rate)
        for groups in batches[1 - half :: 2]:
            explained = head.fit(head.judge(policy, groups), SignalSettings("gae"))["train/value_explained_variance"]
        print(f"value head: explains {explained:.0%} of the last batch's returns, before it learns from it", flush=True)
        judged[half::2] = [head.judge(policy, groups) for groups in batches[half::2]]
    return judged


def batch_gradients(policy: Policy, groups: list, episodes: list, choices: list[SignalSettings]) -> list[torch.Tensor]:
    """Of each choice's loss over a batch, flat, float32 on the CPU; without advantage it is zeros."""
    sums = [[torch.zeros_like(p) for p in policy.parameters] for _ in choices]
    by_choice = [training_data(groups, credit(episodes, signal), signal) for signal in choices]
    by_name = [{datum.name: datum for datum in data} for data in by_choice]
    for name in dict.fromkeys(name for data in by_name for name in data):
        logprobs_A = None
        for data, signal, total in zip(by_name, choices, sums, strict=True):
            datum = data.get(name)
            if datum is None or not datum.advantages_T.any():
                continue
            if logprobs_A is None:  # one forward for all
                logprobs_A, entropies_A = policy.logprobs(datum)
            parts = (part_T[datum.mask_T] for part_T in (datum.old_logprobs_T, datum.advantages_T, datum.weights_T))
            old_A, advantages_A, weights_A = parts
            scores = TokenScores(logprobs_A, old_A, advantages_A, entropies_A, weights_A, logprobs_A.detach())
            gradients = torch.autograd.grad(token_losses(scores, signal).sum(), policy.parameters, retain_graph=True)
            for one, more in zip(total, gradients, strict=True):
                one += more
    return [torch.cat([one.flatten() for one in total]) for total in sums]


def mean_cosine(gradients: torch.Tensor) -> tuple[float, float]:
    """Mean cosine between different rows of [N, P], and its standard error by leaving out one row at a time."""
    unit = torch.nn.functional.normalize(gradients, dim=1)
    cosines = (unit @ unit.T).double()
    n = len(cosines)

    def mean_of(rows: list[int]) -> float:
        some = cosines[rows][:, rows]
        return ((some.sum() - some.trace()) / (len(rows) * (len(rows) - 1))).item()

    left_out = [mean_of([row for row in range(n) if row != out]) for out in range(n)]
    return mean_of(list(range(n))), math.sqrt((n - 1) ** 2 / n * statistics.variance(left_out))


def difference(values: list[float], base: list[float]) -> str:
    """Mean of the differences and its standard error, over games."""
    gaps = [one - other for one, other in zip(values, base, strict=True)]
    return f"{statistics.fmean(gaps):+.3f} +- {statistics.stdev(gaps) / math.sqrt(len(gaps)):.3f}"


async def study(args: argparse.Namespace) -> None:
    play = RolloutSettings(  # fp32 on a GPU too: the steps are too small for bf16
        base_model=args.base_model, max_assistant_tokens=32, max_episode_steps=args.max_episode_steps, dtype="float32"
    )
    games = shuffle_games(find_games(args.data_root, "train"), play.seed)
    chat = load_chat_tokens(play.base_model)
    policy = Policy(play.base_model, lora_rank=0, device="cpu", dtype=torch.float32, recompute=False)
    names, choices = zip(*map(choice, args.advantage))
    with WorldPool(EnvironmentSettings()) as pool, tempfile.TemporaryDirectory() as folder:
        sampler = await Sampler.start(play, chat.stop_token_ids)

        async def batch(update: int) -> list:
            some = batch_of_games(games, update, GAMES)
            return await gather_or_cancel(play_group(sampler, chat, pool, game, GROUP, update, play) for game in some)

        try:
            batches = [await batch(FIRST + number) for number in tqdm(range(args.batches), desc="rollouts")]
            plain = episodes_of(policy, batches, valued=False)
            valued = episodes_of(policy, batches, valued=True) if any(one.advantage == "gae" for one in choices) else plain
            found = []
            for groups, *both in tqdm(list(zip(batches, plain, valued)), desc="gradients"):
                found.append([gradient for kind, episodes in enumerate(both) for gradient in batch_gradients(
                    policy, groups, episodes, [one for one in choices if (one.advantage == "gae") == kind])])  # fmt: skip
            order = sorted(range(len(choices)), key=lambda i: choices[i].advantage == "gae")  # as they were taken
            directions = {}
            for name, gradients in zip([names[i] for i in order], map(torch.stack, zip(*found)), strict=True):
                cosine, error = mean_cosine(gradients)
                print(f"{name}: {args.batches} batches of {GAMES * GROUP} trajectories: mean cosine {cosine:.4f} +- {error:.4f}",
                      flush=True)  # fmt: skip
                directions[name] = gradients.mean(0) / (gradients.pow(2).mean(0).sqrt() + 1e-6)
            first = next(iter(directions.values())).norm()
            directions = {name: direction * (first / direction.norm()) for name, direction in directions.items()}
            sizes = [parameter.numel() for parameter in policy.parameters]
            base = None
            tries = [("base", 0.0), *((name, length) for name in directions for length in args.steps)]
            for version, (name, length) in enumerate(tries if args.steps else [], 1):
                direction = directions.get(name, torch.zeros(sum(sizes)))
                moved = {
                    weight: (parameter.data - length * part.view(parameter.shape)).contiguous()
                    for (weight, parameter), part in zip(policy.model.named_parameters(), direction.split(sizes), strict=True)
                }
                target = Path(folder) / str(version)
                target.mkdir()
                save_file(moved, target / "model.safetensors", metadata={"format": "pt"})
                await sampler.reload(target, version)
                groups = sum([await batch(FIRST + 100 + number) for number in range(args.test_batches)], [])
                means = {what: [statistics.fmean(getattr(t, what) for t in group) for group in groups]
                         for what in ("won", "reward", "invalid_actions")}  # fmt: skip
                base = base or means
                print(f"{name}, step {length:g}: " + ", ".join(
                    f"{what} {statistics.fmean(values):.3f} ({difference(values, base[what])})" for what, values in means.items()
                ), flush=True)  # fmt: skip
        finally:
            sampler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-model", default=DEMO_MODEL)
    parser.add_argument("--data-root", default="datasets/alfworld")
    parser.add_argument("--batches", type=int, default=16, help="batches whose gradients are taken; 3 at least")
    parser.add_argument("--test-batches", type=int, default=12, help="other batches that are played with each step")
    parser.add_argument("--advantage", nargs="+", default=["group-mean"], help="estimators, as name or name,setting=value")
    parser.add_argument("--steps", type=float, nargs="*", default=[], help="lengths along the mean gradient")
    parser.add_argument("--max-episode-steps", type=int, default=20)
    asyncio.run(study(parser.parse_args()))


if __name__ == "__main__":
    main()
