"""The engine's processes: what they are told at their start, and that none outlives the run; its folder; its end tokens."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, processes_of

import rollout
from data import SettingsError
from protocol import load_chat_tokens
from rollout import RolloutError, RolloutSettings, Sampler, play_group

# --- without the engine: processes that stand where vLLM's do --------------------------------------------------------

# Two generations of spawned processes, as EngineCore and its worker; each says which signals it does not hear.
RUN = """
import multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import rollout

def wait(generation):
    if generation == 1:
        multiprocessing.get_context("spawn").Process(target=wait, args=(2,)).start()
    Path("blocked-%d.partial" % generation).write_text(str(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    os.rename("blocked-%d.partial" % generation, "blocked-%d" % generation)
    time.sleep(100)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    folder = rollout._engine_folder()
    guard = subprocess.Popen([sys.executable, rollout.__file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    rollout._start_in(folder, multiprocessing.get_context("spawn").Process(target=wait, args=(1,)).start)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    Path("folder.partial").write_text(str(folder))
    os.rename("folder.partial", "folder")
    time.sleep(100)
"""


def seconds_until(happened, limit=30.0):
    started = time.monotonic()
    while not happened():
        assert time.monotonic() < started + limit
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.parametrize("ending", ["kill -9", "Ctrl-C"])
def test_no_engine_process_and_no_folder_outlives_a_run_however_it_ends(ending, tmp_path):
    (tmp_path / "run.py").write_text(RUN.format(root=str(ROOT)))
    run = subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, start_new_session=True,
                           env=os.environ | {"STARTED_BY_TEST": str(tmp_path)})  # fmt: skip
    seconds_until(lambda: all((tmp_path / name).exists() for name in ("folder", "blocked-1", "blocked-2")))
    folder = Path((tmp_path / "folder").read_text())
    assert folder.exists() and len(processes_of(tmp_path)) == 5  # the run, two of its engine, the guard, Python's tracker
    assert all("SIGINT" in (tmp_path / f"blocked-{generation}").read_text() for generation in (1, 2))
    if ending == "Ctrl-C":
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    else:
        run.kill()
    assert run.wait() in (130, -signal.SIGKILL)
    seconds_until(lambda: not processes_of(tmp_path), limit=15)
    assert not folder.exists()


def test_a_folder_for_sockets_is_found_beside_a_long_tmpdir_and_none_is_said_in_words(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = rollout._engine_folder()
    folder.rmdir()
    assert not folder.is_relative_to(long) and len(str(folder)) + 1 + 36 <= 107
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    folder = rollout._engine_folder()
    folder.rmdir()
    assert folder.parent == Path("/var/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(tempfile, "mkdtemp", refuse_to_write)
    with pytest.raises(SettingsError, match=f"TMPDIR is '{long}', .* at most 54 bytes"):
        rollout._engine_folder()


def refuse_to_write(**where):
    raise PermissionError(where)


# --- the engine itself ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_that_ends_otherwise(tmp_path_factory):
    """The demo model, which ends its turns with <|endoftext|>: only config.json says so."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "ends-otherwise"
    shutil.copytree(ROOT / "datasets/demo/model", folder, ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((folder / "config.json").read_text())
    usual, other = config["eos_token_id"], config["pad_token_id"]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": other}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][[usual, other]] = weights["lm_head.weight"][[other, usual]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), usual, other


def test_an_end_token_that_stands_in_the_config_alone_is_known_to_engine_and_parser(
    run, pool, starter_games, model_that_ends_otherwise, tmp_path, monkeypatch
):
    """With a TMPDIR that is too long for the engine's sockets."""
    model, usual, other = model_that_ends_otherwise
    (tmp_path / ("x" * 60)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    settings = RolloutSettings(base_model=model, max_episode_steps=3, max_trajectory_tokens=6_000, max_assistant_tokens=40,
                               engine_cache_gb=0.5)  # fmt: skip
    chat = load_chat_tokens(model)
    assert chat.stop_token_ids == [usual, other]
    sampler = run(Sampler.start(settings, chat.stop_token_ids))
    try:
        trajectories = run(play_group(sampler, chat, pool, starter_games[0], 4, 0, settings))
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        assert {turn.finish_reason for turn in turns} == {"stop"} and not any(turn.status == "malformed" for turn in turns)
        assert all(trajectory.tokens[turn.end - 1] == other for trajectory in trajectories for turn in trajectory.turns)
        sampler._stop_token_ids = [usual]
        with pytest.raises(RolloutError, match=f"ended a turn at token {other}; .* are \\[{usual}\\]"):
            run(play_group(sampler, chat, pool, starter_games[0], 1, 0, settings))
    finally:
        sampler.close()
    assert not sampler._guard.returncode and not list(Path(tempfile.tempdir).iterdir())
