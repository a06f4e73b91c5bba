"""Compiling a game: its cache, what is refused and with which words, and the bounds on what is begun at all."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from game_copies import ROOT, compiled_games, rewritten

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
    task = environment._split_task(json.loads(game_file.read_text())["grammar"])[1]
    rewritten(game_file, tmp_path, grammar=(task, environment.TASK_PREFIX + "do something else."))
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
