"""The games: discover, filter, shuffle and batch them.

Owns the path from a data folder to the games of one update. Layout of the data, as `alfworld-download` leaves it:

    <data root>/json_2.1.1/{train,valid_seen,valid_unseen}/<task>/<trial>/{game.tw-pddl,traj_data.json}

Invariant: the games of an update depend on the files, the seed and the update number alone. They do not depend on
the order in which the file system lists them, on the index, or on what was drawn before, so a resumed run goes on
with the games it would have had.

    python data.py --data-root datasets/alfworld      # how many games there are, by split and task type

Whatever a message echoes of a file (a name, a text, a path) goes through `shown`, the one place where characters that
could write to a terminal on their own are escaped.

The official training split is 370 MB. What the filter needs of it is kept in a hidden index file in the split's
folder; see `_facts_of_trials` for when that file is believed.
"""

import argparse
import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import random
import re
import secrets
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
HELD_OUT = "held_out"  # games of "train" that are played to measure a run, and not trained on
# Games with a movable receptacle or a sliced object are not part of the text benchmark.
LEFT_OUT_PATHS = ("movable", "Sliced")

RELEASE_FOLDER = "json_2.1.1"
GAME_FILE = "game.tw-pddl"
TASK_FILE = "traj_data.json"
INDEX_FILE = ".games_index.json"
INDEX_VERSION = 2  # raise it whenever `_read_facts` or the layout of the index changes

LARGEST_FILE = 16 * 2**20  # bytes; the largest file of an official game has 137 KB, the index of them all 498 KB

DOWNLOAD = "`ALFWORLD_DATA=datasets/alfworld uv run alfworld-download`"
GET_DATA = "get the games of ALFWorld's data release 2.1.3 (json_2.1.3_tw-pddl.zip; `alfworld-download -f`)"
OLDER_RELEASE = f'an older data release ("put X in/on Y" for "move X to Y"); {GET_DATA}'
GOOD_COPY = (
    f"put a good copy in its place ({DOWNLOAD} with -f writes every file anew), "
    "or remove its folder to do without this game"
)


def shown(text: object) -> str:
    """`text` in one line that is safe on a terminal: control and bidi characters, half characters and such escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


class DataError(ValueError):
    """The games cannot be used as asked; the message names the folder, file or value and what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


@dataclass(frozen=True)
class Game:
    """One `game.tw-pddl`."""

    path: Path  # absolute, of the game file itself
    game_id: str  # "<task>/<trial>", the same on every machine
    split: str  # one of SPLITS, or HELD_OUT
    task_type: str  # one of TASK_TYPES
    older_release: bool = False  # says "put X in/on Y" where the others say "move X to Y": `environment` refuses it


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


def save(path: Path, key: str, content: bytes) -> None:
    """Keep what only saves time, for `saved`; a place that cannot be written is left as it is.

    The file is put in place in one move, so that another process sees the old one or the new one, whole.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(OSError):
        try:
            temporary.write_bytes(_head(key, content) + content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def saved(path: Path, key: str) -> bytes | None:
    """What `save` kept there under this key; None if there is nothing, another key's or a damaged one."""
    try:
        head, newline, content = read_file(path).partition(b"\n")
    except OSError:
        return None
    return content if head + newline == _head(key, content) else None


def _head(key: str, content: bytes) -> bytes:
    return f"{key} {hashlib.sha256(content).hexdigest()}\n".encode()


def read_game(path: str | Path) -> tuple[dict, bytes]:
    """The JSON object in a game file, sure to have its three texts, and the file's bytes.

    The file is read whole: one cut short must be found before a run, not in the middle of it. DataError if it cannot
    be read, or is no game.
    """
    game, content = _read_json(path)
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        text = game.get(key)
        if not isinstance(text, str) or re.search(r"[\ud800-\udfff]", text):  # half a character fits no tokenizer
            raise DataError(_damaged(path, f"has no text under {key!r}"))
    return game, content


def is_older_release(grammar: str) -> bool:
    """Whether a game with this grammar says "put X in/on Y", as those before data release 2.1.3."""
    return re.search(r'template\s*::\s*"put [^"]*in/on', grammar) is not None


def find_games(data_root: str | Path, split: str) -> list[Game]:
    """Every game of `split` that belongs to the benchmark, sorted by `game_id`; one of an older release is marked.

    `data_root` is the folder above `json_2.1.1`, that folder itself, or the folder of `split`. A game is kept if its
    path below the split's folder holds neither "movable" nor "Sliced", its task type is one of TASK_TYPES and it is
    marked solvable. Raises DataError if `split` is unknown, if there is no such folder or no game in it, and if a
    file of a game is damaged: every game file was read whole at least once before this function returns.
    """
    split_folder = _split_folder(data_root, split)
    try:
        facts = _facts_of_trials(split_folder)
    except OSError as error:
        raise DataError(_unreadable(error.filename or split_folder, error)) from error
    games = [
        Game(split_folder / game_id / GAME_FILE, game_id, split, task_type, older_release)
        for game_id, (task_type, solvable, older_release) in facts.items()
        if task_type in TASK_TYPES and solvable
    ]
    if not games:
        where = f"no playable game in {split_folder} (looked for <task>/<trial>/{GAME_FILE})"
        raise DataError(f"{where}; {how_to_get_games(data_root, split)}")
    return games


def hold_out(games: Sequence[Game], number: int) -> tuple[list[Game], list[Game]]:
    """(the games to train on, `number` held-out ones), the latter as of the split "held_out".

    Which ones depends on their ids alone, whatever the seed: in turn from each task type, by the hash of the id. Raises
    DataError if there are not more games than that.
    """
    if number >= len(games):
        raise DataError(f"--held-out-games is {number}; it must be below the number of training games, {len(games)}")
    by_type: dict[str, list[Game]] = {}
    for game in sorted(games, key=lambda game: hashlib.sha256(game.game_id.encode()).digest()):
        by_type.setdefault(game.task_type, []).append(game)
    in_turn = [game for round_ in itertools.zip_longest(*(by_type.get(kind, []) for kind in TASK_TYPES)) for game in round_ if game]
    held = in_turn[:number]
    left_out = {game.game_id for game in held}
    return [game for game in games if game.game_id not in left_out], [replace(game, split=HELD_OUT) for game in held]


def shuffle_games(games: Sequence[Game], seed: int) -> list[Game]:
    """`games` in an order that depends on `seed` alone; the generator is this function's own."""
    shuffled = list(games)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def batch_of_games(
    games: Sequence[Game], update: int, games_per_batch: int, unplayable: Collection[Path] = ()
) -> list[Game]:
    """The games of one update, which counts from 0: a window that moves over `games` and wraps around.

    Entry i of the batch is `games[(update * games_per_batch + i) % len(games)]`: a game comes up again only when
    all others have had their turn. A batch larger than `games` therefore holds some game twice.

    Games whose path is in `unplayable` are passed over, and the batch is filled from behind its window: it has the
    first `games_per_batch` playable games from the window's start on. The windows themselves stay where they are, so
    an unplayable game changes the batches of those updates alone that would have had it, whenever and in whatever
    order such games are discovered; a game that stood in for one also has its own turn. With fewer playable games
    than `games_per_batch` the batch is smaller, and empty if there is none.
    """
    if not games:
        raise DataError("no games to make a batch of; find_games() gives at least one")
    if update < 0 or games_per_batch < 1:
        raise DataError(
            f"update {update}, games_per_batch {games_per_batch}: updates count from 0 and a batch holds at least "
            "1 game; set --games-per-batch to 1 or more"
        )
    start = update * games_per_batch
    onward = (games[place % len(games)] for place in range(start, start + max(games_per_batch, len(games))))
    return list(itertools.islice((game for game in onward if game.path not in unplayable), games_per_batch))


def told_by_kind(reasons: Mapping[Path, str]) -> list[str]:
    """What to print of the games that cannot be played (file -> reason): a line for each kind of reason.

    It has the number of games, the first one's reason in full and the names of two more. Reasons are of one kind if
    they are equal up to where they quote something or go into detail.
    """
    kinds: dict[str, list[Path]] = {}
    for game_file, reason in reasons.items():
        kind = re.split("['\"(;]", reason.replace(shown(game_file), "", 1))[0]
        kinds.setdefault(kind, []).append(game_file)
    lines = []
    for first, *others in kinds.values():
        line = reasons[first]
        if others:
            more = f" and {len(others) - 2:,} more" if len(others) > 2 else ""
            line = f"{len(others) + 1:,} games, such as {line}; also {', '.join(map(shown, others[:2]))}{more}"
        lines.append(line)
    return lines


def how_to_get_games(data_root: str | Path, split: str = "") -> str:
    """What to type where `data_root` has no games: the folder with games that alfworld itself would look in, if any."""
    folders = [str(data_root), os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld", "~/.cache/alfworld"]
    given, *homes = dict.fromkeys(os.path.abspath(os.path.expanduser(folder)) for folder in folders)
    found = [home for home in homes if Path(home, RELEASE_FOLDER, split).is_dir()]
    return "".join(f"there are games in {home}: use --data-root {shlex.quote(home)}; or else " for home in found) + (
        f"download the games with {DOWNLOAD} and use --data-root datasets/alfworld, "
        "or take the starter games: --data-root datasets/starter"
    )


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
    what = f"no folder with the split {split!r}: looked for {' and '.join(map(str, candidates))}"
    raise DataError(f"{what}; {how_to_get_games(data_root, split)}")


def _facts_of_trials(split_folder: Path) -> dict[str, tuple[str, bool, bool]]:
    """game_id -> what `_read_facts` finds in each trial with a game, in order; from the index where that is sound.

    The index has, for a game_id, size and modification time (ns) of both files just before they were read, and what
    was found. It is believed for a trial if both files are still as they were. All other trials are read again, and
    then a new index is written. One that is missing, unreadable, damaged or of another version says nothing.
    """
    index_path = split_folder / INDEX_FILE
    index_key = f"games {INDEX_VERSION}"
    index = json.loads(saved(index_path, index_key) or "{}")
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
        save(index_path, index_key, json.dumps(entries).encode())
    return {game_id: tuple(entry[4:]) for game_id, entry in entries.items()}


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


def _read_facts(trial: str) -> tuple[str, bool, bool]:
    """(task type, solvable, of an older release) from a trial's two files, both read whole."""
    game, _ = read_game(f"{trial}/{GAME_FILE}")
    task_type = _read_json(f"{trial}/{TASK_FILE}")[0].get("task_type")
    if not isinstance(task_type, str):
        raise DataError(_damaged(f"{trial}/{TASK_FILE}", "has no text under 'task_type'"))
    return task_type, game.get("solvable") is True, is_older_release(game["grammar"])


def _read_json(path: str | Path) -> tuple[dict, bytes]:
    """The JSON object in a file of a game, and the file's bytes; DataError if there is none."""
    try:
        content = read_file(path)
        return json_object(content), content
    except OSError as error:
        raise DataError(_unreadable(path, error)) from error
    except ValueError as error:
        raise DataError(_damaged(path, str(error))) from error


def _damaged(path: str | Path, what: str) -> str:
    return f"{path} {what}, so the game is broken or cut short; {GOOD_COPY}"


def _unreadable(path: str | Path, error: OSError) -> str:
    remedy = "make it readable for this user" if isinstance(error, PermissionError) else GOOD_COPY
    return f"cannot read {path}: {error.strerror}; {remedy}"


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
        games = {split: find_games(data_root, split) for split in ([folder] if folder in SPLITS else SPLITS)}
    except DataError as error:
        sys.exit(f"data.py: {error}")
    counts = {split: Counter(game.task_type for game in games[split] if not game.older_release) for split in games}
    print(f"{'task type':<32}" + "".join(f"{split:>14}" for split in counts))
    for task_type in TASK_TYPES:
        print(f"{task_type:<32}" + "".join(f"{counts[split][task_type]:>14,}" for split in counts))
    print(f"{'all':<32}" + "".join(f"{counts[split].total():>14,}" for split in counts))
    older = [game.path for split in games for game in games[split] if game.older_release]
    if older:
        [line] = told_by_kind({path: shown(f"{path}: {OLDER_RELEASE}") for path in older})
        sys.exit(f"data.py: not counted: {line}")


if __name__ == "__main__":
    main()
