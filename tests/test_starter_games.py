"""The starter games: counts, format, honest rooms, walkthroughs that win, the generator's own check.

Facts are read from the committed PDDL text by a few lines of this file; stock TextWorld says what wins.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

STARTER = Path(__file__).resolve().parent.parent / "datasets" / "starter"
GAMES = STARTER / "json_2.1.1"
SPLITS = {"train": 36, "valid_seen": 12, "valid_unseen": 12}  # the least number of games
TASK_TYPES = {
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
}
GAME_FILES = sorted(GAMES.glob("*/*/*/game.tw-pddl"))
OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"}  # what the official scenes open and shut


def split_of(game_file):
    return game_file.relative_to(GAMES).parts[0]


def task_of(game_file):
    """(task type, target, goal type, scene number), read from the folder's name."""
    task_type, target, movable, goal, scene = game_file.parts[-3].split("-")
    assert movable == "None"
    return task_type, target, goal, int(scene)


def facts_of(game_file):
    """{predicate: list of argument tuples} of the initial state."""
    problem = json.loads(game_file.read_text())["pddl_problem"]
    init = problem[problem.index("(:init"):problem.index("(:goal")]
    facts = {}
    for predicate, *arguments in (fact.split() for fact in re.findall(r"\(([^():]+)\)", init)):
        facts.setdefault(predicate, []).append(tuple(arguments))
    return facts


def kind(name):
    """`Mug_bar__plus_...` -> Mug; a sink's basin keeps its own name."""
    return name.rsplit("_bar_", 1)[1] if name.endswith("Basin") else name.split("_bar_")[0]


def load_generator():
    spec = importlib.util.spec_from_file_location("make_games", STARTER / "make_games.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_games"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_enough_games_of_all_six_task_types(split):
    found = Counter(task_of(game_file)[0] for game_file in GAME_FILES if split_of(game_file) == split)
    assert set(found) == TASK_TYPES
    assert sum(found.values()) >= SPLITS[split]
    assert len(set(found.values())) == 1  # no task type is favoured


def test_every_game_passes_the_filter_and_has_both_files():
    assert {split_of(game_file) for game_file in GAME_FILES} == set(SPLITS)
    for game_file in GAME_FILES:
        relative = game_file.relative_to(GAMES).as_posix()
        assert "movable" not in relative and "Sliced" not in relative
        assert re.fullmatch(r"\w+/\w+-\w+-None-\w+-1\d{3}/trial_\w+/game\.tw-pddl", relative)
        game = json.loads(game_file.read_text())
        assert sorted(game) == ["grammar", "pddl_domain", "pddl_problem", "solvable", "walkthrough"]
        assert game["solvable"] is True
    names = Counter(path.name for path in GAMES.rglob("[!.]*") if path.is_file())
    assert names == {"game.tw-pddl": len(GAME_FILES), "traj_data.json": len(GAME_FILES)}
    assert len({game_file.parent.name for game_file in GAME_FILES}) == len(GAME_FILES)


def test_traj_data_says_what_the_folder_and_the_task_sentence_say():
    for game_file in GAME_FILES:
        task_type, target, goal, scene = task_of(game_file)
        traj_data = json.loads((game_file.parent / "traj_data.json").read_text())
        parameters = traj_data["pddl_params"]
        assert (traj_data["task_type"], traj_data["scene"]["scene_num"]) == (task_type, scene)
        assert traj_data["task_id"] == game_file.parent.name
        assert parameters["object_target"] == target and parameters["object_sliced"] is False
        assert parameters["toggle_target" if task_type == "look_at_obj_in_light" else "parent_target"] == goal
        grammar = json.loads(game_file.read_text())["grammar"]
        sentence = re.search(r"Your task is to: (.*?)\.\"", grammar).group(1)
        assert target.lower() in sentence and goal.lower() in sentence and "UNKNOWN" not in sentence


def test_unseen_rooms_are_not_in_train_and_seen_rooms_are():
    scenes = {split: set() for split in SPLITS}
    furniture = {split: set() for split in SPLITS}
    for game_file in GAME_FILES:
        receptacles = Counter(kind(name) for name, _ in facts_of(game_file)["receptacleType"])
        scenes[split_of(game_file)].add(task_of(game_file)[3])
        furniture[split_of(game_file)].add(frozenset(receptacles.items()))
    assert scenes["valid_seen"] <= scenes["train"] and furniture["valid_seen"] <= furniture["train"]
    assert not scenes["valid_unseen"] & scenes["train"]
    assert not furniture["valid_unseen"] & furniture["train"]
    for split in SPLITS:  # kitchens, living rooms, bedrooms, bathrooms
        assert {scene // 100 for scene in scenes[split]} == {10, 12, 13, 14}


def test_rooms_are_of_a_natural_size_with_things_to_open_and_to_count():
    for game_file in GAME_FILES:
        facts = facts_of(game_file)
        portable = [name for (name,) in facts["pickupable"]]
        assert 8 <= len(facts["receptacleType"]) <= 20
        assert 10 <= len(portable) <= 30
        assert {kind(name) for (name,) in facts["openable"]} <= OPENABLE and len(facts["openable"]) >= 2
        assert "opened" not in facts
        assert max(Counter(kind(name) for name, _ in facts["receptacleType"]).values()) >= 2
        assert sorted(name for name, _ in facts["inReceptacle"] if name in portable) == sorted(portable)


def test_no_game_is_half_won_at_the_start_and_the_target_is_often_behind_a_door():
    hidden = Counter()
    for game_file in GAME_FILES:
        task_type, target, goal, _ = task_of(game_file)
        facts = facts_of(game_file)
        hosts = [host for name, host in facts["inReceptacle"] if kind(name) == target]
        assert len(hosts) >= (2 if task_type == "pick_two_obj_and_place" else 1)
        assert goal not in map(kind, hosts)
        assert not {"isClean", "isHot", "isCool", "isToggled", "holds"} & set(facts)
        hidden[split_of(game_file), all((host,) in facts["openable"] for host in hosts)] += 1
    for split in SPLITS:
        assert hidden[split, True] >= 4 and hidden[split, False] >= 4


def test_all_files_together_stay_small():
    assert sum(path.stat().st_size for path in GAMES.rglob("[!.]*") if path.is_file()) < 5_000_000


def test_check_accepts_the_committed_files_whatever_the_hash_seed():
    command = [sys.executable, str(STARTER / "make_games.py"), "--check"]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "4"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_finds_a_changed_a_missing_and_a_foreign_file(tmp_path):
    generator = load_generator()
    files = generator.build_files()
    copy = tmp_path / "json_2.1.1"
    shutil.copytree(GAMES, copy)
    assert generator.differences(files, copy) == []
    changed, missing = sorted(files)[:2]
    (copy / changed).write_bytes((copy / changed).read_bytes().replace(b"Your task", b"Your tusk"))
    (copy / missing).unlink()
    (copy / "train" / "note.txt").write_text("a note")
    assert sorted(generator.differences(files, copy)) == sorted(
        [f"{changed} differs", f"{missing} is missing", "train/note.txt is not one of the starter games"])


@pytest.fixture(scope="module")
def stock_world():
    from stock_world import StockWorld  # TextWorld's planner library takes a second to load

    return StockWorld()


def assert_walkthrough_wins(stock_world, game_file):
    """Every step is offered, the last one wins, none before does."""
    stock_world.load(game_file)
    _, admissible, _, won, _ = stock_world.reset()
    steps = json.loads(game_file.read_text())["walkthrough"]
    assert not won and 3 <= len(steps) <= 15
    for index, step in enumerate(steps):
        assert step in admissible, (game_file, step)
        _, admissible, _, won, _ = stock_world.step(step)
        assert won == (index == len(steps) - 1), (game_file, step)


def one_game_of_each_type():
    """Six games, each of another task type, two of every split."""
    splits = [split for split in SPLITS for _ in range(2)]
    return [next(game_file for game_file in GAME_FILES
                 if split_of(game_file) == split and task_of(game_file)[0] == task_type)
            for split, task_type in zip(splits, sorted(TASK_TYPES), strict=True)]


@pytest.mark.parametrize("game_file", one_game_of_each_type(), ids=lambda game_file: game_file.parts[-3])
def test_the_walkthrough_wins_at_its_last_step_in_stock_textworld(stock_world, game_file):
    assert_walkthrough_wins(stock_world, game_file)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_walkthrough_wins_at_its_last_step_in_stock_textworld(stock_world, split):
    for game_file in GAME_FILES:
        if split_of(game_file) == split:
            assert_walkthrough_wins(stock_world, game_file)


@pytest.mark.slow
def test_the_handcoded_expert_finds_its_way_through_the_unseen_games():
    """alfworld's expert has to search; it is no judge of pick_two games, as it keeps no book of `move`."""
    import random

    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredExpert

    import stock_world  # noqa: F401 (makes TextWorld run on CPython 3.13)

    infos = textworld.EnvInfos(won=True, admissible_commands=True, facts=True, extras=["expert_plan"])
    expert = AlfredExpert(AlfredDemangler(textworld.envs.PddlEnv(infos)), "handcoded")
    lost = []
    for game_file in GAME_FILES:
        if split_of(game_file) != "valid_unseen" or task_of(game_file)[0] == "pick_two_obj_and_place":
            continue
        random.seed(0)
        expert.load(str(game_file))
        state, done, steps = expert.reset(), False, 0
        while not done and steps < 50:
            state, _, done = expert.step(state["extra.expert_plan"][0])
            steps += 1
        if not done:
            lost.append(game_file.parts[-3])
    assert len(lost) <= 1, lost
