"""Games: what is kept, in which order, what the index may be trusted with, and what bad data says."""

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import data

ROOT = Path(data.__file__).parent
OFFICIAL = ROOT / "datasets" / "alfworld"
needs_official_games = pytest.mark.skipif(
    not (OFFICIAL / "json_2.1.1" / "train").is_dir(), reason="the official games are not in datasets/alfworld"
)
PLACE, LIGHT, TWO = "pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"


def write_trial(split_folder: Path, game_id: str, task_type: str = PLACE, **changed) -> Path:
    """A trial's two files; `changed` replaces keys of the game, a key set to None is left out."""
    game = {"pddl_domain": "(d)", "grammar": "g", "pddl_problem": "(p)", "solvable": True, "walkthrough": ["look"]}
    game = {key: value for key, value in (game | changed).items() if value is not None}
    folder = split_folder / game_id
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps(game))
    (folder / "traj_data.json").write_text(json.dumps({"task_id": "t", "task_type": task_type}))
    return folder / "game.tw-pddl"


@pytest.fixture
def root(tmp_path):
    """A data root with three training games, written in an order that is not the sorted one."""
    split_folder = tmp_path / "alfworld" / "json_2.1.1" / "train"
    for game_id, task_type in (("b-task/trial_2", TWO), ("a-task/trial_9", LIGHT), ("b-task/trial_1", PLACE)):
        write_trial(split_folder, game_id, task_type)
    return tmp_path / "alfworld"


@pytest.fixture
def split_folder(root):
    return root / "json_2.1.1" / "train"


@pytest.fixture
def game_reads(monkeypatch):
    """The trials whose files are read, as they are read."""
    reads = []
    read_facts = data._read_facts
    monkeypatch.setattr(data, "_read_facts", lambda trial: (reads.append(trial), read_facts(trial))[1])
    return reads


def ids(games):
    return [game.game_id for game in games]


# --- what is kept ---


def test_games_are_sorted_and_complete(root, split_folder):
    games = data.find_games(root, "train")
    assert games == [
        data.Game(split_folder / "a-task/trial_9/game.tw-pddl", "a-task/trial_9", "train", LIGHT),
        data.Game(split_folder / "b-task/trial_1/game.tw-pddl", "b-task/trial_1", "train", PLACE),
        data.Game(split_folder / "b-task/trial_2/game.tw-pddl", "b-task/trial_2", "train", TWO),
    ]
    assert all(game.path.is_absolute() and game.path.is_file() for game in games)


@pytest.mark.parametrize(
    "game_id, task_type, changed",
    [
        ("pick_and_place_with_movable_recep-Apple/trial_1", PLACE, {}),
        ("c-task/trial_movable", PLACE, {}),
        ("pick_heat-AppleSliced-None/trial_1", PLACE, {}),
        ("c-task/trial_1", "pick_and_place_with_movable_recep", {}),
        ("c-task/trial_1", PLACE.upper(), {}),
        ("c-task/trial_1", PLACE, {"solvable": False}),
        ("c-task/trial_1", PLACE, {"solvable": None}),
        ("c-task/trial_1", PLACE, {"solvable": "true"}),
        (".hidden/trial_1", PLACE, {}),
        ("c-task/.trial_1.tmp", PLACE, {}),
    ],
)
def test_a_game_outside_the_benchmark_is_left_out(root, split_folder, game_id, task_type, changed):
    before = data.find_games(root, "train")
    write_trial(split_folder, game_id, task_type, **changed)
    assert data.find_games(root, "train") == before
    assert data.find_games(root, "train") == before  # from the index too


def test_only_the_path_below_the_split_counts_for_the_filter(tmp_path):
    root = tmp_path / "movable" / "Sliced"
    write_trial(root / "train", "a/trial_1")
    assert ids(data.find_games(root, "train")) == ["a/trial_1"]


def test_other_files_are_not_games(root, split_folder):
    (split_folder / "readme.txt").write_text("x")
    (split_folder / "b-task" / "notes").write_text("x")
    (split_folder / "b-task" / "trial_1" / ".game.tw-pddl.tmp").write_text("{")
    (split_folder / ".games_index.json.1-abc.tmp").write_text("{")
    (split_folder / "d-task" / "trial_without_game").mkdir(parents=True)
    (split_folder / "d-task" / "trial_without_game" / "traj_data.json").write_text("{}")
    assert ids(data.find_games(root, "train")) == ["a-task/trial_9", "b-task/trial_1", "b-task/trial_2"]


def test_data_root_may_be_any_of_three_folders(root, split_folder, monkeypatch):
    expected = data.find_games(root, "train")
    assert data.find_games(root / "json_2.1.1", "train") == expected
    assert data.find_games(str(split_folder) + "/", "train") == expected
    monkeypatch.chdir(split_folder)
    assert data.find_games(".", "train") == expected


# --- order and batches ---


def test_shuffle_depends_on_the_seed_alone():
    games = [data.Game(Path(f"/{i}"), str(i), "train", PLACE) for i in range(10)]
    random.seed(1)
    state = random.getstate()
    shuffled = data.shuffle_games(games, 42)
    assert random.getstate() == state
    random.seed(2)
    assert data.shuffle_games(tuple(games), 42) == shuffled
    # Written down once: a change would give every seed another course of training.
    assert "".join(ids(shuffled)) == "7328569401"
    assert data.shuffle_games(games, 43) != shuffled
    assert "".join(ids(games)) == "0123456789"


def test_batches_move_on_and_wrap_around():
    games = [data.Game(Path(f"/{i}"), str(i), "train", PLACE) for i in range(5)]
    batches = ["".join(ids(data.batch_of_games(games, update, 2))) for update in range(6)]
    assert batches == ["01", "23", "40", "12", "34", "01"]
    assert "".join(ids(data.batch_of_games(games, 1, 7))) == "2340123"
    assert Counter("".join(batches[:5])) == Counter("0123401234")


@pytest.mark.parametrize("update, games_per_batch, count", [(-1, 2, 5), (0, 0, 5), (0, -3, 5), (0, 2, 0)])
def test_an_impossible_batch_is_refused(update, games_per_batch, count):
    games = [data.Game(Path("/x"), "x", "train", PLACE)] * count
    with pytest.raises(data.DataError):
        data.batch_of_games(games, update, games_per_batch)


# --- the index ---


def test_a_second_start_reads_no_game(root, split_folder, game_reads):
    first = data.find_games(root, "train")
    assert len(game_reads) == 3
    written = (split_folder / data.INDEX_FILE).stat()
    assert data.find_games(root, "train") == first
    assert len(game_reads) == 3
    assert (split_folder / data.INDEX_FILE).stat().st_mtime_ns == written.st_mtime_ns


@pytest.mark.parametrize("name", ["game.tw-pddl", "traj_data.json"])
@pytest.mark.parametrize("by", ["size", "mtime"])
def test_a_changed_file_is_read_again(root, split_folder, game_reads, name, by):
    data.find_games(root, "train")
    game_reads.clear()
    path = split_folder / "b-task/trial_1" / name
    status = path.stat()
    changed = path.read_text().replace("true", "null").replace(PLACE, "x" * len(PLACE))
    if by == "size":
        path.write_text(changed + "\n")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        path.write_text(changed)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert path.stat().st_size == status.st_size
    for _ in range(2):
        assert ids(data.find_games(root, "train")) == ["a-task/trial_9", "b-task/trial_2"]
    assert [Path(trial).name for trial in game_reads] == ["trial_1"]


def test_new_and_vanished_games_are_noticed(root, split_folder, game_reads):
    data.find_games(root, "train")
    game_reads.clear()
    shutil.rmtree(split_folder / "b-task/trial_1")
    write_trial(split_folder, "b-task/trial_3")
    assert ids(data.find_games(root, "train")) == ["a-task/trial_9", "b-task/trial_2", "b-task/trial_3"]
    assert [Path(trial).name for trial in game_reads] == ["trial_3"]
    assert "b-task/trial_1" not in (split_folder / data.INDEX_FILE).read_text()


def broken_indexes():
    """What may stand in the index file, made of its head and of its entries."""

    def with_first(entries, position, value):
        next(iter(entries.values()))[position] = value
        return json.dumps(entries).encode()

    return {
        "empty": lambda head, entries: b"",
        "cut short": lambda head, entries: head + json.dumps(entries).encode()[:-20],
        "garbage": lambda head, entries: bytes(range(256)) * 10,
        "deep": lambda head, entries: head + b"[" * 200_000,
        "long number": lambda head, entries: head + b"9" * 10_000,
        "other version": lambda head, entries: head.replace(b"games ", b"games 1") + json.dumps(entries).encode(),
        "no head": lambda head, entries: json.dumps(entries).encode(),
        "another head": lambda head, entries: b"0" + head + json.dumps(entries).encode(),
        "a list": lambda head, entries: head + json.dumps([entries]).encode(),
        "games a list": lambda head, entries: head + json.dumps([1, 2]).encode(),
        "an entry is null": lambda head, entries: head + json.dumps({"a-task/trial_9": None}).encode(),
        "an entry is short": lambda head, entries: head + json.dumps({"a-task/trial_9": [1, 2]}).encode(),
        "solvable is text": lambda head, entries: head + with_first(entries, 5, "false"),
        "task type is a list": lambda head, entries: head + with_first(entries, 4, [PLACE]),
        "size is a fraction": lambda head, entries: head + with_first(entries, 0, 9.0),
    }


@pytest.mark.parametrize("kind", broken_indexes())
def test_a_broken_index_is_built_anew(root, split_folder, game_reads, kind):
    expected = data.find_games(root, "train")
    path = split_folder / data.INDEX_FILE
    good = path.read_bytes()
    head, newline, content = good.partition(b"\n")
    path.write_bytes(broken_indexes()[kind](head + newline, json.loads(content)))
    game_reads.clear()
    assert data.find_games(root, "train") == expected
    assert len(game_reads) == 3
    assert path.read_bytes() == good


def test_a_folder_in_the_place_of_the_index_does_no_harm(root, split_folder, game_reads):
    (split_folder / data.INDEX_FILE).mkdir()
    assert len(data.find_games(root, "train")) == 3
    assert len(data.find_games(root, "train")) == 3
    assert len(game_reads) == 6
    assert [path.name for path in split_folder.iterdir() if path.name.endswith(".tmp")] == []


@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_a_folder_that_cannot_be_written_is_no_error(root, split_folder, monkeypatch, call):
    def refuse(*args, **kwargs):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(*{"write_bytes": (Path, call, refuse), "replace": (os, call, refuse)}[call])
    assert len(data.find_games(root, "train")) == 3
    assert sorted(path.name for path in split_folder.iterdir()) == ["a-task", "b-task"]


def _find_often(root, expected, barrier):
    barrier.wait(timeout=30)
    for _ in range(30):
        (root / "json_2.1.1" / "train" / data.INDEX_FILE).unlink(missing_ok=True)
        assert ids(data.find_games(root, "train")) == expected


def test_two_processes_at_once_do_not_disturb_each_other(root, split_folder):
    expected = ids(data.find_games(root, "train"))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_find_often, args=(root, expected, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(p.name for p in split_folder.iterdir() if p.is_file()) in ([], [data.INDEX_FILE])


# --- bad data ---


@pytest.mark.parametrize("given", ["nowhere", "alfworld/json_2.1.1/train/a-task"])
def test_missing_data_says_where_it_looked_and_how_to_get_it(root, tmp_path, given):
    with pytest.raises(data.DataError) as error:
        data.find_games(tmp_path / given, "train")
    message = str(error.value)
    assert str(tmp_path / given / "json_2.1.1" / "train") in message
    assert "ALFWORLD_DATA=datasets/alfworld uv run alfworld-download" in message
    assert "--data-root datasets/starter" in message
    assert "\n" not in message


def test_a_split_that_is_not_there_is_named(root):
    with pytest.raises(data.DataError, match="'valid_seen'.*json_2.1.1/valid_seen"):
        data.find_games(root, "valid_seen")


def test_the_folder_of_another_split_is_refused(split_folder):
    with pytest.raises(data.DataError, match=r"holds the split 'train', not 'valid_seen'.*--data-root"):
        data.find_games(split_folder, "valid_seen")


@pytest.mark.parametrize("split", ["valid_train", "Train", "", "../train"])
def test_an_unknown_split_is_refused(root, split):
    with pytest.raises(data.DataError, match="unknown split .*train, valid_seen, valid_unseen"):
        data.find_games(root, split)


def test_a_folder_without_games_is_refused(tmp_path):
    (tmp_path / "train" / "task" / "trial").mkdir(parents=True)
    with pytest.raises(data.DataError) as error:
        data.find_games(tmp_path, "train")
    assert str(tmp_path / "train") in str(error.value) and "alfworld-download" in str(error.value)


@pytest.mark.parametrize(
    "name, damage",
    [
        ("game.tw-pddl", lambda content: content[:-30]),
        ("game.tw-pddl", lambda content: b""),
        ("game.tw-pddl", lambda content: b"\xff\xfe\xfa" + content),
        ("game.tw-pddl", lambda content: content + b"}"),
        ("game.tw-pddl", lambda content: b"[" * 200_000),
        ("game.tw-pddl", lambda content: b'["a game"]'),
        ("game.tw-pddl", lambda content: content.replace(b"pddl_problem", b"problem")),
        ("game.tw-pddl", lambda content: content.replace(b'"g"', b"7")),
        ("traj_data.json", lambda content: content[:-3]),
        ("traj_data.json", lambda content: content.replace(b"task_type", b"type")),
    ],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_damaged_file_is_named_with_what_to_do(root, split_folder, name, damage, indexed):
    if indexed:
        data.find_games(root, "train")
    path = split_folder / "b-task/trial_2" / name
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):  # the second start must not find it in an index
        with pytest.raises(data.DataError) as error:
            data.find_games(root, "train")
        message = str(error.value)
        assert message.startswith(str(path)) and "alfworld-download" in message and "remove its folder" in message
        assert "\n" not in message


def test_a_game_without_its_task_file_is_named(root, split_folder):
    (split_folder / "b-task/trial_2/traj_data.json").unlink()
    with pytest.raises(data.DataError, match=r"b-task/trial_2/game\.tw-pddl has no traj_data\.json"):
        data.find_games(root, "train")


def test_a_file_that_cannot_be_read_is_named(root, split_folder):
    path = split_folder / "b-task/trial_2/game.tw-pddl"
    path.unlink()
    path.mkdir()
    with pytest.raises(data.DataError, match=r"cannot read .*b-task/trial_2/game\.tw-pddl"):
        data.find_games(root, "train")


# --- the command ---


def run_command(*arguments):
    command = [sys.executable, str(ROOT / "data.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_counts_by_split_and_task_type(root):
    for split, count in (("valid_seen", 2), ("valid_unseen", 1)):
        for i in range(count):
            write_trial(root / "json_2.1.1" / split, f"a-task/trial_{i}", TWO)
    lines = run_command("--data-root", root).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["task", "type", "train", "valid_seen", "valid_unseen"],
        [PLACE, "1", "0", "0"],
        [LIGHT, "1", "0", "0"],
        ["pick_clean_then_place_in_recep", "0", "0", "0"],
        ["pick_heat_then_place_in_recep", "0", "0", "0"],
        ["pick_cool_then_place_in_recep", "0", "0", "0"],
        [TWO, "1", "2", "1"],
        ["all", "3", "2", "1"],
    ]


def test_the_command_counts_a_single_split(split_folder):
    lines = run_command("--data-root", split_folder).stdout.splitlines()
    assert lines[0].split() == ["task", "type", "train"] and lines[-1].split() == ["all", "3"]


def test_the_command_ends_in_one_line_without_data(tmp_path):
    result = run_command("--data-root", tmp_path)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("data.py: no folder with the split 'train'") and result.stderr.count("\n") == 1


# --- the official games ---


@needs_official_games
@pytest.mark.parametrize(
    "split, counts",
    [
        ("train", (790, 308, 650, 459, 533, 813)),
        ("valid_seen", (35, 13, 27, 16, 25, 24)),
        ("valid_unseen", (24, 18, 31, 23, 21, 17)),
    ],
)
def test_the_official_games_are_counted_as_published(split, counts):
    games = data.find_games(OFFICIAL, split)
    assert len(games) == {"train": 3553, "valid_seen": 140, "valid_unseen": 134}[split]
    by_type = Counter(game.task_type for game in games)
    assert tuple(by_type[task_type] for task_type in data.TASK_TYPES) == counts


@needs_official_games
def test_a_warm_start_on_the_official_games_takes_under_a_second(game_reads):
    data.find_games(OFFICIAL, "train")
    game_reads.clear()
    start = time.perf_counter()
    data.find_games(OFFICIAL, "train")
    assert time.perf_counter() - start < 1.0
    if (OFFICIAL / "json_2.1.1" / "train" / data.INDEX_FILE).exists():  # no index in a folder one may not write
        assert game_reads == []
