"""How much signal an update's gradient holds, before a run is paid for; all weights, the base model, temperature 1.

    uv run python tests/gradient_signal.py --batches 16 --test-batches 12 --steps 0.003 0.006 0.01 0.02

Plays batches of the recipe's size, takes the gradient of each, and prints the mean cosine between two of them: the share
of a batch's squared gradient that is signal (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, call
its inverse, in batches, the noise scale). Then moves the weights along the mean gradient, scaled by its root mean square as
Adam does, by each of `--steps`, and plays other games with the base and with these weights, with the same seeds.
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
from advantages import SignalSettings, credit, episode_of, training_data
from train import Policy

GAMES, GROUP, FIRST = 8, 8, 300  # the recipe's batch; the first update of a run that would see these games


def batch_gradient(policy: Policy, groups: list) -> torch.Tensor:
    """Of the recipe's loss over a batch, flat, float32 on the CPU; batches without advantage give zeros."""
    policy.optimizer.zero_grad()
    signal = SignalSettings()
    for datum in training_data(groups, credit([[episode_of(t) for t in group] for group in groups], signal), signal):
        policy.accumulate(datum, signal)
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu() for p in policy.parameters])


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
    policy = Policy(play.base_model, lora_rank=0, device="cpu", dtype=torch.float32)
    with WorldPool(EnvironmentSettings()) as pool, tempfile.TemporaryDirectory() as folder:
        sampler = await Sampler.start(play, chat.stop_token_ids)

        async def batch(update: int) -> list:
            some = batch_of_games(games, update, GAMES)
            return await gather_or_cancel(play_group(sampler, chat, pool, game, GROUP, update, play) for game in some)

        try:
            gradients = []
            for number in tqdm(range(args.batches), desc="gradients"):
                gradients.append(batch_gradient(policy, await batch(FIRST + number)))
            gradients = torch.stack(gradients)
            cosine, error = mean_cosine(gradients)
            print(f"{args.batches} batches of {GAMES * GROUP} trajectories: mean cosine {cosine:.4f} +- {error:.4f}")
            direction = gradients.mean(0) / (gradients.pow(2).mean(0).sqrt() + 1e-6)
            sizes = [parameter.numel() for parameter in policy.parameters]
            base = None
            for version, length in enumerate([0.0, *args.steps], 1):
                moved = {
                    name: (parameter.data - length * part.view(parameter.shape)).contiguous()
                    for (name, parameter), part in zip(policy.model.named_parameters(), direction.split(sizes), strict=True)
                }
                target = Path(folder) / str(version)
                target.mkdir()
                save_file(moved, target / "model.safetensors", metadata={"format": "pt"})
                await sampler.reload(target, version)
                groups = sum([await batch(FIRST + 100 + number) for number in range(args.test_batches)], [])
                found = {name: [statistics.fmean(getattr(t, name) for t in group) for group in groups]
                         for name in ("won", "reward", "invalid_actions")}  # fmt: skip
                base = base or found
                print(f"step {length:g}: " + ", ".join(
                    f"{name} {statistics.fmean(values):.3f} ({difference(values, base[name])})" for name, values in found.items()
                ), flush=True)  # fmt: skip
        finally:
            sampler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-model", default=DEMO_MODEL)
    parser.add_argument("--data-root", default="datasets/alfworld")
    parser.add_argument("--batches", type=int, default=16, help="batches whose gradients are taken; 3 at least")
    parser.add_argument("--test-batches", type=int, default=12, help="other batches that are played with each step")
    parser.add_argument("--steps", type=float, nargs="*", default=[], help="lengths along the mean gradient")
    parser.add_argument("--max-episode-steps", type=int, default=20)
    asyncio.run(study(parser.parse_args()))


if __name__ == "__main__":
    main()
