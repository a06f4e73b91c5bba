"""Evaluate the base model or a checkpoint: one trajectory a game, one JSONL with every trajectory and a summary.

Prompt, protocol, environment and rollout code are those of training. `--games-per-batch` games are in flight at any
time and the next starts as one ends. A game's seeds depend on the game alone, so neither that number nor the order in
which games end decides a result (in float32 on a CPU to the last bit; in bfloat16 the size of a batch moves last bits).
A line is written to OUTPUT.partial as each game ends; at the end the file is put in game order, closed with its summary
line and moved to OUTPUT. After an interruption `--resume-output` plays what is missing: in float32 on a CPU the result is
that of an unbroken evaluation to the last bit, but for the counts of what the engines did (`tokens`, `env_faults`).

Run by: `uv run python eval.py --split all` and `uv run python eval.py --model-path runs/NAME/checkpoints/update-0080/sampler`
"""

import argparse
import asyncio
import contextlib
import copy
import errno
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import re
import reprlib
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Threads that spin while they wait for each other stand still beside a busy neighbour. It must be said before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from peft import get_peft_model, set_peft_model_state_dict
from tqdm import tqdm

from data import (
    HELD_OUT, SPLITS, TASK_TYPES, Game, RunLog, SettingsError, check_swanlab, find_games, first_line, flag, hold_out,
    json_object, open_file, read_file, require, run_with_settings, shuffle_games, stored_base, stored_path, visible,
)  # fmt: skip
from environment import EnvironmentSettings, WorldPool
from protocol import (
    MERGE_IT, PEFT_PREFIX, ChatTokens, adapted_modules, check_adapter, check_fit, engine_name, first_messages,
    load_base, load_base_config, load_chat_tokens, load_model_config, merged_linears, model_shape,
    read_adapter_tensors, save_adapter_config, save_adapter_tensors,
)  # fmt: skip
from rollout import (
    DEMO_DATA, DEMO_MODEL, MAX_GROUP_SIZE, WAYS_OF_SYNC, RolloutSettings, Sampler, TokenCounts, WeightSync,
    check_first_prompts, check_model, engine_dtype, gather_or_cancel, interval_over_games, pass_at, play_group,
    playable_games, resolve_sync,
)  # fmt: skip
from train import PROBE_TOKENS, TrainSettings

EVALUATION_SPLITS = (*SPLITS[1:], HELD_OUT)


@dataclass(frozen=True)
class EvalSettings:
    """Which model plays which games, and where the result goes."""

    data_root: str = flag("datasets/alfworld", "folder of the games: above json_2.1.1, json_2.1.1 itself or a split")
    split: str = flag("all", "valid_seen, valid_unseen, all (both), or held_out: what train.py --held-out-games keeps back")
    held_out_games: int = flag(100, "how many training games --split held_out has; as in train.py")
    limit_per_split: int = flag(0, "play only the first N games of each shuffled split; 0 plays all")
    trajectories_per_game: int = flag(
        1, "trajectories a game, where one is not enough to tell (give a higher --temperature, too): the summary has their mean "
        "success and, as pass_at, the share of games won at least once in k of them",
    )  # fmt: skip
    games_per_batch: int = flag(32, "games in flight at the same time, each with all its trajectories")
    model_path: str = flag("", "sampler weights that train.py saved; the base model plays if empty")
    weight_sync: str = flag("auto", "how the adapter reaches the engine: adapter, merged, or auto: merged in float32")
    output: str = flag("", "JSONL file to write; eval_results/<run name>.jsonl if empty")
    overwrite_output: bool = flag(False, "replace an existing output file, and an unfinished one")
    resume_output: bool = flag(False, "go on with an evaluation that was cut off: its finished games are not played again")
    texts: bool = flag(True, "write what was said, too; without it a line is a game's outcome, and quotes no game")
    run_name: str = flag("", "name of the evaluation; base or <training run>-update-<n> if empty")
    swanlab_project: str = flag(TrainSettings.swanlab_project, "SwanLab project")
    swanlab_mode: str = flag("disabled", "online, local, offline or disabled")

    def __post_init__(self) -> None:
        require(self.split in (*EVALUATION_SPLITS, "all"), "split", self.split, " or ".join((*EVALUATION_SPLITS, "all")))
        require(self.held_out_games >= 1, "held_out_games", self.held_out_games, "at least 1")
        require(self.limit_per_split >= 0, "limit_per_split", self.limit_per_split, "0 or more")
        require(self.weight_sync in WAYS_OF_SYNC, "weight_sync", self.weight_sync, " or ".join(WAYS_OF_SYNC))
        require(self.games_per_batch >= 1, "games_per_batch", self.games_per_batch, "at least 1")
        tries = self.trajectories_per_game
        require(1 <= tries <= MAX_GROUP_SIZE, "trajectories_per_game", tries, f"at least 1 and at most {MAX_GROUP_SIZE}")

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS[1:] if self.split == "all" else (self.split,)

    def games_of(self, split: str) -> list[Game]:
        if split == HELD_OUT:
            return hold_out(find_games(self.data_root, "train"), self.held_out_games)[1]
        return find_games(self.data_root, split)


# The published evaluation: nearly greedy.
RECIPE_PRESET = {"temperature": 0.01}
DEMO_PRESET = RECIPE_PRESET | {
    "base_model": DEMO_MODEL,
    "data_root": DEMO_DATA,
    "max_episode_steps": 20,
    "max_trajectory_tokens": 8_000,
    "max_assistant_tokens": 32,
}


def summarize(records: Iterable[dict], tries: int = 1) -> dict:
    """Means over trajectory records: shares of trajectories, means a trajectory, shares of turns. Order-independent.

    With several `tries` a game also the interval of their mean success, over games, and pass@k (see `pass_at`).
    """
    records = list(records)
    played, turns = len(records), max(1, sum(record["steps"] for record in records))

    def total(key: str) -> float:
        return math.fsum(record[key] for record in records)

    by_type = {kind: [r["won"] for r in records if r["task_type"] == kind] for kind in TASK_TYPES}
    several = {}
    if tries > 1:
        wins = Counter()
        for record in records:
            wins[record["split"], record["game_id"]] += record["won"]
        wins = list(wins.values())
        low, high = interval_over_games(wins, tries)
        several = {"trajectories": played, "success_low": low, "success_high": high,
                   "pass_at": {str(k): pass_at(k, wins, tries) for k in tries_shown(tries)}}  # fmt: skip
    return {
        "games": played // tries,
        "success": total("won") / played,
        **several,
        "reward": total("reward") / played,
        "steps": total("steps") / played,
        "truncated": total("truncated") / played,
        "valid_tool_calls": total("valid_tool_calls") / turns,
        "admissible_actions": total("admissible_actions") / turns,
        "invalid_actions": total("invalid_actions") / played,
        "success_by_task_type": {
            kind: {"games": len(won) // tries, "success": sum(won) / len(won)} for kind, won in by_type.items() if won
        },
    }


def tries_shown(tries: int) -> list[int]:
    """The k of pass@k that a summary has: powers of two, and all tries."""
    return sorted({2**power for power in range(tries.bit_length())} | {tries})


@dataclass(frozen=True)
class Candidate:
    """The weights that are evaluated, and how they are named in the result."""

    name: str
    base_model: str
    model_path: str | None  # of an adapter, or of a whole model (rank 0); None for the base model
    update: int | None  # None for an adapter that train.py did not save
    rank: int = 0
    sha256: str | None = None  # of what is at model_path


def describe_model(settings: EvalSettings, base_model: str) -> Candidate:
    """The candidate that the flags name; checks `--model-path` as far as that goes without loading weights."""
    if settings.model_path:
        folder = Path(settings.model_path)
        whole = (folder / "config.json").is_file()  # --lora-rank 0 saves a model, not an adapter
        if whole:
            check_whole_model(folder, base_model)
        config = None if whole else check_adapter(folder, base_model)
        rank = max([config.r, *(config.rank_pattern or {}).values()]) if config else 0
        update, name = saved_as(folder)
        digest = sha256_of(folder / ("model.safetensors" if whole else "adapter_model.safetensors"))
        found = Candidate(settings.run_name or name, base_model, str(folder), update, rank, digest)
    else:
        found = Candidate(settings.run_name or "base", base_model, None, 0)
    # It becomes the name of a file and of a folder; it may come from a file that someone else wrote.
    if not found.name.isprintable() or "/" in found.name or found.name in (".", ".."):
        raise SettingsError(f"the evaluation's name is {found.name!r}; give one without / as --run-name")
    return found


def check_whole_model(folder: Path, base_model: str) -> None:
    """Refuse a saved model that cannot have been trained from the base: the result would name a base that it is not of."""
    ours, theirs = (load_model_config(name).to_dict() for name in (str(folder), base_model))
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if ours.get(name) != theirs.get(name):
            raise SettingsError(
                f"{folder} is a model of another shape ({name} {visible(ours.get(name))}) than --base-model "
                f"{base_model!r} ({visible(theirs.get(name))}): give the base that it was trained from"
            )


def sha256_of(path: Path) -> str:
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from error


def saved_as(folder: Path) -> tuple[int | None, str]:
    """The update and the name of a saved adapter: those that train.py left beside it, or none and the folder's."""
    path = folder / "training.json"
    if not path.exists():
        return None, folder.resolve().name  # a PEFT adapter from elsewhere
    try:
        about = json_object(read_file(path))
        update, run = about.get("update"), about.get("run")
        if type(update) is not int or not 0 <= update < 10**9 or type(run) is not str:
            raise ValueError("names no update and run")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(
            f"{path} is damaged ({visible(reason)}): take another checkpoint, or remove this file"
        ) from error
    return update, f"{run}-update-{update:04d}"


# --- the working file -----------------------------------------------------------------------------------------------
#
# OUTPUT.partial: a header with all that decides the result, then a line a game. Every line ends in its own checksum; a
# game's line also says what the engines had done `so_far`, in all parts of the evaluation together.

# What two evaluations must have in common to be compared.
RECORDED_SETTINGS = (
    "temperature", "top_p", "seed", "max_episode_steps", "max_trajectory_tokens", "max_assistant_tokens",
    "include_admissible_actions",
)  # fmt: skip
LARGEST_WORKING_FILE = 2**30  # bytes, far more than any evaluation writes
HEADER_START = b'{"type": "header"'


def make_header(settings: EvalSettings, play: RolloutSettings, model: Candidate, games: list[Game]) -> dict:
    """All that decides the result; what has the name of a flag is its value."""
    dtype = engine_dtype(play)
    return {
        "type": "header",
        "run_name": model.name,
        "base_model": stored_base(model.base_model),
        "model_path": model.model_path and stored_path(model.model_path),
        "weights": model.sha256,
        "weight_sync": resolve_sync(settings.weight_sync, dtype) if model.rank else None,
        "split": settings.split,
        **{name: getattr(play, name) for name in RECORDED_SETTINGS},
        "dtype": dtype,
        "trajectories_per_game": settings.trajectories_per_game,
        "games": {f"{game.split}/{game.game_id}": sha256_of(game.path)[:16] for game in games},
    }


def check_header(path: Path, found: dict, expected: dict) -> None:
    """Raise SettingsError, naming every difference, unless the working file was begun as this evaluation is."""
    named = {
        "weights": "the weights in --model-path were others",
        "games": "the games were others (--data-root, --limit-per-split)",
    }
    found = {"trajectories_per_game": 1} | found  # a file may be older than this setting
    reasons = [
        named.get(name, f"--{name.replace('_', '-')} was {reprlib.repr(found.get(name))}, now {value!r}")
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if reasons:
        raise SettingsError(
            f"{path} was begun otherwise: {'; '.join(reasons)}. Go on with what was given then, or start over: "
            "--overwrite-output"
        )


def make_line(record: dict) -> bytes:
    """A line of a working file."""
    return (json.dumps(record | {"crc32": zlib.crc32(json.dumps(record).encode())}) + "\n").encode()


def read_line(line: bytes) -> dict:
    """The record of a line; ValueError if the line is damaged."""
    record = json_object(line)
    try:
        intact = record.pop("crc32", None) == zlib.crc32(json.dumps(record).encode())
    except RecursionError:
        intact = False
    if not intact:
        raise ValueError("is not as it was written")
    return record


def is_finished_game(record: dict, games: dict, tries: int) -> bool:
    """Whether a record is one of `tries` trajectories of one of `games` with all that a summary adds up."""
    so_far = record.get("so_far")
    tokens = so_far.get("tokens") if isinstance(so_far, dict) else None
    if not isinstance(tokens, dict) or tokens.keys() != asdict(TokenCounts()).keys():
        return False
    counts = [record.get(name) for name in ("steps", "valid_tool_calls", "admissible_actions", "invalid_actions")]
    return (
        record.get("type") == "trajectory"
        and record.get("split") in EVALUATION_SPLITS
        and f"{record['split']}/{record.get('game_id')}" in games
        and record.get("task_type") in TASK_TYPES
        and type(record.get("branch")) is int
        and 0 <= record["branch"] < tries
        and type(record.get("won")) is type(record.get("truncated")) is bool
        and type(record.get("reward")) is float
        and math.isfinite(record["reward"])
        and all(type(n) is int and 0 <= n < 2**50 for n in [*counts, *tokens.values(), so_far.get("env_faults")])
    )


def read_working_file(path: Path, content: bytes, header: dict) -> tuple[list[dict], int]:
    """The finished games of a working file, and the bytes up to their end.

    A game's trajectories stand together, in the order of their branches. Of a crash the last line may be without its
    end, or the last game without its last lines: that game is not finished. SettingsError, which names the file and
    the line, if any other is damaged, and if the file was begun with other settings.
    """
    *lines, _ = content.split(b"\n")
    tries = header.get("trajectories_per_game", 1)
    games: dict[str, list[dict]] = {}
    game: list[dict] = []  # the one that is being read
    end = 0  # of the last finished game
    at = 0
    for number, line in enumerate(lines, 1):
        at += len(line) + 1
        try:
            record = read_line(line)
            if (record.get("type") == "header") != (number == 1):
                raise ValueError("is no header" if number == 1 else "is a second header")
            if number == 1:
                check_header(path, record, header)
                end = at
                continue
            if not is_finished_game(record, header["games"], tries):
                raise ValueError("is no finished game of this evaluation")
            game.append(record)
            if key_of(record) != (*key_of(game[0])[:2], len(game) - 1):
                raise ValueError("is not the next trajectory of the game before it")
            if len(game) == tries:
                if games.setdefault(f"{record['split']}/{record['game_id']}", game) is not game:
                    raise ValueError("has a game that another line has too")
                game, end = [], at
        except SettingsError:
            raise
        except ValueError as error:
            lines_of_game = "this line" if tries == 1 else "all lines of its game"
            remedy = "start over: --overwrite-output" if number == 1 else f"remove {lines_of_game} and its game is played again"
            raise SettingsError(f"{path}:{number}: the line is damaged: it {error}; {remedy}") from error
    return list(itertools.chain(*games.values())), end


def key_of(record: dict) -> tuple[str, str, int]:
    """Which trajectory of which game a record is of; their order in the finished file."""
    return record["split"], record["game_id"], record["branch"]


@dataclass(frozen=True)
class WorkingFile:
    """An open working file; no other evaluation can write it meanwhile."""

    path: Path
    file: io.FileIO
    records: list[dict]  # of the finished games

    @property
    def so_far(self) -> dict:
        """What the engines had done when the last game ended, in all parts together."""
        return self.records[-1]["so_far"] if self.records else {"tokens": asdict(TokenCounts()), "env_faults": 0}

    def write(self, *records: dict) -> None:
        """Write a line each, all whole or none at all."""
        lines, size = b"".join(map(make_line, records)), self.file.tell()
        try:
            if self.file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.file.truncate(size)
            self.file.seek(size)
            raise cannot_write(self.path, error) from error
        self.records.extend(record for record in records if record["type"] != "header")


def cannot_write(path: Path, error: OSError) -> SettingsError:
    return SettingsError(f"cannot write {path}: {error.strerror}; mend that, then give the same command with --resume-output")


@contextlib.contextmanager
def open_working_file(output: Path, header: dict, resume: bool, overwrite: bool) -> Iterator[WorkingFile]:
    """The working file of `output`, new or as far as it came; without a finished game it does not stay.

    SettingsError, with all files as they were, if that would lose finished games or an existing output.
    """
    path = output.with_name(output.name + ".partial")
    if output.is_dir():
        raise SettingsError(f"{output} is a folder: give a file as --output")
    if output.exists() and resume and not (overwrite and path.exists()):
        both = f"; to go on with {path} and replace it, add --overwrite-output" if path.exists() else ""
        raise SettingsError(f"{output} is complete already, there is nothing to resume{both}")
    if output.exists() and not overwrite:
        raise SettingsError(f"{output} exists: give --overwrite-output to replace it, or another --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}; choose another --output") from error
    with open(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_WORKING_FILE:
            raise SettingsError(f"{path} is no regular file of a sensible size: remove it, or choose another --output")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"another evaluation is writing {path}: wait for it, or choose another --output") from None
        if not (path.exists() and os.path.samestat(os.stat(path), status)):
            raise SettingsError(f"another evaluation has just ended with {output}: give the command again")
        content = b"" if overwrite and not resume else file.read()
        games = (content.count(b"\n") - 1) // header.get("trajectories_per_game", 1)
        if content.startswith(HEADER_START) and games < 1:
            content = b""  # nothing to lose
        if content and not resume:
            raise SettingsError(
                f"{path} holds {max(0, games)} games of an evaluation that was cut off: give --resume-output to go on "
                "with it, or --overwrite-output to start over"
            )
        records, size = read_working_file(path, content, header)
        if resume and not records:
            print(f"Nothing to resume: no finished game in {path}, so every game is played", flush=True)
        working = WorkingFile(path, file, records)
        file.truncate(size)
        file.seek(size)
        try:
            if not size:
                working.write(header)
            yield working
        except BaseException:
            if records:
                games = len(records) // header.get("trajectories_per_game", 1)
                print(f"{path} holds {games} finished games: go on with --resume-output", file=sys.stderr, flush=True)
            raise
        finally:
            if not records:
                path.unlink(missing_ok=True)


# --- an adapter from a file -----------------------------------------------------------------------------------------


class SavedAdapter:
    """A saved LoRA adapter, anyone's, as `WeightSync` wants it: what peft makes of its config and its weights."""

    def __init__(self, folder: Path, base_model: str, dtype: torch.dtype | None = None) -> None:
        """dtype: of the base, which is loaded for the way `merged`. None, for the way `adapter`: it is only looked at.

        SettingsError if the adapter is not the base's or has options that are not followed.
        """
        config, self._base_model = check_adapter(folder, base_model), base_model
        self._tensors = read_adapter_tensors(folder)
        base_config = load_base_config(base_model)
        self._vision_language = base_config.get_text_config() is not base_config
        model = load_base(base_model, dtype)[0] if dtype else model_shape(base_config.get_text_config())
        config.init_lora_weights, config.inference_mode = True, True
        try:
            self._model = get_peft_model(model, config)
        except (ValueError, TypeError, AttributeError, KeyError, re.error) as error:
            reason = visible(first_line(error))
            raise SettingsError(f"{folder}: peft makes no adapter of its adapter_config.json: {reason}") from error
        check_fit(self._tensors, self._model, folder)
        names = [name.removeprefix(PEFT_PREFIX) for name, _ in adapted_modules(self._model)]
        for key in (*config.rank_pattern, *config.alpha_pattern):  # peft would pass over it: here it has other names
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in names):
                raise SettingsError(f"{folder}: rank_pattern or alpha_pattern names {visible(key)}, and no module with "
                                    f"an adapter is called so in this base: {MERGE_IT}")
        if dtype:
            set_peft_model_state_dict(self._model, self._tensors)

    def save_adapter(self, folder: Path, engine_layout: bool = False) -> None:
        """As `Policy.save_adapter`; where ranks or scales differ by module, each is written under the full name."""
        folder.mkdir(parents=True, exist_ok=True)
        rename = engine_name if engine_layout and self._vision_language else str
        save_adapter_tensors(self._tensors, folder, rename is engine_name)
        config = copy.copy(self._model.peft_config["default"])
        for option, values in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            if getattr(config, option):
                by_module = {re.escape(rename(name).removeprefix(PEFT_PREFIX)): getattr(module, values)["default"]
                             for name, module in adapted_modules(self._model)}  # fmt: skip
                setattr(config, option, by_module)
        save_adapter_config(config, self._base_model, folder)

    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Policy.merged_tensors`."""
        return merged_linears(self._model)

    def differs_from_base(self) -> bool:
        """As `Policy.differs_from_base`."""
        return any(tensor.any().item() for name, tensor in self._tensors.items() if "lora_B" in name)


# --- the evaluation -------------------------------------------------------------------------------------------------


async def evaluate(settings: EvalSettings, play: RolloutSettings, worlds: EnvironmentSettings) -> None:
    """The whole evaluation: check everything that can be checked, start the engine, play what is missing, summarize."""
    check_swanlab(settings.swanlab_mode, settings.swanlab_project)
    games: list[Game] = []
    for split in settings.splits:
        games += shuffle_games(settings.games_of(split), play.seed)[: settings.limit_per_split or None]
    check_model(play)
    model = describe_model(settings, play.base_model)
    if model.model_path and not model.rank:
        play = replace(play, base_model=model.model_path)
        check_model(play)
    output = Path(settings.output or f"eval_results/{model.name}.jsonl")
    header = make_header(settings, play, model, games)
    with open_working_file(output, header, settings.resume_output, settings.overwrite_output) as working:
        finished, tries = {key_of(record)[:2] for record in working.records}, settings.trajectories_per_game
        missing = [game for game in games if (game.split, game.game_id) not in finished]
        if finished:
            print(f"Going on with {working.path}: {len(finished)} of {len(games)} games are finished", flush=True)
        if missing:
            await play_games(missing, working, model, settings, play, worlds)
        records = [{name: record[name] for name in record if name != "so_far"} for record in working.records]
        records.sort(key=key_of)
        by_split = {split: [r for r in records if r["split"] == split] for split in settings.splits} | {"all": records}
        about = {"name": model.name, "base_model": header["base_model"], "model_path": header["model_path"]}
        compared = {name: header[name] for name in (*RECORDED_SETTINGS, "dtype", *["trajectories_per_game"] * (tries > 1))}
        summary = {"type": "summary"} | about | {"update": model.update, "settings": compared} | working.so_far
        summary["splits"] = {split: summarize(chosen, tries) for split, chosen in by_split.items()}
        if not settings.texts:
            records = [{name: record[name] for name in record if name not in TEXTS} for record in records]
        write_output(output, [*records, summary])
        working.path.unlink()
    report(summary, settings, play)
    print(f"Wrote {output}")


TEXTS = ("task", "messages", "turns")


async def play_games(
    games: list[Game], working: WorkingFile, model: Candidate, settings: EvalSettings, play: RolloutSettings,
    worlds: EnvironmentSettings,
) -> None:  # fmt: skip
    """Play `games`, `--games-per-batch` of them at any time, and write each down as it ends."""
    chat = load_chat_tokens(play.base_model)
    way = resolve_sync(settings.weight_sync, engine_dtype(play))
    if model.rank:
        SavedAdapter(Path(model.model_path), play.base_model)  # refuses what does not fit before anything is started
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(WorldPool(worlds))
        if len(await playable_games(pool, games, ready=True)) < len(games):
            raise SettingsError("an evaluation leaves no game out: mend or remove the games named above")
        await check_first_prompts(chat, pool, games[:1], play)
        print(f"Evaluating {model.name}: {len(games)} games, {play.base_model}, {engine_dtype(play)}", flush=True)
        print("Starting the engine, which takes about a minute", flush=True)
        sampler = await Sampler.start(play, chat.stop_token_ids, model.rank if way == "adapter" else 0)
        stack.callback(sampler.close)
        if model.rank:
            await load_weights(model, play, sampler, way, chat)
        elif model.update:
            sampler.policy_version = f"update-{model.update}"  # a whole model, which the engine has from its start
        before = working.so_far
        counted = sampler.counts.since(TokenCounts(**before["tokens"]))  # counting goes on where the last part stopped
        waiting = iter(games)
        with tqdm(total=len(games), desc="games", unit="game") as bar:

            async def play_some() -> None:
                for game in waiting:
                    trajectories = await play_group(sampler, chat, pool, game, settings.trajectories_per_game, 0, play)
                    tokens, faults = asdict(sampler.counts.since(counted)), before["env_faults"] + pool.faults
                    more = {"update": model.update, "so_far": {"tokens": tokens, "env_faults": faults}}
                    working.write(*(trajectory.record() | more for trajectory in trajectories))
                    bar.update()

            await gather_or_cancel(play_some() for _ in range(settings.games_per_batch))


async def load_weights(model: Candidate, play: RolloutSettings, sampler: Sampler, way: str, chat: ChatTokens) -> None:
    """Bring saved adapter weights to the engine; merging them takes the base too, on the CPU."""
    dtype = engine_dtype(play)
    base_dtype = getattr(torch, dtype) if way == "merged" else None
    weights = await asyncio.to_thread(SavedAdapter, Path(model.model_path), play.base_model, base_dtype)
    probe = chat.first_prompt(first_messages("find out which weights are in use.", "You see a probe.", None))
    sync = WeightSync(weights, sampler, way, dtype)
    try:
        await sync.push(model.update or 1, probe=probe[:PROBE_TOKENS] if weights.differs_from_base() else None)
    finally:
        sync.close()


def write_output(output: Path, lines: list[dict]) -> None:
    """Write the finished file, whole or not at all."""
    ordered = output.with_name(output.name + ".ordered.partial")
    try:
        ordered.unlink(missing_ok=True)
        with ordered.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        ordered.replace(output)
    except OSError as error:
        raise cannot_write(output, error) from error


def report(summary: dict, settings: EvalSettings, play: RolloutSettings) -> None:
    """Print the summary as a table, and send it to SwanLab if asked."""
    columns = ("games", "success", "reward", "steps", "truncated", "valid_tool_calls", "admissible_actions", "invalid_actions")
    print(f"{'':14}" + "".join(f"{column:>20}" for column in columns))
    for split, means in summary["splits"].items():
        print(f"{split:14}" + "".join(f"{means[column]:>20.4g}" for column in columns))
    for split, means in summary["splits"].items() if settings.trajectories_per_game > 1 else ():
        several = ", ".join(f"pass@{k} {value:.1%}" for k, value in means["pass_at"].items())
        print(f"{split}: {several}; 95 % interval of the mean success, over games: {means['success_low']:.1%} to "
              f"{means['success_high']:.1%}")  # fmt: skip
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
