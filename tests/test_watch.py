"""analysis.py --watch: what it says of a run that goes on, ends, falls silent or is resumed."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import analysis

ROOT = Path(__file__).resolve().parent.parent
NOW = time.time()


def line(update: int, **more) -> str:
    return json.dumps({"update": update, "reward/success": 0.25, "reward/mean": -0.5, "rollout/invalid_actions": 3.5,
                       "train/entropy": 0.75, "mismatch/k3": 2e-9, "time/update": 20.0} | more) + "\n"  # fmt: skip


def make_run(folder: Path, planned: object = 3, lines: str = "") -> Path:
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"max_steps": planned}))
    if lines:
        (folder / "metrics.jsonl").write_text(lines)
    return folder


def age(run: Path, seconds: float) -> None:
    os.utime(run / "metrics.jsonl", (NOW - seconds,) * 2)


@pytest.mark.parametrize(
    ("done", "planned", "silent", "seconds", "state"),
    [
        (3, 3, 0, [20.0], "ended"),
        (3, 3, 1e6, [], "ended"),
        (2, 3, 99, [20.0], "running"),
        (2, 3, 101, [20.0], "silent"),  # five updates
        (2, 3, 59, [1.0], "running"),
        (2, 3, 61, [1.0], "silent"),  # a minute
        (2, 3, 61, [math.nan], "silent"),
        (2, 3, 900, [200.0, 200.0, 20.0], "running"),
        (4, 3, 50, [20.0], "running"),  # resumed for more
        (4, 3, 200, [20.0], "silent"),
    ],
)
def test_a_run_has_ended_or_fallen_silent_by_its_plan_and_its_own_pace(done, planned, silent, seconds, state):
    assert analysis.state_of_run(done, planned, silent, seconds) == state


class Clock:
    """Stands in for the time module: every look at the run after the first is preceded by the next step of a story."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def time(self) -> float:
        return NOW

    def sleep(self, seconds: float) -> None:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


def watch(monkeypatch, capsys, run: Path, *steps) -> list[str]:
    monkeypatch.setattr(analysis, "time", Clock(*steps))
    try:
        analysis.main(["--watch", str(run), "--output", str(run / "images"), "--dpi", "20"])
    except SystemExit as ended:
        assert ended.code == 130  # Ctrl-C
    output = capsys.readouterr()
    assert not output.err
    return output.out.replace(str(run), "RUN").splitlines()


def test_updates_are_printed_as_they_come_until_the_run_has_ended(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "one")
    log, picture, pictures = run / "metrics.jsonl", run / "images" / "training.png", []

    def write(text: str):
        def step():
            pictures.append(picture.read_bytes() if picture.exists() else None)
            with log.open("a") as file:
                file.write(text)

        return step

    said = watch(
        monkeypatch,
        capsys,
        run,
        write(""),
        write(line(1)),
        write(line(2)[:30]),
        write(line(2)[30:]),
        write(""),
        write(line(3, **{"train/entropy": None, "reward/success": 0.5})),
    )
    values = "reward -0.500  invalid 3.50"
    assert said == [
        "RUN: no update yet",
        f"update 1/3  success 0.250  {values}  entropy 0.75  mismatch 2.0e-09  seconds 20.0",
        f"update 2/3  success 0.250  {values}  entropy 0.75  mismatch 2.0e-09  seconds 20.0",
        f"update 3/3  success 0.500  {values}  mismatch 2.0e-09  seconds 20.0",
        "RUN: ended, all 3 updates are done",
    ]
    assert (
        pictures[:2] == [None, None]
        and pictures[2] == pictures[3] != pictures[4] == pictures[5] != picture.read_bytes()
    )


def test_a_run_that_stopped_writing_is_told_of_once_and_watched_on(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "one", 9, line(1) + line(2))
    age(run, 600)
    said = watch(
        monkeypatch,
        capsys,
        run,
        lambda: None,
        lambda: None,
        lambda: (run / "metrics.jsonl").write_text(line(1) + line(2) + line(3)),
        lambda: age(run, 6000),
    )
    assert [text.split("  ")[0] for text in said] == [
        "update 1/9",
        "update 2/9",
        "RUN: nothing was written for 10 minutes, it may have stopped; to go on: uv run python train.py --resume RUN",
        "update 3/9",
        "RUN: nothing was written for 100 minutes, it may have stopped; to go on: uv run python train.py --resume RUN",
    ]


def test_a_run_that_was_set_back_is_followed_from_there_and_a_longer_one_has_no_end(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "one", 4, line(1) + line(2) + line(3))
    log = run / "metrics.jsonl"
    said = watch(
        monkeypatch,
        capsys,
        run,
        lambda: log.write_text(line(1)),
        lambda: log.write_text(line(1) + line(2)),
        lambda: log.write_text("".join(map(line, range(1, 20)))),
    )
    assert [text.split("  ")[0] for text in said] == [
        "update 1/4",
        "update 2/4",
        "update 3/4",
        "update 2/4",
        *[f"update {n}/{n}" for n in range(15, 20)],
    ]


def test_what_is_no_run_or_no_log_is_one_line(tmp_path):
    damaged = make_run(tmp_path / "damaged", 3, "{}\n")
    (tmp_path / "empty").mkdir()
    for arguments, fault in (
        ([tmp_path / "empty"], "no settings.json to read"),
        ([make_run(tmp_path / "no_count", "x")], 'max_steps is "x"'),
        ([damaged], "metrics.jsonl:1: no update"),
        ([damaged, "--show"], "go alone"),
        ([damaged, "--replay", damaged], "go alone"),
    ):
        with pytest.raises(SystemExit, match=fault) as error:
            analysis.main(["--watch", *map(str, arguments)])
        assert "\n" not in str(error.value)


def test_ctrl_c_ends_it_quietly(tmp_path):
    run = make_run(tmp_path / "one", 3, line(1))
    command = subprocess.Popen(
        [sys.executable, ROOT / "analysis.py", "--watch", run, "--output", tmp_path / "images"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout.readline().startswith(b"update 1/3  success")
    time.sleep(1)
    command.send_signal(signal.SIGINT)
    output, errors = command.communicate(timeout=60)
    assert (command.returncode, output, errors) == (130, b"", b"")
