"""What the commands write on a terminal, whatever the terminal can show."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

# run_with_settings is the command line of train.py and eval.py
SETTINGS = """
import argparse, sys
sys.path.insert(0, {root!r})
from data import run_with_settings
from rollout import RolloutSettings

async def say(settings):
    print(settings.base_model)

run_with_settings(argparse.ArgumentParser(), {{"recipe": {{}}}}, say, RolloutSettings)
"""


@pytest.mark.parametrize("command", ["train.py and eval.py", "environment.py", "analysis.py"])
def test_a_folder_whose_name_the_terminal_cannot_show_is_escaped_and_no_error(command, tmp_path):
    folder = tmp_path / "Spiele-für-später"
    folder.mkdir()
    if command == "environment.py":
        (folder / "game.tw-pddl").write_text("no game")
        arguments = [ROOT / "environment.py", "--data-root", folder, "--compilers", "1"]
    elif command == "analysis.py":
        arguments = [ROOT / "analysis.py", "--result-dir", ROOT / "eval_results" / "official", "--output", folder, "--dpi", "20"]
    else:
        arguments = ["-c", SETTINGS.format(root=str(ROOT)), "--base-model", folder]
    ended = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path,
                           env=os.environ | {"PYTHONIOENCODING": "ascii"})  # fmt: skip
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said and "Spiele-f\\xfcr-sp\\xe4ter" in said, said
