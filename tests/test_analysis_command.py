"""analysis.py as a command: what its surroundings may be, and what it writes to a terminal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_analysis import write

import analysis

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = "module://matplotlib_inline.backend_inline"


def start(*arguments: object, **surroundings: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, ROOT / "analysis.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | surroundings,
    )


@pytest.mark.parametrize("more", [(), ("--show",)])
def test_the_backend_of_a_notebook_that_is_not_installed_does_no_harm(tmp_path, more):
    base = write(tmp_path / "base.jsonl", 0)
    command = start(base, "--output", tmp_path / "images", "--dpi", 20, *more, MPLBACKEND=NOTEBOOK)
    output, errors = command.communicate()
    assert command.returncode == 0, errors
    assert b"Saved figure" in output and (tmp_path / "images" / "checkpoints.png").is_file()


def test_windows_open_with_the_backend_that_the_surroundings_name():
    code = "import analysis, matplotlib; analysis.analyse = lambda settings: print(matplotlib.get_backend()); "
    for more, backend in (("['--show']", b"svg"), ("[]", b"agg")):
        found = subprocess.check_output(
            [sys.executable, "-c", f"{code}analysis.main({more})"], cwd=ROOT, env=os.environ | {"MPLBACKEND": "svg"}
        )
        assert found.strip().lower() == backend


def test_a_reader_that_leaves_ends_it_quietly(tmp_path):
    base = write(tmp_path / "base.jsonl", 0)
    command = start(base, "--output", tmp_path / "images", "--dpi", 20, PYTHONUNBUFFERED="1")
    command.stdout.close()
    errors = command.stderr.read()
    assert (command.wait(), errors) == (-signal.SIGPIPE, b"")


def test_what_a_file_says_cannot_write_to_the_terminal_on_its_own(tmp_path, capsys):
    hostile = "\x1b[2J\u202e\x07\udce9"
    rows = [
        {
            "split": "valid_seen",
            "game_id": hostile,
            "task_type": "look_at_obj_in_light",
            "won": True,
            "reward": 1,
            "steps": 1,
            "invalid_actions": 0,
        }
    ] * 2
    path = tmp_path / f"again{hostile}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(analysis.AnalysisError, match="again .first on line 1") as error:
        analysis.read_evaluation(path)
    assert str(error.value).isprintable() and str(error.value).count("\\u202e") == 2
    good = write(tmp_path / "good.jsonl", 0)
    analysis.main([str(path), str(good), "--output", str(tmp_path / hostile), "--dpi", "20"])
    said = capsys.readouterr()
    assert said.err.startswith("left out: ") and (said.out + said.err).replace("\n", "").isprintable()
