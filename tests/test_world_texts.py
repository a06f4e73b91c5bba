"""The compiled world against stock alfworld/TextWorld, byte by byte: games as they are and games altered at random.

Stock TextWorld (`stock_world.py`) is the reference; the committed starter games are enough for everything but the
slow checks of official games (`ALFWORLD_DATA` or `datasets/alfworld`): pytest -m slow -s -k official.
"""

import collections
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stock_world
from game_copies import ROOT, STARTER, TASK_TYPES, compiled_games, rewritten, walkthrough

import environment
from environment import GameError, World

OFFICIAL = Path(os.environ.get("ALFWORLD_DATA", ROOT / "datasets" / "alfworld")) / "json_2.1.1"


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """One starter game of each task type in a folder of its own, compiled there."""
    return compiled_games(tmp_path_factory.mktemp("games"))


@pytest.fixture(scope="module")
def stock():
    """Stock TextWorld without its repeated work; the hash seed test below holds the untouched one against ours."""
    stock_world.memoise()
    return stock_world.StockWorld()


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_texts_and_states_are_those_of_stock_textworld(games, stock, task_type):
    game_file = games[TASK_TYPES.index(task_type)]
    stock.load(game_file)
    world = World(environment.compile_game(game_file))
    actions = walkthrough(game_file)
    steps, found = stock_world.difference(stock, world, actions, random.Random(1))
    assert not found and steps == len(actions) + 2
    assert stock.step("look")[2:] == (1, True, True)
    steps, found = stock_world.difference(stock, world, 60, random.Random(2))
    assert not found and steps == 60


def test_objects_left_beside_where_they_were_are_told_as_stock_tells_them(tmp_path, games, stock):
    """An object moved between two receptacles of one location is the one case in which `look` lists the floor."""
    game_file = games[TASK_TYPES.index("pick_and_place_simple")]
    problem = json.loads(game_file.read_text())["pddl_problem"]
    places = [line.split() for line in problem.splitlines() if line.strip().startswith("(receptacleAtLocation")]
    kept, moved = places[0][2], places[1:]
    for fact, receptacle, location in moved:
        problem = problem.replace(f"{fact} {receptacle} {location}", f"{fact} {receptacle} {kept}")
    original = json.loads(game_file.read_text())["pddl_problem"]
    everything_in_one_place = rewritten(game_file, tmp_path, pddl_problem=(original, problem))
    stock.load(everything_in_one_place)
    world = World(environment.compile_game(everything_in_one_place))
    seen = []
    for seed in range(3):
        steps, found = stock_world.difference(stock, world, 60, random.Random(seed))
        assert not found, found
        seen += [stock.step("look")[0]]
    assert any("Next to it, you see a " in text for text in seen), "the case never came up"


def test_stock_texts_do_not_depend_on_the_hash_seed_nor_do_ours(games):
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import environment, stock_world, hashlib, pathlib\n"
        "game = pathlib.Path(sys.argv[3]); stock = stock_world.StockWorld(); stock.load(game); first = stock.reset()\n"
        "world = environment.World(environment.compile_game(game)); state, reply = world.start(); told = []\n"
        "for action in [first[1][0], 'look', first[1][1], 'inventory']:\n"
        "    state, reply = world.step(state, reply, action); told.append(reply)\n"
        "    assert reply[:5] == stock.step(action), action\n"
        "print(hashlib.sha256(repr(told).encode()).hexdigest())\n"
    )
    told = set()
    for seed in ("0", "1"):
        command = [sys.executable, "-c", script, str(ROOT), str(ROOT / "tests"), str(games[0])]
        told.add(subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": seed}, text=True))
    assert len(told) == 1


@pytest.mark.slow
def test_every_official_game_is_that_of_stock_textworld(capsys):
    """4,027 games with their walkthroughs, every eighth (and all for validation) with 50 random actions: hours."""
    game_files = sorted(OFFICIAL.glob("*/*/*/game.tw-pddl"), key=lambda path: (path.parts[-4] == "train", path))
    if not game_files:
        pytest.skip(f"no official games below {OFFICIAL}")
    stock_world.memoise()
    stock = stock_world.StockWorld()
    counts = {"walkthrough": [0, 0], "random": [0, 0]}
    differences = []
    for number, game_file in enumerate(game_files):
        stock.load(game_file)
        world = World(environment.compile_game(game_file))
        plays = {"walkthrough": walkthrough(game_file)}
        if game_file.parts[-4] != "train" or number % 8 == 0:
            plays["random"] = 50
        for kind, actions in plays.items():
            rng = random.Random(f"{kind} {game_file.parent.name}")
            steps, found = stock_world.difference(stock, world, actions, rng)
            counts[kind] = [counts[kind][0] + 1, counts[kind][1] + steps]
            differences += [f"{game_file}: {found}"] * bool(found)
    with capsys.disabled():
        print({kind: f"{games} games, {steps} steps" for kind, (games, steps) in counts.items()}, len(differences))
    assert not differences


# --- altered games ---


def altered(game_file, folder, **edits):
    """The game with its problem as a text of one line, in which each (old, new) of `edits` was replaced."""
    game = json.loads(game_file.read_text())
    problem = stock_world.written(stock_world.parsed(game["pddl_problem"]))
    for old, new in edits.values():
        assert old in problem
        problem = problem.replace(old, new)
    copy = folder / "game.tw-pddl"
    copy.write_text(json.dumps(game | {"pddl_problem": problem}))
    return copy


def compare(game_file, stock, actions):
    """Play the same in both worlds; the last text."""
    stock.load(game_file)
    _, found = stock_world.difference(stock, World(environment.compile_game(game_file)), actions, random.Random(1))
    assert not found, found
    stock.reset()
    return [stock.step(action)[0] for action in actions][-1]


def actions_to(command, name, game_file):
    """The way to where a command about a thing can be given, the thing taken up if need be, and the command; or None."""
    world = World(environment.compile_game(game_file))
    for start in [action for action in world.start()[1][1] if action.startswith("go to ")]:
        state, reply = world.start()
        done = []
        for action in (start, start.replace("go to", "open"), start.replace("go to", f"take {name} from")):
            state, reply = world.step(state, reply, action)
            done.append(action)
            if f"{command} {name}" in reply[1]:
                return [*done, f"{command} {name}"]
    return None


@pytest.mark.parametrize(
    "fact, command, before, after",
    [
        ("isreceptacleobject", "examine", "In it, you see nothing", "There's nothing special about"),
        ("toggleable", "use", "You turn on the", "You don't see any switch on the"),
    ],
)
def test_a_thing_of_a_subtype_is_in_no_fact_under_its_parameters_type(tmp_path, stock, fact, command, before, after):
    """In stock a variable has its parameter's type (`?o - object`), and facts know the thing by its own."""
    for game_file in STARTER:
        words = stock_world.written(stock_world.parsed(json.loads(game_file.read_text())["pddl_problem"]))
        inside = set(re.findall(r"\(inreceptacle ([^? ]+) ", words)) & set(re.findall(rf"\({fact} ([^? ]+)\)", words))
        things = sorted(inside - set(re.findall(r"\(inreceptacleobject \S+ (\S+)\)", words)))
        stock.load(game_file)
        ways = [actions_to(command, stock.name_of(thing), game_file) for thing in things]
        if any(ways):
            thing, actions = next(pair for pair in zip(things, ways) if pair[1])
            break
    assert before in compare(game_file, stock, actions)
    other = altered(game_file, tmp_path, type=(f"{thing} - object", f"{thing} - receptacle"))
    assert after in compare(other, stock, actions)


def test_a_goal_says_nothing_of_what_never_changes(tmp_path, games, stock):
    """Stock drops such literals, the negated ones too where they are not met, and cannot load a goal of nothing else."""
    game_file = games[TASK_TYPES.index("pick_and_place_simple")]
    words = stock_world.written(stock_world.parsed(json.loads(game_file.read_text())["pddl_problem"]))
    goal = words[words.index("(:goal") : words.rindex("(:metric") if "(:metric" in words else -1].strip()
    pickup = next(action for action in walkthrough(game_file) if action.startswith("take "))
    until = walkthrough(game_file)[: walkthrough(game_file).index(pickup) + 1]
    stock.load(game_file)
    thing = next(thing for thing in re.findall(r"\(pickupable (\S+)\)", words) if f"take {stock.name_of(thing)} " in pickup)
    held = altered(game_file, tmp_path, goal=(goal, f"(:goal (and (not (pickupable {thing})) (holds agent1 {thing})))"))
    compare(held, stock, until)
    assert stock.step("look")[2:] == (1, True, True)
    for empty in (f"(not (pickupable {thing}))", f"(pickupable {thing})", "(and (holds agent1 {0}) (not (holds agent1 {0})))"):
        with pytest.raises(GameError, match="a goal that is always or never met"):
            environment.compile_game(altered(game_file, tmp_path, goal=(goal, f"(:goal {empty.format(thing)})")))


def fuzz(game_files, seeds, folder, stock, steps):
    """Altered games: equal in every text, list, score and end, or refused. Returns how many were what."""
    counts = collections.Counter()
    for seed in seeds:
        rng = random.Random(f"altered {seed}")
        source = rng.choice(game_files)
        game = json.loads(source.read_text())
        game["pddl_problem"] = stock_world.altered_problem(game["pddl_problem"], rng)
        game_file = folder / "game.tw-pddl"
        game_file.write_text(json.dumps(game))
        try:
            world = World(environment.compile_game(game_file))
        except GameError:
            counts["refused"] += 1
            continue
        stock.load(game_file)
        _, found = stock_world.difference(stock, world, steps, rng, curious=True)
        assert not found, f"seed {seed}, {source}: {found}"
        counts["equal"] += 1
    return counts


def test_altered_games_are_as_in_stock_or_refused(tmp_path, stock):
    counts = fuzz(STARTER, range(20), tmp_path, stock, 40)
    assert counts["equal"] >= 8 and counts["refused"] >= 2, counts


@pytest.mark.slow
def test_altered_official_games_are_as_in_stock_or_refused(tmp_path, stock, capsys):
    game_files = sorted(OFFICIAL.glob("*/*/*/game.tw-pddl"))
    if not game_files:
        pytest.skip(f"no official games below {OFFICIAL}")
    counts = fuzz(game_files, range(300), tmp_path, stock, 50)
    with capsys.disabled():
        print(dict(counts))
    assert counts["equal"] >= 100 and counts["refused"] >= 30, counts
