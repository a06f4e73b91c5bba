"""Interrupted and resumed runs against an unbroken one, with the real engine: nothing is lost, and nothing is left behind."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, processes_of, settings

from data import VALUE_HEAD, read_checkpoint


METER = ("--eval-every", 2, "--eval-split", "valid_seen", "--eval-games", 3)


class Command:
    """One of the project's scripts, running, with its output in a file."""

    def __init__(self, home, *arguments):
        self.home = home
        self.temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # a socket's path must be short
        self.log = home / f"output-{len(list(home.glob('output-*')))}.txt"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / arguments[0], *map(str, arguments[1:])], cwd=home, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"STARTED_BY_TEST": str(home), "TMPDIR": str(self.temporary)},
            )  # fmt: skip

    @property
    def output(self):
        return self.log.read_text()

    def wait_for(self, happened, seconds=600):
        """Wait until `happened()`; False if the command has ended before."""
        end = time.monotonic() + seconds
        while not happened():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < end, self.output[-3000:]
            time.sleep(0.002)
        return True

    def signal(self, number):
        self.process.send_signal(number)
        return self.end()

    def end(self, seconds=300):
        """The exit status, once every process is gone."""
        status = self.process.wait(seconds)
        for _ in range(100):
            if not processes_of(self.home):
                left = [name for name in os.listdir(self.temporary) if not name.startswith("torchinductor_")]  # torch's cache
                assert not left
                shutil.rmtree(self.temporary)
                return status
            time.sleep(0.1)
        raise AssertionError(f"left behind: {processes_of(self.home)}")


def metrics_of(home):
    lines = [json.loads(line) for line in (home / "runs/one/metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "eval/"))} for line in lines]


def assert_same_run(home, other, update):
    """Games, seeds, prompts, tokens, rewards, losses, weights, Adam's state: to the bit."""
    assert metrics_of(home) == metrics_of(other)
    for folder in (home, other):
        read_checkpoint(folder / f"runs/one/checkpoints/update-{update:04d}")
    rollouts = sorted(path.name for path in (other / "runs/one/rollouts").iterdir())
    assert rollouts == [f"update-{number:04d}.jsonl" for number in range(1, update + 1)]
    for name in rollouts:
        assert (home / "runs/one/rollouts" / name).read_bytes() == (other / "runs/one/rollouts" / name).read_bytes()
    for part in ("sampler/adapter_model.safetensors", "state/optimizer.safetensors"):
        ours, theirs = (folder / f"runs/one/checkpoints/update-{update:04d}" / part for folder in (home, other))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_changed_setting_is_refused_before_the_first_checkpoint_too(trained, tmp_path):
    run = tmp_path / "runs/one"
    for folder in ("rollouts", "checkpoints"):
        (run / folder).mkdir(parents=True)
    began = json.loads((trained[0] / "runs/one/settings.json").read_text())
    del began["engine_tensor_parallel"]  # a setting without effect on the result may be newer than the run
    (run / "settings.json").write_text(json.dumps(began))
    command = Command(tmp_path, "train.py", "--resume", "runs/one", "--learning-rate", 1e-4)
    assert command.end() == 1
    assert "error: --learning-rate was 0.001 in the run that is resumed and is now 0.0001" in command.output
    assert "Starting the engine" not in command.output and not (run / "metrics.jsonl").exists()


def test_stopped_killed_and_resumed_is_the_unbroken_run(trained, warm_model, tmp_path):
    checkpoints = tmp_path / "runs/one/checkpoints"
    metrics = tmp_path / "runs/one/metrics.jsonl"

    # SIGTERM in the second or third rollout, far from a planned save
    command = Command(tmp_path, *settings(warm_model, 4), "--save-every", 0, "--resume", "auto")  # which begins it
    assert command.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") == 1)
    for number in (1, 2, 3):  # as if it had been there before and had gone back
        (checkpoints / f"update-{number:04d}").mkdir()
    assert command.signal(signal.SIGTERM) == 128 + signal.SIGTERM, command.output[-3000:]
    done = len(metrics_of(tmp_path))
    assert f"Saved state: runs/one/checkpoints/update-{done:04d}" in command.output and done < 4
    assert "To go on: uv run python train.py --resume runs/one" in command.output and "Traceback" not in command.output

    # a changed setting is refused before the engine starts, and nothing is touched
    kept = metrics.read_bytes()
    command = Command(tmp_path, "train.py", "--resume", "runs/one", "--learning-rate", 1e-4)
    assert command.end() == 1
    assert "error: --learning-rate was 0.001 in the run that is resumed and is now 0.0001" in command.output
    assert "Starting the engine" not in command.output and metrics.read_bytes() == kept

    # kill -9 once the next update is saved; a planned save each update now, which alters no result
    command = Command(tmp_path, "train.py", "--resume", "auto", "--run-name", "one", "--save-every", 1, *METER)
    assert command.wait_for(lambda: (checkpoints / "latest").resolve().name == f"update-{done + 1:04d}")
    command.signal(signal.SIGKILL)
    assert f"Going on after update {done} from" in command.output
    assert re.search(r"Trainer and engine agree to \d\.\de-0[5-9] nats", command.output)

    command = Command(tmp_path, "train.py", "--resume", "runs/one")
    assert command.end() == 0, command.output[-3000:]
    assert_same_run(tmp_path, trained[0], 4)
    # the meter, which came in on the way and has not moved the run
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert 0 <= last["eval/success_low"] <= last["eval/success"] <= last["eval/success_high"] <= 1
    assert (checkpoints / "best").resolve().name in ("update-0002", "update-0004")
    records = [json.loads(line) for line in (tmp_path / "runs/one/evals/update-0004.jsonl").read_text().splitlines()]
    assert [record["split"] for record in records] == ["valid_seen"] * 3 and {record["update"] for record in records} == {4}
    assert last["eval/success"] == sum(record["won"] for record in records) / 3
    assert last["eval/steps"] == sum(record["steps"] for record in records) / 3


@pytest.mark.slow
def test_every_choice_resumes_to_the_bit(warm_model, tmp_path_factory):
    choices = (
        "--held-out-games", 6, "--eval-every", 2, "--fill-groups", 2, "--horizon", "4,6", "--horizon-every", 2, "--epochs", 2,
        "--minibatches", 2, "--kl-coefficient", 0.01, "--entropy-coefficient", 0.001, "--loss-sum", "turn-mean",
        "--learning-rate-schedule", "cosine", "--warmup-updates", 1, "--save-every", 2, "--max-mismatch-kl", 1,
        "--advantage", "gae",
    )  # fmt: skip
    homes = [tmp_path_factory.mktemp(name) for name in ("unbroken", "broken")]
    assert Command(homes[0], *settings(warm_model, 4), *choices).end() == 0
    command = Command(homes[1], *settings(warm_model, 4), *choices)
    assert command.wait_for(lambda: (homes[1] / "runs/one/checkpoints/latest").exists())
    command.signal(signal.SIGKILL)
    command = Command(homes[1], "train.py", "--resume", "runs/one")
    assert command.end() == 0, command.output[-3000:]
    assert_same_run(homes[1], homes[0], 4)
    lines = [json.loads(line) for line in (homes[0] / "runs/one/metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/horizon"] for line in lines] == [4, 4, 6, 6]
    assert all(line["train/optimizer_steps"] >= 2 for line in lines if "train/grad_norm" in line)
    assert all(line["train/kl_base"] >= 0 for line in lines if "train/grad_norm" in line)
    assert [line["train/value_explained_variance"] != 0 for line in lines] == [False, True, True, True]
    heads = [(home / "runs/one/checkpoints/update-0004/state" / VALUE_HEAD).read_bytes() for home in homes]
    assert heads[0] == heads[1]


@pytest.mark.slow
def test_killed_at_twenty_instants_is_the_unbroken_run(warm_model, tmp_path_factory):
    """Half an hour. Instants: any, in the middle of a save, of a weight sync, of writing records, of the start."""
    updates, kills = 60, 20
    reference, home = tmp_path_factory.mktemp("reference"), tmp_path_factory.mktemp("killed")
    command = Command(reference, *settings(warm_model, updates), "--save-every", 1)
    assert command.end(600) == 0, command.output[-3000:]
    run, rng = home / "runs/one", random.Random(0)

    def in_save():
        return any(path.name.startswith("update-") for path in (run / "checkpoints").glob("*.partial"))

    def in_sync():
        return any((run / "sampler-weights").glob("update-*/model.safetensors"))

    def in_records():
        return any((run / "rollouts").glob("*.partial"))

    struck = []
    first = (*settings(warm_model, updates), "--save-every", 1, "--resume", "auto")
    while len(struck) < kills:
        command = Command(home, *first)
        started = time.monotonic()
        kind = ("any", "save", "sync", "records", "start")[len(struck) % 5]
        if kind == "start":
            wait = rng.uniform(1, 25)
            command.wait_for(lambda: time.monotonic() > started + wait)
        else:
            command.wait_for(lambda: "agree to" in command.output)
            if kind == "any":
                wait = time.monotonic() + rng.uniform(0, 3)
                command.wait_for(lambda: time.monotonic() > wait)
            else:
                command.wait_for({"save": in_save, "sync": in_sync, "records": in_records}[kind])
        assert command.process.poll() is None, command.output[-3000:]  # updates enough that every kill hits something
        command.signal(signal.SIGKILL)
        struck.append(kind)
        print(f"kill {len(struck)} ({kind}) after {time.monotonic() - started:.1f} s", flush=True)
    command = Command(home, *first)
    assert command.end(900) == 0, command.output[-3000:]
    print(f"killed {len(struck)} times: { {kind: struck.count(kind) for kind in struck} }")
    assert_same_run(home, reference, updates)


# --- faults ---------------------------------------------------------------------------------------------------------


def begin(model, home, *more, until=1):
    """A long run that has done `until` updates."""
    command = Command(home, *settings(model, 1000), "--save-every", 0, *more)
    assert command.wait_for(lambda: command.output.count("  success ") >= until), command.output[-3000:]
    return command


def has_traceback(command):
    """One of ours: the engine's own lines have a prefix."""
    return re.search("^Traceback", command.output, re.MULTILINE)


def assert_nothing_lost(command, home):
    """What was learned is saved and read back, and the message tells how to go on."""
    done = len(metrics_of(home))
    assert done >= 1 and not has_traceback(command)
    assert read_checkpoint(home / f"runs/one/checkpoints/update-{done:04d}").update == done
    assert "To go on: uv run python train.py --resume runs/one" in command.output


@pytest.mark.slow
def test_ctrl_c_of_a_terminal_reaches_every_process_and_is_as_good_as_sigterm(warm_model, tmp_path):
    command = begin(warm_model, tmp_path)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.end() == 128 + signal.SIGINT
    assert_nothing_lost(command, tmp_path)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(warm_model, tmp_path):
    command = begin(warm_model, tmp_path)
    command.process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    started = time.monotonic()
    assert command.signal(signal.SIGTERM) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 15


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3, 12, 25])
def test_stopped_while_it_starts(warm_model, tmp_path, seconds):
    command = Command(tmp_path, *settings(warm_model, 3))
    time.sleep(seconds)
    assert command.signal(signal.SIGTERM) in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert not has_traceback(command)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["VLLM::EngineCor", "VLLM::Worker"])  # the kernel keeps 15 letters
def test_a_dead_engine_is_named_and_nothing_is_lost(warm_model, tmp_path, victim):
    command = begin(warm_model, tmp_path)
    [process] = [p for p in processes_of(tmp_path) if Path(f"/proc/{p}/comm").read_text().strip() == victim]
    os.kill(int(process), signal.SIGKILL)
    assert command.end() == 1
    assert "error: the sampling engine died" in command.output and "go on with --resume" in command.output
    assert_nothing_lost(command, tmp_path)


@pytest.mark.slow
def test_weights_that_run_away_are_named_and_what_was_saved_stays(warm_model, tmp_path):
    command = Command(tmp_path, *settings(warm_model, 5), "--learning-rate", 1e30, "--save-every", 1)
    assert command.end() == 1
    assert "with weights update-1, so they ran away" in command.output and "lower --learning-rate" in command.output
    assert not has_traceback(command)
    assert not list((tmp_path / "runs/one/checkpoints").iterdir())  # weights that are no numbers are not worth saving


@pytest.mark.slow
def test_a_full_disk_is_named_and_what_was_saved_stays(warm_model, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small disk takes the right to mount one")
    try:
        command = Command(tmp_path, *settings(warm_model, 1000), "--save-every", 1, "--runs-dir", disk)
        assert command.end(900) == 1
        assert "error: the disk is full" in command.output and not has_traceback(command)
        saved = sorted((disk / "one/checkpoints").glob("update-????"))
        assert saved and all(read_checkpoint(folder) for folder in saved)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_three_hundred_updates_leave_nothing_behind_and_take_no_more_each_time(warm_model, tmp_path):
    """A worker is killed every 20th update. Memory, files, processes and temporary folders at update 60 against 300."""
    updates = 300
    command = Command(
        tmp_path, *settings(warm_model, updates), "--games-per-batch", 2, "--group-size", 2, "--max-episode-steps", 3,
        "--save-every", 20, "--keep-checkpoints", 2, "--max-faults", 1000,
    )  # fmt: skip

    def look():
        processes = processes_of(tmp_path)
        statuses = [dict(line.split(":", 1) for line in Path(f"/proc/{p}/status").read_text().splitlines()) for p in processes]
        return {
            "processes": len(processes),
            "megabytes": sum(int(status.get("VmRSS", "0 kB").split()[0]) for status in statuses) / 1024,
            "threads": sum(int(status["Threads"]) for status in statuses),
            "files": sum(len(os.listdir(f"/proc/{p}/fd")) for p in processes),
            "temporary": len(list(command.temporary.rglob("*"))),
            "shared": len(os.listdir("/dev/shm")),
            "checkpoints": len(list((tmp_path / "runs/one/checkpoints").glob("update-????"))),
        }

    seen, kills = {}, 0
    for update in range(20, updates, 20):
        assert command.wait_for(lambda: f"update {update}/{updates}  " in command.output, 900), command.output[-3000:]
        time.sleep(0.5)
        seen[update] = look()
        print(update, {name: round(value) for name, value in seen[update].items()}, flush=True)
        serving = [p for p in processes_of(tmp_path) if b"--serve" in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(int(serving[update // 20 % len(serving)]), signal.SIGKILL)
        kills += 1
    assert command.end(900) == 0, command.output[-3000:]
    metrics = metrics_of(tmp_path)
    assert len(metrics) == updates and sum(m["rollout/env_faults"] for m in metrics) >= kills // 3  # the rest were compilers
    first, last = seen[60], seen[280]
    for name in ("temporary", "checkpoints"):
        assert last[name] == first[name], (name, seen)
    assert last["processes"] <= first["processes"], seen  # a killed compiler comes back when there is something to compile
    assert abs(last["threads"] - first["threads"]) <= 2 and abs(last["files"] - first["files"]) <= 4, seen
    assert last["megabytes"] < first["megabytes"] * 1.03, seen
