"""A game played by hand: a scripted person, the real compiled world, and the file that is left for the replay page."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import analysis
import environment
from data import find_games
from protocol import first_messages, parse_tool_call, tool_result

ROOT = Path(__file__).resolve().parent.parent
STARTER = ROOT / "datasets" / "starter"


@pytest.fixture(scope="module")
def game():
    return next(
        game for game in find_games(STARTER, "valid_unseen") if game.task_type == "pick_heat_then_place_in_recep"
    )


@pytest.fixture(scope="module")
def solution(game):
    return json.loads(game.path.read_text())["walkthrough"]


def play(output: Path, name: str, *answers: object) -> tuple[str, dict]:
    """What the terminal showed, and the last record of the file."""
    command = [sys.executable, ROOT / "environment.py", "--play", name, "--data-root", STARTER, "--output", output]
    done = subprocess.run(
        command, input="".join(f"{answer}\n" for answer in answers), capture_output=True, text=True, check=True
    )
    return done.stdout, json.loads(output.read_text().splitlines()[-1])


def test_a_game_is_won_by_its_solution_and_leaves_what_a_rollout_would(tmp_path, game, solution):
    shown, record = play(tmp_path / "new" / "a.jsonl", game.game_id, *solution)
    assert "You won." in shown and shown.count("\n> ") == len(solution)
    assert [record[name] for name in ("split", "game_id", "task_type", "won", "reward", "steps", "stop_reason")] == [
        game.split,
        game.game_id,
        game.task_type,
        True,
        1.0,
        len(solution),
        "won",
    ]
    assert [turn["action"] for turn in record["turns"]] == solution
    assert [turn["status"] for turn in record["turns"]] == ["executed"] * (len(solution) - 1) + ["won"]
    world = environment.World(environment.compile_game(game.path))
    state, reply = world.start()
    messages = first_messages(world.task, reply[0], reply[1])
    assert record["messages"][:2] == messages
    for turn, (said, told) in zip(
        record["turns"], zip(record["messages"][2::2], record["messages"][3::2]), strict=True
    ):
        state, reply = world.step(state, reply, turn["action"])
        assert (turn["observation"], turn["admissible"]) == (reply[0], list(reply[1]))
        assert parse_tool_call(said["content"]).action == turn["action"]
        assert told["content"] == tool_result(turn["step"], 50, turn["status"], reply[0], reply[1])
    [read], faults = analysis.read_replay(tmp_path / "new" / "a.jsonl")
    assert not faults and read["why"] is None


def test_numbers_are_the_actions_of_the_list_and_undo_goes_back(tmp_path, game, solution):
    shown, _ = play(tmp_path / "a", game.game_id)
    numbers = {line[5:]: int(line[:4]) for line in shown.splitlines() if line[:4].strip().isdigit()}
    _, straight = play(tmp_path / "a", game.game_id, *solution)
    detour = [
        "undo",
        numbers[solution[0]],
        "look",
        "undo",
        "undo",
        "nonsense",
        "UNDO",
        f"  {solution[0].upper()} ",
        "0",
        "undo",
    ]
    shown, record = play(tmp_path / "a", game.game_id, *detour, *solution[1:])
    assert record == straight
    assert shown.count("Nothing happens.") == 2 and shown.count("Task: ") == 4  # at the start, and after undo to it
    assert len((tmp_path / "a").read_text().splitlines()) == 3


def test_the_solution_is_shown_step_by_step(tmp_path, game, solution):
    answers = ["walkthrough", "look", "walkthrough", solution[0], "walkthrough", "undo", "walkthrough", "quit"]
    shown, record = play(tmp_path / "a", game.game_id, *answers)
    steps = [line for line in shown.splitlines() if line.startswith("Step ")]
    assert steps == [f"Step {n} of {len(solution)}: {solution[n - 1]}" for n in (1, 1, 2, 1)]
    assert (record["stop_reason"], record["steps"], record["won"]) == ("quit", 1, False)


def test_invalid_actions_and_the_limit_of_steps_count_as_for_the_model(tmp_path, game):
    shown, record = play(tmp_path / "a", game.path, *["fly", "look"] * 30)
    assert "Not won." in shown
    assert (record["steps"], record["invalid_actions"], record["reward"], record["stop_reason"]) == (
        50,
        25,
        -2.5,
        "max_steps",
    )
    assert [turn["status"] for turn in record["turns"][:2]] == ["not admissible", "executed"] and record["truncated"]


def test_random_is_any_game_and_what_is_no_game_is_one_line(tmp_path):
    _, record = play(tmp_path / "a", "random")
    assert record["steps"] == 0 and record["task"]
    (tmp_path / "broken").write_text("{")
    for name, fault in (("gone/trial", "no game 'gone/trial' below"), (str(tmp_path / "broken"), "broken")):
        command = [sys.executable, ROOT / "environment.py", "--play", name, "--data-root", STARTER]
        done = subprocess.run(command, input="", capture_output=True, text=True, cwd=tmp_path)
        assert (
            done.returncode == 1
            and fault in done.stderr
            and done.stderr.count("\n") == 1
            and not (tmp_path / "runs").exists()
        )


def test_actions_are_completed_on_a_terminal_and_texts_cannot_write_to_it(tmp_path, game, solution):
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        ROOT / "environment.py",
        "--play",
        game.game_id,
        "--data-root",
        STARTER,
        "--output",
        tmp_path / "a",
    ]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"\n> " not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"inv\t\nwalkt\t\nqui\t\n")
        while process.poll() is None:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    record = json.loads((tmp_path / "a").read_text())
    assert [turn["action"] for turn in record["turns"]] == [
        "inventory"
    ] and f"Step 1 of {len(solution)}".encode() in shown
