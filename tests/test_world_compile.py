"""Compiling a game: its cache, what is refused and with which words, and the bounds on what is begun at all."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from game_copies import ROOT, compiled_games, out_of_reach, rewritten

import data
import environment
from environment import GameError, World


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """One starter game of each task type in a folder of its own, compiled there."""
    return compiled_games(tmp_path_factory.mktemp("games"))


# --- the cache ---


def test_the_cache_is_used_and_anything_wrong_with_it_is_repaired(tmp_path, games, monkeypatch):
    game_file = rewritten(games[0], tmp_path)
    compiled = environment.compile_game(game_file)
    cache = tmp_path / environment.CACHE_NAME
    good = cache.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(environment, "_compile", None)  # a second compilation would fail
        assert environment.compile_game(game_file) == compiled
    for bad in (b"", good[: len(good) // 2], good[:-1] + bytes([good[-1] ^ 1]), b"\0" * 100):
        cache.write_bytes(bad)
        assert environment.compile_game(game_file) == compiled and cache.read_bytes() == good
    with monkeypatch.context() as patched:
        patched.setattr(environment, "_versions", lambda: b"of other packages")
        assert data.saved(cache, environment._read_game(game_file)[1]) is None
    task = data.split_task(json.loads(game_file.read_text())["grammar"])[1]
    rewritten(game_file, tmp_path, grammar=(task, data.TASK_PREFIX + "do something else."))
    assert World(environment.compile_game(game_file)).task == "do something else."


@pytest.mark.parametrize(("owner", "name"), [(Path, "write_bytes"), (os, "replace")])
def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, games, monkeypatch, owner, name):
    game_file = rewritten(games[0], tmp_path)

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(owner, name, refuse)
    assert World(environment.compile_game(game_file)).start()
    assert [path.name for path in tmp_path.iterdir()] == ["game.tw-pddl"]


def test_two_processes_may_compile_one_game_at_once(tmp_path, games):
    game_file = rewritten(games[0], tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import environment, pathlib; environment.compile_game(pathlib.Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, str(ROOT), str(game_file)]
    assert [process.wait() for process in [subprocess.Popen(command) for _ in range(2)]] == [0, 0]
    assert data.saved(tmp_path / environment.CACHE_NAME, environment._read_game(game_file)[1]) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [environment.CACHE_NAME, "game.tw-pddl"]
    modes = [(tmp_path / name).stat().st_mode for name in (environment.CACHE_NAME, "game.tw-pddl")]
    assert modes[0] == modes[1]  # whoever may read the game may read what was made of it


# --- bad input ---


def refusal(game_file):
    with pytest.raises(GameError) as caught:
        environment.compile_game(game_file)
    text = str(caught.value)
    assert str(game_file) in text and "alfworld-download" in text and "\n" not in text
    return text


def test_a_missing_broken_or_foreign_file_is_refused_by_name_and_remedy(tmp_path, games):
    game_file = tmp_path / "game.tw-pddl"
    assert "No such file" in refusal(game_file)
    content = games[0].read_bytes()
    for bad in (b"", content[: len(content) // 2], b"\xff\xfe\x00", b"[]", b"7", b'{"pddl_domain": "", "grammar": ""}'):
        game_file.write_bytes(bad)
        assert "broken or cut short" in refusal(game_file)
    game_file.write_text(json.dumps({**json.loads(content), "grammar": None}))
    assert "broken or cut short" in refusal(game_file)


def test_a_game_of_an_older_release_is_refused(tmp_path, games):
    old = rewritten(games[0], tmp_path, grammar=('template :: "move {o} to {r}"', 'template :: "put {o} in/on {r}"'))
    assert "older data release" in refusal(old) and "2.1.3" in refusal(old)


@pytest.mark.parametrize(
    "texts, reason",
    [
        ({"grammar": ("You open the {r.name}", "You open the {r.name.upper()}")}, "expression"),
        ({"grammar": ("You open the {r.name}", "You open the {len(r.name)}")}, "expression"),
        ({"grammar": ("#examineReceptacle.feedback#", "#no.such.rule#")}, "no rule"),
        ({"grammar": ("You open the {r.name}", "You open the {q.name}")}, "names ['q'], which nothing stands for"),
        ({"grammar": ('"intro": [', '"intro": [{"rhs": "#intro#"}], "other": [')}, "'intro' uses itself"),
        ({"grammar": ("Your task is to: ", "Do: ")}, "task rule"),
        ({"grammar": ('"task": [', '"errand": [')}, "0 task rules"),
        ({"grammar": ("| inreceptacle(o:object, r:receptacle)", "| inreceptacle(o:object, r:location)")}, "two types"),
        ({"grammar": ('"go to [', '"#go# [')}, "no rule 'go'"),
        ({"grammar": ('template :: "take {o} from {r}"', 'template :: "take {r}"')}, "two meanings"),
        ({"pddl_domain": ("(:action help", "(:action help (")}, "cannot be compiled"),
        ({"pddl_problem": ("(:goal", "(:gaol")}, "the problem has no :goal"),
        ({"pddl_problem": ("(atLocation agent1", ";(atLocation agent1")}, "goal cannot be reached"),
    ],
)
def test_a_language_that_is_not_known_is_refused_not_guessed(tmp_path, games, texts, reason):
    assert reason in refusal(rewritten(games[0], tmp_path, **texts))


def test_nothing_of_a_game_file_is_evaluated(tmp_path, games):
    trap = tmp_path / "trap"
    expression = f"open('{trap}', 'w')"
    refusal(rewritten(games[0], tmp_path, grammar=("You open the {r.name}", f"You open the {{{expression}}}")))
    assert not trap.exists()
    tree = ast.parse(Path(environment.__file__).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile"}


# --- what is too large to begin ---


def with_goal(game_file, folder, goal):
    """A copy of the game with another goal; `{0}`, `{1}`, ... in it are things of the game."""
    game = json.loads(game_file.read_text())
    problem = game["pddl_problem"]
    things = re.findall(r"(\S+_bar_\S+) - object", problem)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "game.tw-pddl"
    start = problem.index("(:goal")
    copy.write_text(json.dumps(game | {"pddl_problem": f"{problem[:start]}(:goal {goal.format(*things * 100)}))"}))
    return copy


VARIABLES = " ".join(f"?x{number} - object" for number in range(8))
LARGE = {
    "2 ** 40 alternatives": (
        "(and " + " ".join(f"(or (isHot {{{n}}}) (isClean {{{n}}}))" for n in range(40)) + ")",
        "the goal has more than 1,000 literals with its alternatives written out",
    ),
    "2 ** 40 under forall": (
        "(forall (?x - object) (or " + " ".join(["(and (isHot ?x) (isClean ?x))"] * 40) + "))",
        "the goal has more than 1,000 literals with its alternatives written out",
    ),
    "literals": (
        "(and " + " ".join(f"(isHot {{{n}}})" for n in range(1001)) + ")",
        "the goal has more than 1,000 literals",
    ),
    "a product of things": (
        f"(exists ({VARIABLES}) (and " + " ".join(f"(pickupable ?x{number})" for number in range(8)) + "))",
        "grounding meets more than 500,000 atoms",
    ),
    "a product of parts": (
        "(and " + " ".join(["(exists (?x - object) (pickupable ?x))"] * 20) + ")",
        "grounding meets more than 500,000 atoms",
    ),
    "variables": (
        "(exists (" + " ".join(f"?x{n} - object" for n in range(31)) + ") (isHot ?x0))",
        "binds more than 30 variables",
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_goal_too_large_to_ground_is_refused_before_it_costs_time(tmp_path, games, kind):
    goal, reason = LARGE[kind]
    started = time.process_time()
    assert reason in refusal(with_goal(games[0], tmp_path, goal))
    assert time.process_time() - started < 30  # grounding to the bound takes 5 to 10


def test_the_rest_of_a_game_has_bounds_too(tmp_path, games):
    things = " ".join(f"thing{number} - object" for number in range(environment.MOST_OBJECTS))
    assert "more than 5,000 objects" in refusal(rewritten(games[0], tmp_path, pddl_problem=("(:objects", f"(:objects {things}")))
    long = rewritten(games[0], tmp_path, pddl_problem=("(:init", f"(:init {' ' * 1_000_000}"))
    assert "pddl_problem has more than 1,000,000 characters" in refusal(long)
    everywhere = "(forall (?x - object ?y - object) (when (isHot ?x) (isClean ?y)))"
    effects = rewritten(games[0], tmp_path, pddl_domain=("(checked ?l)", f"(checked ?l) {everywhere}"))
    assert "more than 10,000,000 pairs of effects" in refusal(effects)
    either = " ".join(["(or (isHot ?o) (isClean ?o))"] * 12)
    condition = rewritten(games[0], tmp_path, pddl_domain=("(cleanable ?o)\n            (or", f"(cleanable ?o) {either} (or"))
    assert "a condition of the domain has more than 1,000 literals" in refusal(condition)
    query = f"wide({', '.join(f'a{number}:object' for number in range(9))})"
    wide = rewritten(games[0], tmp_path, grammar=('"intro": [', f'"intro": [{{"condition": "{query}", "rhs": "x"}}, '))
    assert "more than 10,000 subtypes" in refusal(wide)


def test_large_goals_below_the_bounds_are_played(tmp_path, games):
    goal = "(or " + " ".join(f"(holds agent1 {{{n}}})" for n in range(900)) + ")"
    assert World(environment.compile_game(with_goal(games[0], tmp_path, goal))).start()


# --- words ---


@pytest.mark.parametrize(
    "texts, reason",
    [
        ({"pddl_problem": ("(:goal", "(:aim")}, "the problem has no :goal"),
        ({"pddl_problem": ("(:init", "(:facts")}, "the problem has no :init"),
        ({"pddl_problem": ("(:domain alfred)", "")}, "the problem has no :domain"),
        ({"pddl_domain": ("(:action look", "(:action stay)\n(:action look")}, "a part of the PDDL is missing"),
    ],
)
def test_a_part_that_is_missing_is_named(tmp_path, games, texts, reason):
    assert reason in refusal(rewritten(games[0], tmp_path, **texts))


def test_what_a_message_echoes_of_a_file_cannot_write_to_the_terminal(tmp_path, games):
    folder = tmp_path / "a\x1b[31mb\u202ec\nd"
    folder.mkdir()
    odd = 'You open the {r.name.title("\x1b]0;x\x07\u202e")}'
    game_file = rewritten(games[0], folder, grammar=("You open the {r.name}", odd))
    with pytest.raises(GameError) as caught:
        environment.compile_game(game_file)
    assert str(caught.value).isprintable() and r"a\x1b[31mb\u202ec\nd" in str(caught.value)
    (folder / "game.tw-pddl").write_text("{")
    with pytest.raises(GameError) as caught:
        environment.compile_game(game_file)
    assert str(caught.value).isprintable()
    files = (game_file, folder / "other", folder / "\u200b")
    [line] = data.told_by_kind({file: f"{data.shown(file)}: an older data release (no); get another" for file in files})
    assert line.isprintable() and line.startswith("3 games, such as ")


# --- the command ---


def compile_all(*arguments, **environ):
    command = [sys.executable, str(ROOT / "environment.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environ)


def test_the_command_compiles_and_its_exit_status_tells_of_refused_games(tmp_path, games):
    rewritten(games[0], tmp_path / "good")
    done = compile_all("--data-root", tmp_path, "--compilers", 1)
    assert done.returncode == 0 and done.stdout.startswith("1 games ready, 0 refused\n") and done.stderr == ""
    for number in range(5):
        rewritten(games[0], tmp_path / f"old{number}", grammar=('template :: "move {o} to', 'template :: "put {o} in/on'))
    out_of_reach(games[1], tmp_path / "unreachable")
    done = compile_all("--data-root", tmp_path, "--compilers", 1)
    assert done.returncode == 1 and done.stdout.startswith("1 games ready, 6 refused\n")
    old, unreachable = done.stderr.splitlines()
    assert old.startswith("environment.py: refused: 5 games, such as ") and "an older data release" in old
    assert [f"old{number}/game.tw-pddl" in old for number in range(5)] == [True] * 3 + [False] * 2
    assert old.endswith("and 2 more") and "alfworld-download" in old
    assert "unreachable" in unreachable and "the goal cannot be reached" in unreachable


def test_the_command_says_where_games_are_if_not_where_it_looked(tmp_path):
    (tmp_path / "home" / ".cache" / "alfworld" / "json_2.1.1").mkdir(parents=True)
    done = compile_all("--data-root", tmp_path / "nowhere", HOME=str(tmp_path / "home"), ALFWORLD_DATA="")
    assert done.returncode == 1 and f"use --data-root {tmp_path}/home/.cache/alfworld" in done.stderr
