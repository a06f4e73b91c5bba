"""Evaluations that are cut off: what is kept, what is refused, and that the rest leads to the file of an unbroken one."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT, STARTER

import eval as evaluation
from data import TASK_TYPES, SettingsError
from environment import EnvironmentSettings
from rollout import RolloutSettings, TokenCounts

GAMES = [("valid_seen", f"task/{number}") for number in range(4)] + [("valid_unseen", "task/0")]
HEADER = {
    "type": "header", "run_name": "base", "base_model": "org/model", "model_path": None, "weights": None,
    "weight_sync": None, "split": "all", "temperature": 0.01, "seed": 42, "dtype": "float32",
    "games": {f"{split}/{game_id}": f"{number:016x}" for number, (split, game_id) in enumerate(GAMES)},
}  # fmt: skip


def record(number, **changes):
    """A finished game, less what only people read."""
    split, game_id = GAMES[number]
    counted = {"tokens": asdict(TokenCounts(100 * (number + 1), 10, 5, 0)), "env_faults": number}
    return {
        "type": "trajectory", "split": split, "game_id": game_id, "branch": 0, "task_type": TASK_TYPES[number], "won": number == 1,
        "reward": -0.1 * number, "steps": 7, "valid_tool_calls": 7, "admissible_actions": 6, "invalid_actions": 1,
        "truncated": False, "text": "caf\u00e9 \U0001f30d \ud800", "update": 0, "so_far": counted,
    } | changes  # fmt: skip


def lines_of(*records):
    return b"".join(map(evaluation.make_line, (HEADER, *records)))


@pytest.fixture
def partial(tmp_path):
    """The working file of `tmp_path/out.jsonl` with two of five games."""
    path = tmp_path / "out.jsonl.partial"
    path.write_bytes(lines_of(record(0), record(3)))
    return path


def opened(partial, resume=True, overwrite=False, header=HEADER):
    return evaluation.open_working_file(partial.with_name("out.jsonl"), header, resume, overwrite)


def refused(partial, **how):
    """The error of opening a working file; nothing in its folder may have changed."""
    before = {path.name: path.read_bytes() for path in partial.parent.iterdir()}
    with pytest.raises(SettingsError) as error, opened(partial, **how):
        pytest.fail("not refused")
    assert {path.name: path.read_bytes() for path in partial.parent.iterdir()} == before
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_finished_games_are_taken_over_and_the_file_goes_on(partial):
    before = partial.read_bytes()
    with opened(partial) as working:
        assert working.records == [record(0), record(3)] and working.so_far == record(3)["so_far"]
        working.write(record(1))
        assert partial.read_bytes() == before + evaluation.make_line(record(1))
    with opened(partial) as working:
        assert working.records == [record(0), record(3), record(1)]


@pytest.mark.parametrize("cut", [1, 2, 10, 200, -1])
def test_a_last_line_cut_short_is_dropped(partial, cut):
    whole, last = lines_of(record(0)), evaluation.make_line(record(3))
    partial.write_bytes(whole + (last[:-1] if cut == -1 else last[:cut]))
    with opened(partial) as working:
        assert working.records == [record(0)]
        working.write(record(3))
    assert partial.read_bytes() == whole + last


@pytest.mark.parametrize("content", [b"", b'{"type": "header", "run_na', lines_of()])
@pytest.mark.parametrize("resume", [False, True])
def test_a_file_without_a_finished_game_is_begun_anew(partial, content, resume):
    partial.write_bytes(content)
    with opened(partial, resume=resume, header=HEADER | {"temperature": 1.0}) as working:
        assert working.records == [] and working.so_far == {"tokens": asdict(TokenCounts()), "env_faults": 0}
        assert partial.read_bytes() == evaluation.make_line(HEADER | {"temperature": 1.0})
    assert not partial.exists()  # still no game


def test_without_a_file_every_game_is_played_and_that_is_said(tmp_path, capsys):
    with opened(tmp_path / "out.jsonl.partial") as working:
        assert working.records == []
    assert "Nothing to resume" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_overwriting_starts_over(partial):
    with opened(partial, resume=False, overwrite=True) as working:
        assert working.records == []
        assert partial.read_bytes() == lines_of()


def test_an_interruption_says_how_to_go_on(partial, capsys):
    with pytest.raises(KeyboardInterrupt), opened(partial):
        raise KeyboardInterrupt
    assert f"{partial} holds 2 finished games: go on with --resume-output" in capsys.readouterr().err
    assert partial.exists()


def test_a_full_disk_costs_the_line_and_nothing_else(partial):
    before, limits = partial.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(partial) as working:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        try:
            with pytest.raises(SettingsError, match="cannot write .*out.jsonl.partial: .*--resume-output"):
                working.write(record(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert partial.read_bytes() == before and len(working.records) == 2
        working.write(record(1))
    assert partial.read_bytes() == before + evaluation.make_line(record(1))


# --- what is refused ------------------------------------------------------------------------------------------------


def test_games_are_not_overwritten_unless_asked(partial):
    error = refused(partial, resume=False)
    assert "holds 2 games" in error and "--resume-output" in error and "--overwrite-output" in error


def test_a_complete_output_is_left_alone(partial):
    output = partial.with_name("out.jsonl")
    output.write_text("precious\n")
    assert "complete already" in refused(partial) and "add --overwrite-output" in refused(partial)
    assert "give --overwrite-output" in refused(partial, resume=False)
    with opened(partial, overwrite=True) as working:  # a second evaluation, to replace the first, goes on
        assert len(working.records) == 2
    partial.unlink()
    assert "complete already" in refused(partial) and "complete already" in refused(partial, overwrite=True)
    assert output.read_text() == "precious\n"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 1.0}, "--temperature was 0.01, now 1.0"),
        ({"seed": 7}, "--seed was 42, now 7"),
        ({"dtype": "bfloat16"}, "--dtype was 'float32', now 'bfloat16'"),
        ({"base_model": "org/other"}, "--base-model was 'org/model', now 'org/other'"),
        ({"model_path": "runs/x"}, "--model-path was None, now 'runs/x'"),
        ({"weights": "ab"}, "the weights in --model-path were others"),
        ({"run_name": "mine"}, "--run-name was 'base', now 'mine'"),
        ({"split": "valid_seen"}, "--split was 'all', now 'valid_seen'"),
        ({"weight_sync": "adapter"}, "--weight-sync was None, now 'adapter'"),
        ({"games": HEADER["games"] | {"valid_seen/task/0": "0"}}, "the games were others"),
        ({"games": {"valid_seen/task/0": HEADER["games"]["valid_seen/task/0"]}}, "--limit-per-split"),
    ],
)
def test_another_evaluation_is_refused_by_name(partial, changes, named):
    error = refused(partial, header=HEADER | changes)
    assert error.startswith(f"{partial} was begun otherwise: ") and named in error and "--overwrite-output" in error


def test_every_difference_is_named_at_once(partial):
    error = refused(partial, header=HEADER | {"temperature": 1.0, "seed": 7})
    assert "--temperature was 0.01" in error and "--seed was 42" in error


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        (1, lambda line: b"precious notes\n"),
        (1, lambda line: evaluation.make_line(record(1))),
        (2, lambda line: line.replace(b"caf", b"Caf")),
        (2, lambda line: line.replace(b'"steps": 7', b'"steps": 9')),
        (2, lambda line: line[:100] + b"\n" + line[100:]),
        (2, lambda line: b"\0" * 50 + b"\n"),
        (2, lambda line: b"\n"),
        (2, lambda line: b"\xff\n"),
        (2, lambda line: b"[" * 100_000 + b"\n"),
        (2, lambda line: evaluation.make_line(HEADER)),
        (2, lambda line: evaluation.make_line(record(3))),
        (2, lambda line: evaluation.make_line(record(0, game_id="task/9"))),
        (2, lambda line: evaluation.make_line(record(0, won="yes"))),
        (2, lambda line: evaluation.make_line(record(0, so_far=None))),
        (2, lambda line: evaluation.make_line(record(0, so_far={"tokens": {}, "env_faults": 0}))),
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_lost(partial, number, damage):
    lines = partial.read_bytes().splitlines(keepends=True)
    lines[number - 1] = damage(lines[number - 1])
    partial.write_bytes(b"".join(lines))
    error = refused(partial)
    where = re.match(rf"{partial}:(\d): the line is damaged", error)
    assert where and int(where[1]) - number in (0, 1)  # of two lines with one game the second is named
    assert ("remove this line" if int(where[1]) > 1 else "--overwrite-output") in error


def test_removing_the_damaged_line_is_the_remedy_it_says(partial):
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(lines[0] + lines[2])
    with opened(partial) as working:
        assert working.records == [record(3)]


def test_a_second_evaluation_of_one_output_is_refused(partial):
    script = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+b'); fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True); input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, partial], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        for how in ({}, {"resume": False}, {"resume": False, "overwrite": True}):
            assert "another evaluation is writing" in refused(partial, **how)
        other.kill()
    with opened(partial) as working:
        assert "another evaluation is writing" in refused(partial)
        assert len(working.records) == 2


@pytest.mark.parametrize("kind", ["folder", "link", "loop", "pipe", "device"])
def test_what_is_no_regular_file_is_refused(tmp_path, kind):
    path, target = tmp_path / "out.jsonl.partial", tmp_path / "target"
    target.write_text("precious\n")
    {
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(target),
        "loop": lambda: path.symlink_to(path),
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    for how in ({}, {"resume": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(SettingsError, match="choose another --output"), opened(path, **how):
            pytest.fail("not refused")
    assert target.read_text() == "precious\n"
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(SettingsError, match="is a folder"), opened(path, overwrite=True):
        pytest.fail("not refused")


# --- the adapter and the name ---------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "sampler"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "org/model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def describe(folder, **settings):
    return evaluation.describe_model(evaluation.EvalSettings(model_path=str(folder), **settings), "org/model")


def test_an_adapter_is_read_once_and_known_by_its_content(adapter):
    (adapter / "training.json").write_text('{"update": 7, "run": "mine"}')
    first = describe(adapter)
    assert (first.name, first.update, first.rank, first.model_path) == ("mine-update-0007", 7, 8, str(adapter))
    (adapter / "adapter_model.safetensors").write_bytes(b"Weights")
    assert replace(describe(adapter), sha256=first.sha256) == first != describe(adapter)
    (adapter / "training.json").unlink()
    assert (describe(adapter).name, describe(adapter).update) == ("sampler", None)
    assert describe(adapter, run_name="other").name == "other"


@pytest.mark.parametrize("about", ["", "[]", '{"update": 1}', '{"update": true, "run": "x"}', '{"update": 1e999, "run": "x"}',
                                   '{"update": -1, "run": "x"}', '{"update": 1, "run": ["x"]}', "[" * 100_000])  # fmt: skip
def test_a_damaged_note_beside_the_adapter_is_named(adapter, about):
    (adapter / "training.json").write_text(about)
    with pytest.raises(SettingsError, match=r"training\.json is damaged .*take another checkpoint"):
        describe(adapter)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "..", "a/b", "a\nb"])
def test_no_name_leads_out_of_the_results_folder(adapter, name):
    with pytest.raises(SettingsError, match="--run-name"):
        evaluation.describe_model(evaluation.EvalSettings(run_name=name), "org/model")
    if name != "..":  # as the name of a run it has more after it
        (adapter / "training.json").write_text(json.dumps({"update": 7, "run": name}))
        with pytest.raises(SettingsError, match="--run-name"):
            describe(adapter)


# --- a whole evaluation ----------------------------------------------------------------------------------------------


def flags(model, *more):
    return ["--base-model", model, "--data-root", str(STARTER), "--limit-per-split", "6", "--max-episode-steps", "20",
            "--max-trajectory-tokens", "6000", "--max-assistant-tokens", "24", "--games-per-batch", "2", *more]  # fmt: skip


def start(cwd, *arguments):
    command = [sys.executable, ROOT / "eval.py", *arguments]
    environment = os.environ | {"STARTED_BY_TEST": str(cwd), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-4000:]
    return output


def end_what_is_left(cwd):
    """Processes of a killed command that do not end with it."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"STARTED_BY_TEST={cwd}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                os.kill(int(process), signal.SIGKILL)


def finished_games(partial):
    return max(0, partial.read_bytes().count(b"\n") - 1) if partial.exists() else 0


@pytest.mark.slow  # four engines are started: minutes
def test_an_evaluation_killed_twice_ends_in_the_file_of_an_unbroken_one(warm_model, tmp_path):
    finish(start(tmp_path, *flags(warm_model, "--output", "unbroken.jsonl")))
    partial = tmp_path / "broken.jsonl.partial"
    for part, games in enumerate((3, 7)):
        process = start(tmp_path, *flags(warm_model, "--output", "broken.jsonl"), *["--resume-output"] * part)
        while finished_games(partial) < games:
            assert process.poll() is None, process.communicate()[0][-4000:]
            time.sleep(0.005)
        process.kill()
        process.communicate()
        end_what_is_left(tmp_path)
    done = finished_games(partial)
    assert 7 <= done < 12
    refusal = start(tmp_path, *flags(warm_model, "--output", "broken.jsonl", "--resume-output", "--seed", "7"))
    assert "broken.jsonl.partial was begun otherwise: --seed was 42, now 7" in refusal.communicate()[0] and refusal.returncode
    output = finish(start(tmp_path, *flags(warm_model, "--output", "broken.jsonl", "--resume-output")))
    assert f"{done} of 12 games are finished" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "unbroken.jsonl"]
    *games, summary = (tmp_path / "unbroken.jsonl").read_bytes().splitlines(keepends=True)
    *resumed_games, resumed_summary = (tmp_path / "broken.jsonl").read_bytes().splitlines(keepends=True)
    assert resumed_games == games and len(games) == 12
    summary, resumed = json.loads(summary), json.loads(resumed_summary)
    assert list(resumed) == list(summary) and resumed.pop("tokens")["prompt"] >= summary.pop("tokens")["prompt"]
    assert resumed == summary


def test_an_evaluation_that_breaks_off_is_continued(run, sampler, play_settings, tmp_path, monkeypatch):
    async def engine(*arguments):
        assert await sampler._engine.reset_prefix_cache()  # a new engine's is empty
        return sampler

    monkeypatch.setattr(evaluation.Sampler, "start", engine)
    monkeypatch.setattr(evaluation.Sampler, "close", lambda sampler: None)
    write, room = evaluation.WorkingFile.write, [99]

    def break_off(working, *records):
        room[0] -= 1
        if room[0] < 0:
            raise ConnectionError("power cut")
        write(working, *records)

    monkeypatch.setattr(evaluation.WorkingFile, "write", break_off)
    worlds = EnvironmentSettings(compilers=1)

    def evaluate(name, lines, **more):
        room[0] = lines
        settings = evaluation.EvalSettings(data_root=str(STARTER), limit_per_split=4, games_per_batch=2, **more)
        run(evaluation.evaluate(replace(settings, output=str(tmp_path / name)), play_settings, worlds))
        return (tmp_path / name).read_bytes().splitlines()

    *games, summary = evaluate("unbroken.jsonl", 9)
    for lines, how in ((4, {}), (2, {"resume_output": True})):  # the header counts as a line of the first part
        with pytest.raises(ConnectionError, match="power cut"):
            evaluate("broken.jsonl", lines, **how)
    *resumed_games, resumed = evaluate("broken.jsonl", 3, resume_output=True)
    assert resumed_games == games and len(games) == 8
    summary, resumed = json.loads(summary), json.loads(resumed)
    assert list(resumed) == list(summary)
    tokens, resumed_tokens = summary.pop("tokens"), resumed.pop("tokens")
    assert resumed == summary
    assert tokens["prompt"] == sum(json.loads(game)["prompt_tokens"] for game in games)
    assert tokens["sampled"] == sum(json.loads(game)["sampled_tokens"] for game in games)
    assert resumed_tokens["prompt"] >= tokens["prompt"]  # games that were under way were played again


def test_with_all_games_finished_no_engine_is_needed(warm_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("WorldPool", "load_chat_tokens"):
        monkeypatch.setattr(evaluation, name, None)
    monkeypatch.setattr(evaluation.Sampler, "start", None)
    settings = evaluation.EvalSettings(data_root=str(STARTER), limit_per_split=2, output="out.jsonl")
    play = RolloutSettings(base_model=warm_model, max_trajectory_tokens=6000, temperature=0.01)
    games = [game for split in settings.splits for game in
             evaluation.shuffle_games(evaluation.find_games(STARTER, split), play.seed)[:2]]  # fmt: skip
    header = evaluation.make_header(settings, play, evaluation.describe_model(settings, warm_model), games)
    records = [record(0, split=game.split, game_id=game.game_id, task_type=game.task_type) for game in games]
    Path("out.jsonl.partial").write_bytes(b"".join(map(evaluation.make_line, [header, *records])))
    monkeypatch.setattr(sys, "argv", [
        "eval.py", "--base-model", warm_model, "--data-root", str(STARTER), "--limit-per-split", "2",
        "--max-trajectory-tokens", "6000", "--output", "out.jsonl", "--resume-output",
    ])  # fmt: skip
    evaluation.main()
    assert "4 of 4 games are finished" in capsys.readouterr().out
    *found, summary = map(json.loads, Path("out.jsonl").read_text().splitlines())
    for one in records:
        del one["so_far"]
    assert found == sorted(records, key=lambda one: (one["split"], one["game_id"]))
    assert summary["splits"]["all"]["games"] == 4 and summary["tokens"] == asdict(TokenCounts(100, 10, 5, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
