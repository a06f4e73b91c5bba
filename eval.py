"""Evaluate the base model or a checkpoint: one trajectory a game, one JSONL with every trajectory and a summary.

Prompt, protocol, environment and rollout code are those of training. `--games-per-batch` games are in flight at any
time and the next starts as one ends. A game's seeds depend on the game alone, so neither that number nor the order in
which games end decides a result (in float32 on a CPU to the last bit; in bfloat16 the size of a batch moves last bits).
A line is written as each game ends; at the end the file is put in game order and closed with its summary line.

Run by: `uv run python eval.py --split all` and `uv run python eval.py --model-path runs/NAME/checkpoints/update-0080/sampler`
"""

import argparse
import asyncio
import contextlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from data import TASK_TYPES, Game, find_games, shuffle_games
from environment import EnvironmentSettings, WorldPool
from protocol import ChatTokens, first_messages
from rollout import (
    DEMO_DATA,
    DEMO_MODEL,
    RolloutSettings,
    Sampler,
    SettingsError,
    check_first_prompts,
    check_model,
    engine_dtype,
    flag,
    gather_or_cancel,
    load_chat_tokens,
    play_group,
    playable_games,
    require,
    run_with_settings,
)
from train import (
    PROBE_TOKENS,
    WAYS_OF_SYNC,
    Policy,
    RunLog,
    SavedAdapter,
    TrainSettings,
    WeightSync,
    check_adapter,
    check_swanlab,
    resolve_sync,
)

EVALUATION_SPLITS = ("valid_seen", "valid_unseen")


@dataclass(frozen=True)
class EvalSettings:
    """Which model plays which games, and where the result goes."""

    data_root: str = flag("datasets/alfworld", "folder of the games: above json_2.1.1, json_2.1.1 itself or a split")
    split: str = flag("all", "valid_seen, valid_unseen or all (both)")
    limit_per_split: int = flag(0, "play only the first N games of each shuffled split; 0 plays all")
    games_per_batch: int = flag(32, "games in flight at the same time")
    model_path: str = flag("", "sampler weights that train.py saved (a PEFT adapter); the base model plays if empty")
    weight_sync: str = flag("auto", "how the adapter reaches the engine: adapter, merged, or auto: merged in float32")
    output: str = flag("", "JSONL file to write; eval_results/<run name>.jsonl if empty")
    overwrite_output: bool = flag(False, "replace an existing output file")
    run_name: str = flag("", "name of the evaluation; base or <training run>-update-<n> if empty")
    swanlab_project: str = flag(TrainSettings.swanlab_project, "SwanLab project")
    swanlab_mode: str = flag("disabled", "online, local, offline or disabled")

    def __post_init__(self) -> None:
        require(self.split in (*EVALUATION_SPLITS, "all"), "split", self.split, "valid_seen, valid_unseen or all")
        require(self.limit_per_split >= 0, "limit_per_split", self.limit_per_split, "0 or more")
        require(self.weight_sync in WAYS_OF_SYNC, "weight_sync", self.weight_sync, " or ".join(WAYS_OF_SYNC))
        require(self.games_per_batch >= 1, "games_per_batch", self.games_per_batch, "at least 1")

    @property
    def splits(self) -> tuple[str, ...]:
        return EVALUATION_SPLITS if self.split == "all" else (self.split,)


# The published evaluation: nearly greedy.
RECIPE_PRESET = {"temperature": 0.01}
DEMO_PRESET = RECIPE_PRESET | {
    "base_model": DEMO_MODEL,
    "data_root": DEMO_DATA,
    "max_episode_steps": 20,
    "max_trajectory_tokens": 8_000,
    "max_assistant_tokens": 32,
}


def summarize(records: Iterable[dict]) -> dict:
    """Means over trajectory records: shares of trajectories, means a trajectory, shares of turns. Order-independent."""
    records = list(records)
    games, turns = len(records), max(1, sum(record["steps"] for record in records))

    def total(key: str) -> float:
        return math.fsum(record[key] for record in records)

    by_type = {kind: [r["won"] for r in records if r["task_type"] == kind] for kind in TASK_TYPES}
    return {
        "games": games,
        "success": total("won") / games,
        "reward": total("reward") / games,
        "steps": total("steps") / games,
        "truncated": total("truncated") / games,
        "valid_tool_calls": total("valid_tool_calls") / turns,
        "admissible_actions": total("admissible_actions") / turns,
        "invalid_actions": total("invalid_actions") / games,
        "success_by_task_type": {
            kind: {"games": len(won), "success": sum(won) / len(won)} for kind, won in by_type.items() if won
        },
    }


def describe_model(settings: EvalSettings, base_model: str) -> dict:
    """Name and origin of the weights; checks `--model-path` as far as that goes without loading them."""
    if not settings.model_path:
        return {"name": settings.run_name or "base", "base_model": base_model, "model_path": None, "update": 0}
    folder = Path(settings.model_path)
    check_adapter(folder, base_model)
    try:
        about = json.loads((folder / "training.json").read_text())
        update, run = int(about["update"]), str(about["run"])
    except (OSError, ValueError, KeyError, TypeError):
        update, run = None, folder.name  # a PEFT adapter from elsewhere
    name = settings.run_name or (run if update is None else f"{run}-update-{update:04d}")
    return {"name": name, "base_model": base_model, "model_path": str(folder), "update": update}


def open_working_file(output: Path, overwrite: bool):
    """The file that lines are written to while games end; it becomes `output` when all have."""
    if output.exists() and not overwrite:
        raise SettingsError(f"{output} exists: give --overwrite-output to replace it, or another --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return output.with_name(output.name + ".partial").open("w", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write {output}: {error.strerror}; choose another --output") from error


async def evaluate(settings: EvalSettings, play: RolloutSettings, worlds: EnvironmentSettings) -> None:
    """The whole evaluation: check everything that can be checked, start the engine, play, summarize."""
    check_swanlab(settings.swanlab_mode, settings.swanlab_project)
    games: list[Game] = []
    for split in settings.splits:
        games += shuffle_games(find_games(settings.data_root, split), play.seed)[: settings.limit_per_split or None]
    check_model(play)
    model = describe_model(settings, play.base_model)
    chat = load_chat_tokens(play.base_model)
    dtype = engine_dtype(play)
    output = Path(settings.output or f"eval_results/{model['name']}.jsonl")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(WorldPool(worlds))
        if len(await playable_games(pool, games)) < len(games):
            raise SettingsError("an evaluation leaves no game out: mend or remove the games named above")
        await check_first_prompts(chat, pool, games[:1], play)
        working = stack.enter_context(open_working_file(output, settings.overwrite_output))
        pool.prefetch(game.path for game in games)
        print(f"Evaluating {model['name']}: {len(games)} games, {play.base_model}, {dtype}", flush=True)
        print("Starting the engine, which takes about a minute", flush=True)
        way = resolve_sync(settings.weight_sync, dtype)
        rank = check_adapter(Path(settings.model_path), play.base_model).r if settings.model_path else 0
        sampler = await Sampler.start(play, chat.stop_token_ids, rank if way == "adapter" else 0)
        stack.callback(sampler.close)
        if rank:
            await load_weights(settings.model_path, model["update"] or 1, play, sampler, way, dtype, rank, chat)
        counted = sampler.counts
        records: list[dict] = []
        waiting = iter(games)
        with tqdm(total=len(games), desc="games", unit="game") as bar:

            async def play_some() -> None:
                for game in waiting:
                    [trajectory] = await play_group(sampler, chat, pool, game, 1, 0, play)
                    records.append(trajectory.record() | {"update": model["update"]})
                    working.write(json.dumps(records[-1]) + "\n")
                    working.flush()
                    bar.update()

            await gather_or_cancel(play_some() for _ in range(settings.games_per_batch))
        tokens, faults = asdict(sampler.counts.since(counted)), pool.faults

    records.sort(key=lambda record: (record["split"], record["game_id"]))
    by_split = {split: [r for r in records if r["split"] == split] for split in settings.splits} | {"all": records}
    summary = {"type": "summary"} | model
    summary["settings"] = {name: getattr(play, name) for name in RECORDED_SETTINGS} | {"dtype": dtype}
    summary |= {"tokens": tokens, "env_faults": faults}
    summary["splits"] = {split: summarize(chosen) for split, chosen in by_split.items()}
    ordered = output.with_name(output.name + ".ordered.partial")
    ordered.write_text("".join(json.dumps(line) + "\n" for line in [*records, summary]), encoding="utf-8")
    ordered.replace(output)
    Path(working.name).unlink()
    report(summary, settings, play)
    print(f"Wrote {output}")


# What two evaluations must have in common to be compared.
RECORDED_SETTINGS = (
    "temperature", "top_p", "seed", "max_episode_steps", "max_trajectory_tokens", "max_assistant_tokens",
    "include_admissible_actions",
)  # fmt: skip


async def load_weights(
    folder: str, update: int, play: RolloutSettings, sampler: Sampler, way: str, dtype: str, rank: int, chat: ChatTokens
) -> None:
    """Bring saved adapter weights to the engine; merging them takes a policy, on the CPU: it only adds up."""
    if way == "adapter":
        weights = SavedAdapter(Path(folder), play.base_model)
    else:
        weights = await asyncio.to_thread(
            Policy, play.base_model, lora_rank=rank, device="cpu", dtype=getattr(torch, dtype), seed=play.seed
        )
        weights.load_adapter(folder)
    probe = chat.first_prompt(first_messages("find out which weights are in use.", "You see a probe.", None))
    sync = WeightSync(weights, sampler, way, dtype)
    try:
        await sync.push(update, probe=probe[:PROBE_TOKENS] if weights.differs_from_base() else None)
    finally:
        sync.close()


def report(summary: dict, settings: EvalSettings, play: RolloutSettings) -> None:
    """Print the summary as a table, and send it to SwanLab if asked."""
    columns = ("games", "success", "reward", "steps", "truncated", "valid_tool_calls", "admissible_actions", "invalid_actions")
    print(f"{'':14}" + "".join(f"{column:>20}" for column in columns))
    for split, means in summary["splits"].items():
        print(f"{split:14}" + "".join(f"{means[column]:>20.4g}" for column in columns))
    if settings.swanlab_mode != "disabled":
        flat = {f"{split}/{c}": means[c] for split, means in summary["splits"].items() for c in columns}
        folder = Path("runs") / f"eval-{summary['name']}"
        with RunLog(folder, folder.name, settings.swanlab_project, settings.swanlab_mode, asdict(settings) | asdict(play)) as log:
            log.log(flat, summary["update"] or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    presets = {"recipe": RECIPE_PRESET, "demo": DEMO_PRESET}
    run_with_settings(parser, presets, evaluate, EvalSettings, RolloutSettings, EnvironmentSettings)


if __name__ == "__main__":
    main()
