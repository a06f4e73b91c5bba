"""analysis.py as a command: what its surroundings may be, and what it writes to a terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_analysis import write

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = "module://matplotlib_inline.backend_inline"


def start(*arguments: object, **surroundings: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, ROOT / "analysis.py", *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | surroundings)


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
        found = subprocess.check_output([sys.executable, "-c", f"{code}analysis.main({more})"], cwd=ROOT,
                                        env=os.environ | {"MPLBACKEND": "svg"})
        assert found.strip().lower() == backend
