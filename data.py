"""The games: discover, filter, shuffle and batch them.

Owns the path from a data folder to the games of one update. Layout of the data, as `alfworld-download` leaves it:

    <data root>/json_2.1.1/{train,valid_seen,valid_unseen}/<task>/<trial>/{game.tw-pddl,traj_data.json}

Invariant: the games of an update depend on the files, the seed and the update number alone. They do not depend on
the order in which the file system lists them, on the index, or on what was drawn before, so a resumed run goes on
with the games it would have had.

    python data.py --data-root datasets/alfworld      # how many games there are, by split and task type

The official training split is 370 MB. What the filter needs of it is kept in a hidden index file in the split's
folder; see `_facts_of_trials` for when that file is believed.
"""

import argparse
import errno
import io
import json
import os
import random
import secrets
import stat
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLITS = ("train", "valid_seen", "valid_unseen")
# Games with a movable receptacle or a sliced object are not part of the text benchmark.
LEFT_OUT_PATHS = ("movable", "Sliced")

RELEASE_FOLDER = "json_2.1.1"
GAME_FILE = "game.tw-pddl"
TASK_FILE = "traj_data.json"
INDEX_FILE = ".games_index.json"
INDEX_VERSION = 1  # raise it whenever `_read_facts` or the layout of the index changes

LARGEST_FILE = 16 * 2**20  # bytes; the largest file of an official game has 137 KB, the index of them all 498 KB

DOWNLOAD = "`ALFWORLD_DATA=datasets/alfworld uv run alfworld-download`"


class DataError(ValueError):
    """The games cannot be used as asked; the message names the folder, file or value and what to do about it."""


@dataclass(frozen=True)
class Game:
    """One `game.tw-pddl`."""

    path: Path  # absolute, of the game file itself
    game_id: str  # "<task>/<trial>", the same on every machine
    split: str  # one of SPLITS
    task_type: str  # one of TASK_TYPES


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file to read. OSError for all else: a pipe or a device would be waited for without end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file of a sensible size; OSError otherwise."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_FILE:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST_FILE:,} bytes", str(path))
        return file.read()


def json_object(content: bytes) -> dict:
    """The JSON object that `content` is; ValueError, in one line, for all else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, not an object")
    return value


def find_games(data_root: str | Path, split: str) -> list[Game]:
    """Every playable game of `split`, sorted by `game_id`.

    `data_root` is the folder above `json_2.1.1`, that folder itself, or the folder of `split`. A game is kept if its
    path below the split's folder holds neither "movable" nor "Sliced", its task type is one of TASK_TYPES and it is
    marked solvable. Raises DataError if `split` is unknown, if there is no such folder or no game in it, and if a
    file of a game is damaged: every game file was read whole at least once before this function returns.
    """
    split_folder = _split_folder(data_root, split)
    try:
        facts = _facts_of_trials(split_folder)
    except OSError as error:
        where = error.filename or split_folder
        raise DataError(f"cannot read {where}: {error.strerror}; make it a file that this user can read") from error
    games = [
        Game(split_folder / game_id / GAME_FILE, game_id, split, task_type)
        for game_id, (task_type, solvable) in facts.items()
        if task_type in TASK_TYPES and solvable
    ]
    if not games:
        raise DataError(
            f"no playable game in {split_folder} (looked for <task>/<trial>/{GAME_FILE}); "
            f"download the games with {DOWNLOAD}, or take the starter games: --data-root datasets/starter"
        )
    return games


def shuffle_games(games: Sequence[Game], seed: int) -> list[Game]:
    """`games` in an order that depends on `seed` alone; the generator is this function's own."""
    shuffled = list(games)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def batch_of_games(games: Sequence[Game], update: int, games_per_batch: int) -> list[Game]:
    """The games of one update, which counts from 0: a window that moves over `games` and wraps around.

    Entry i of the batch is `games[(update * games_per_batch + i) % len(games)]`: a game comes up again only when
    all others have had their turn. A batch larger than `games` therefore holds some game twice.
    """
    if not games:
        raise DataError("no games to make a batch of; find_games() gives at least one")
    if update < 0 or games_per_batch < 1:
        raise DataError(
            f"update {update}, games_per_batch {games_per_batch}: updates count from 0 and a batch holds at least "
            "1 game; set --games-per-batch to 1 or more"
        )
    start = update * games_per_batch
    return [games[place % len(games)] for place in range(start, start + games_per_batch)]


def _split_folder(data_root: str | Path, split: str) -> Path:
    """The absolute folder of `split`; DataError if `split` is unknown or the folder is not there."""
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; there are {', '.join(SPLITS)}")
    root = Path(os.path.abspath(Path(data_root).expanduser()))
    candidates = [root / RELEASE_FOLDER / split, root / split]
    if root.name == split:
        candidates.append(root)
    for folder in candidates:
        if folder.is_dir():
            return folder
    if root.name in SPLITS and root.is_dir():
        raise DataError(
            f"{root} holds the split {root.name!r}, not {split!r}; "
            f"set --data-root to the folder above it ({root.parent}) or ask for the split {root.name!r}"
        )
    raise DataError(
        f"no folder with the split {split!r}: looked for {' and '.join(str(folder) for folder in candidates)}; "
        f"download the games with {DOWNLOAD} and use --data-root datasets/alfworld, "
        "or take the starter games: --data-root datasets/starter"
    )


def _facts_of_trials(split_folder: Path) -> dict[str, tuple[str, bool]]:
    """game_id -> (task type, solvable) of each trial with a game, in order; from the index where that is sound.

    The index is believed for a trial if both files it rests on still have the size and the modification time (ns)
    they had just before they were read. All other trials are read again, and then a new index is written. An index
    that is missing, unreadable, damaged or of another version holds nothing to believe.
    """
    index_path = split_folder / INDEX_FILE
    index = _read_index(index_path)
    entries: dict[str, list] = {}
    for game_id in _trials(split_folder):
        trial = f"{split_folder}/{game_id}"
        try:
            stamps = _stamps(f"{trial}/{GAME_FILE}")
        except (FileNotFoundError, NotADirectoryError):
            continue  # the official data has trials for which no text game was made
        try:
            stamps += _stamps(f"{trial}/{TASK_FILE}")
        except FileNotFoundError:
            raise DataError(_damaged(f"{trial}/{GAME_FILE}", f"has no {TASK_FILE} beside it")) from None
        entry = index.get(game_id)
        if entry is None or entry[:4] != stamps:
            entry = [*stamps, *_read_facts(trial)]
        entries[game_id] = entry
    if entries != index:
        _write_index(index_path, entries)
    return {game_id: (entry[4], entry[5]) for game_id, entry in entries.items()}


def _trials(split_folder: Path) -> list[str]:
    """The "<task>/<trial>" below a split's folder that the filter lets through, with or without a game, sorted."""
    trials = []
    for task in os.scandir(split_folder):
        if not task.name.startswith(".") and task.is_dir():
            trials += [f"{task.name}/{trial}" for trial in os.listdir(task.path) if not trial.startswith(".")]
    return sorted(trial for trial in trials if not any(word in trial for word in LEFT_OUT_PATHS))


def _stamps(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def _read_facts(trial: str) -> tuple[str, bool]:
    """(task type, solvable) from a trial's two files, read whole: a file cut short must be found here, not in
    the middle of training."""
    game = _read_json(f"{trial}/{GAME_FILE}")
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        if not isinstance(game.get(key), str):
            raise DataError(_damaged(f"{trial}/{GAME_FILE}", f"has no text under {key!r}"))
    task_type = _read_json(f"{trial}/{TASK_FILE}").get("task_type")
    if not isinstance(task_type, str):
        raise DataError(_damaged(f"{trial}/{TASK_FILE}", "has no text under 'task_type'"))
    return task_type, game.get("solvable") is True


def _read_json(path: str) -> dict:
    """The JSON object in a file of a game; DataError if there is none."""
    try:
        return json_object(read_file(path))
    except ValueError as error:
        raise DataError(_damaged(path, str(error))) from error


def _damaged(path: str, what: str) -> str:
    return (
        f"{path} {what}, so it is damaged or was not copied whole; put a good copy in its place "
        f"({DOWNLOAD} with -f writes every file anew), or remove its folder to do without this game"
    )


def _read_index(path: Path) -> dict[str, list]:
    """game_id -> [game size, mtime_ns, task file size, mtime_ns, task type, solvable]; {} if the file is unusable."""
    try:
        content = json_object(read_file(path))
    except (OSError, ValueError):
        return {}
    entries = content.get("games") if content.get("version") == INDEX_VERSION else None
    kinds = [int, int, int, int, str, bool]
    if not isinstance(entries, dict) or not all(
        isinstance(entry, list) and [type(value) for value in entry] == kinds for entry in entries.values()
    ):
        return {}
    return entries


def _write_index(path: Path, entries: dict[str, list]) -> None:
    """Put a new index in place in one move, so that another process sees the old one or the new one, whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        try:
            temporary.write_text(json.dumps({"version": INDEX_VERSION, "games": entries}), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError:
        pass  # the index only saves time; a read-only data folder is as good, each start reads the games again


def write_any_text() -> None:
    """Make standard output take every path and text: a character that its encoding lacks is escaped, and no error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is not, and takes all
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    write_any_text()
    parser = argparse.ArgumentParser(description="Count the games by split and task type.")
    parser.add_argument("--data-root", default="datasets/alfworld", help="folder of the games (default: %(default)s)")
    data_root = parser.parse_args().data_root
    folder = os.path.basename(os.path.abspath(data_root))
    try:
        counts = {
            split: Counter(game.task_type for game in find_games(data_root, split))
            for split in ([folder] if folder in SPLITS else SPLITS)
        }
    except DataError as error:
        sys.exit(f"data.py: {error}")
    print(f"{'task type':<32}" + "".join(f"{split:>14}" for split in counts))
    for task_type in TASK_TYPES:
        print(f"{task_type:<32}" + "".join(f"{counts[split][task_type]:>14,}" for split in counts))
    print(f"{'all':<32}" + "".join(f"{counts[split].total():>14,}" for split in counts))


if __name__ == "__main__":
    main()
