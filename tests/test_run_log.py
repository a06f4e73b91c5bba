"""The training log: what stands in metrics.jsonl, and SwanLab in all four modes, real, without its server."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import data as run_log
from data import RunLog, RunLogError, check_swanlab

needs_dashboard = pytest.mark.skipif(
    importlib.util.find_spec("swanboard") is None, reason="SwanLab's local mode needs swanlab[dashboard]"
)


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    """No credentials and no settings of the user's own, and a folder in which stray files would be noticed."""
    for name in [name for name in os.environ if name.startswith("SWANLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home" / ".swanlab"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert list((tmp_path / "cwd").iterdir()) == []
    os.environ.pop("SWANLAB_LOG_DIR", None)  # swanlab's local mode leaves it behind


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "one"


def read_lines(run_dir):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


CONFIG = {"lr": 1e-6, "path": Path("/x"), "none": None, "nan": math.nan, "list": [1, 2], "on": True}
METRICS = {"train/loss": 1.5, "mismatch/k3": math.nan, "reward/mean": np.float32(0.25), "note": "skipped", "n": 3}


# --- metrics.jsonl ---


def test_each_update_is_one_strict_json_line(run_dir):
    with RunLog(run_dir, "one", "proj", "disabled", {}) as log:
        log.log(METRICS | {"up": math.inf, "down": -math.inf, "none": None, "yes": np.bool_(True)}, 7)
        assert len(read_lines(run_dir)) == 1  # before close: a crash keeps it
        log.log({"train/loss": 1.25}, 8)
    first, second = read_lines(run_dir)
    assert first == {
        "update": 7, "train/loss": 1.5, "mismatch/k3": None, "reward/mean": 0.25, "note": "skipped", "n": 3,
        "up": None, "down": None, "none": None, "yes": True,
    }  # fmt: skip
    assert second == {"update": 8, "train/loss": 1.25}


def test_a_resumed_run_goes_on_where_the_checkpoint_was_saved(run_dir):
    with RunLog(run_dir, "one", "proj", "disabled", {}) as log:
        log.log({"x": 1}, 1)
        kept = log.bytes_written
        log.log({"x": 2}, 2)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"update": 3, "x')
    with RunLog(run_dir, "one", "proj", "disabled", {}, kept) as log:
        log.log({"x": 3}, 2)
    assert read_lines(run_dir) == [{"update": 1, "x": 1}, {"update": 2, "x": 3}]


def test_metrics_that_are_gone_are_not_papered_over(run_dir):
    with pytest.raises(RunLogError, match=r"metrics.jsonl is shorter \(0 bytes\).*\(100\)"):
        RunLog(run_dir, "one", "proj", "disabled", {}, 100)


def test_two_processes_do_not_write_one_run(run_dir):
    with RunLog(run_dir, "one", "proj", "disabled", {}) as log:
        log.log({"x": 1}, 1)
        with pytest.raises(RunLogError, match="another process is writing to .*metrics.jsonl"):
            RunLog(run_dir, "one", "proj", "disabled", {})
    assert read_lines(run_dir) == [{"update": 1, "x": 1}]


def test_a_tensor_of_many_values_is_no_metric(run_dir):
    with RunLog(run_dir, "one", "proj", "disabled", {}) as log:
        with pytest.raises(ValueError):
            log.log({"x": np.zeros(2)}, 0)
    assert read_lines(run_dir) == []


def run_in_new_process(code):
    environment = os.environ | {"PYTHONPATH": str(Path(run_log.__file__).parent)}
    command = [sys.executable, "-c", "import pathlib, sys\n" + code]
    result = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_disabled_mode_does_not_need_swanlab(run_dir):
    run_in_new_process(
        f"""
sys.modules["swanlab"] = None  # importing it now fails
from train import RunLog, check_swanlab
check_swanlab("disabled", "proj")
with RunLog(pathlib.Path({str(run_dir)!r}), "one", "proj", "disabled", {{}}) as log:
    log.log({{"x": 1}}, 0)
"""
    )
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


# --- SwanLab without its server ---


def swanlab_text(run_dir):
    """All that SwanLab wrote for its one run, as text."""
    (run_folder,) = (run_dir / "swanlog").glob("run-*")
    return b"".join(path.read_bytes() for path in sorted(run_folder.rglob("*")) if path.is_file()).decode("latin-1")


@pytest.mark.parametrize("mode", ["offline", pytest.param("local", marks=needs_dashboard)])
def test_a_run_without_network_is_kept_beside_the_metrics(run_dir, mode, capfd):
    handler, hook, stdout_write = signal.getsignal(signal.SIGINT), sys.excepthook, sys.stdout.write
    check_swanlab(mode, "proj")
    with RunLog(run_dir, "run-name", "proj", mode, CONFIG) as log:
        assert signal.getsignal(signal.SIGINT) is handler
        log.log(METRICS, 0)
        log.log({"train/loss": 1.25}, 1)
    log.close()
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.excepthook is hook and sys.stdout.write == stdout_write
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("SwanLab", "swanlab"))]
    assert len(read_lines(run_dir)) == 2
    text = swanlab_text(run_dir)
    assert "train/loss" in text and "reward/mean" in text and "mismatch/k3" not in text
    output = "".join(capfd.readouterr())
    assert "ERROR" not in output and "WARNING" not in output, output


@needs_dashboard
def test_a_local_run_is_in_the_dashboard_database(run_dir):
    import sqlite3

    with RunLog(run_dir, "run-name", "proj", "local", CONFIG) as log:
        for update in range(3):
            log.log({"train/loss": 1.5 + update}, update)
    with sqlite3.connect(run_dir / "swanlog" / "runs.swanlab") as database:
        assert database.execute("select name, status from experiment").fetchall() == [("run-name", 1)]
        assert database.execute("select name from tag").fetchall() == [("train/loss",)]
    (points,) = (run_dir / "swanlog").glob("run-*/logs/1/*.log")
    values = [json.loads(line) for line in points.read_text().splitlines()]
    assert [(point["index"], point["data"]) for point in values] == [(0, 1.5), (1, 2.5), (2, 3.5)]


def test_two_runs_in_one_process_and_a_run_resumed(run_dir):
    kept = 0
    for update in range(2):
        with RunLog(run_dir, "one", "proj", "offline", {}, kept) as log:
            log.log({"x": update}, update)
            kept = log.bytes_written
    assert [line["x"] for line in read_lines(run_dir)] == [0, 1]
    assert len(list((run_dir / "swanlog").glob("run-*"))) == 2


@pytest.mark.parametrize("error, state", [(RuntimeError("boom"), "crashed"), (KeyboardInterrupt(), "aborted")])
def test_a_failed_run_ends_as_failed(run_dir, monkeypatch, error, state):
    import swanlab

    finished = []
    finish = swanlab.Run.finish
    monkeypatch.setattr(swanlab.Run, "finish", lambda run, **how: (finished.append(how), finish(run, **how))[1])
    with pytest.raises(type(error)):
        with RunLog(run_dir, "one", "proj", "offline", {}):
            raise error
    assert [how["state"] for how in finished] == [state]
    assert type(error).__name__ in finished[0]["error"]


def test_close_does_not_wait_for_ever(run_dir, monkeypatch, capsys):
    import swanlab

    finish, released = swanlab.Run.finish, threading.Event()
    monkeypatch.setattr(swanlab.Run, "finish", lambda run, **how: (released.wait(), finish(run, **how))[1])
    monkeypatch.setattr(run_log, "SWANLAB_CLOSE_SECONDS", 0.1)
    log = RunLog(run_dir, "one", "proj", "offline", {})
    log.close()
    assert f"swanlab sync {run_dir}/swanlog/run-" in capsys.readouterr().out.replace("\n", "")
    released.set()
    for thread in threading.enumerate():
        if thread.name == "swanlab":
            thread.join(timeout=30)


# --- what is said before a model is loaded ---


def test_online_without_a_login_says_what_to_do():
    with pytest.raises(RunLogError, match="'online' needs a login.*swanlab login.*SWANLAB_API_KEY.*offline"):
        check_swanlab("online", "proj")


def test_local_without_the_dashboard_package_says_so(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "swanboard" else find_spec(name))
    with pytest.raises(RunLogError, match=r"'local' needs the package swanboard.*swanlab\[dashboard\]"):
        check_swanlab("local", "proj")


@pytest.mark.parametrize("mode", ["cloud", "", "Offline"])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(RunLogError, match="unknown SwanLab mode .*online, local, offline, disabled"):
        check_swanlab(mode, "proj")


@pytest.mark.parametrize("project", ["", "two words", "x" * 101, "a/b"])
def test_a_project_name_swanlab_would_refuse_is_refused_early(project):
    with pytest.raises(RunLogError, match="--swanlab-project"):
        check_swanlab("offline", project)


# --- online, against a server that answers as SwanLab's does ---


class SwanLabServer(BaseHTTPRequestHandler):
    """Takes the key "good-key", knows every project, and remembers what was sent."""

    requests: list[tuple[str, str, str | None, object]] = []  # method, path, API key, body

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, key = self.path.removeprefix("/api"), self.headers["authorization"]
        self.requests.append((self.command, path, key, json.loads(body) if body else None))
        status, reply = 200, {}
        if path == "/login/api_key" and key != "good-key":
            status, reply = 401, {"code": "401", "message": "no such key"}
        elif path == "/login/api_key":
            user = {"username": "me", "name": "me"}
            reply = {"sid": "s", "expiredAt": "2999-01-01T00:00:00.000Z", "userInfo": user}
        elif path.endswith("/experiment"):
            status, reply = 201, {"cuid": "e1", "slug": "e1", "name": "run-name"}
        elif path.startswith("/project/") and self.command == "GET":
            reply = {"cuid": "p1", "name": "proj", "path": "/me/proj", "version": 1}
            reply |= {"group": {"username": "me"}, "_count": {"experiments": 0}}
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = answer

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    SwanLabServer.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), SwanLabServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def test_an_online_run_sends_the_metrics(server, run_dir, monkeypatch):
    monkeypatch.setenv("SWANLAB_API_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("SWANLAB_API_KEY", "good-key")
    run_in_new_process(  # a login stays in its process
        f"""
from train import RunLog, check_swanlab
check_swanlab("online", "proj")
with RunLog(pathlib.Path({str(run_dir)!r}), "run-name", "proj", "online", {{"lr": 1e-6}}) as log:
    log.log({{"train/loss": 1.5, "mismatch/k3": float("nan")}}, 0)
    log.log({{"train/loss": 1.25}}, 1)
"""
    )
    requests = SwanLabServer.requests
    sent = json.dumps([body for _, path, _, body in requests if path == "/house/metrics"])
    assert "train/loss" in sent and "1.25" in sent
    states = [body["state"] for method, path, _, body in requests if method == "PUT" and path.endswith("/state")]
    assert states == ["FINISHED"]
    assert len([path for _, path, _, _ in requests if path == "/login/api_key"]) == 1
    assert len(read_lines(run_dir)) == 2


@pytest.mark.parametrize("kept_in", ["the environment", "the file of `swanlab login`"])
def test_a_refused_key_says_what_to_do(server, monkeypatch, tmp_path, kept_in):
    host = f"http://127.0.0.1:{server.server_port}"
    if kept_in == "the environment":
        monkeypatch.setenv("SWANLAB_API_HOST", host)
        monkeypatch.setenv("SWANLAB_API_KEY", "bad-key")
    else:
        folder = tmp_path / "home" / ".swanlab"
        folder.mkdir(parents=True)
        (folder / ".netrc").write_text(f"machine {host}\n  login {host}\n  password bad-key\n")
    with pytest.raises(RunLogError, match=f"no login at {host}: the API key was refused.*--swanlab-mode offline"):
        check_swanlab("online", "proj")
    assert [request[:3] for request in SwanLabServer.requests] == [("POST", "/login/api_key", "bad-key")]
