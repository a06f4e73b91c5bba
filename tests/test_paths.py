"""Names in files: paths and bases mean the same from any folder, and in a run or a project that has moved."""

import hashlib
import json
import os
import shutil
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT

import eval as evaluation
import data
import train
from data import (
    Progress, SettingsError, build_settings, check_same_base, find_games, shuffle_games, stored_base, stored_path,
    usable_path,
)  # fmt: skip
from environment import EnvironmentSettings
from rollout import RolloutSettings
from advantages import SignalSettings
from train import (
    Policy, TrainSettings, check_resumable, find_run, make_run_dir, resumed_settings, save_checkpoint,
    stored_settings,
)  # fmt: skip

CLASSES = (TrainSettings, SignalSettings, RolloutSettings, EnvironmentSettings)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The project's folder, with a base and games, which is the present one; `elsewhere` is beside it."""
    folder = tmp_path / "project"
    for inside in ("models/base", "datasets/games"):
        (folder / inside).mkdir(parents=True)
    (tmp_path / "elsewhere" / "other").mkdir(parents=True)
    (tmp_path / "elsewhere" / "link").symlink_to(folder / "models" / "base")
    monkeypatch.setattr(data, "PROJECT", folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_path_in_the_project_is_stored_from_there_on_and_any_other_from_the_root(project, tmp_path, monkeypatch):
    for folder, path in ((project, "models/base"), (tmp_path, "project/models/base"), (tmp_path / "elsewhere", "../project/models/base"),
                         ("/", project / "models/base"), (tmp_path / "elsewhere", "link")):  # fmt: skip
        monkeypatch.chdir(folder)
        if path != "link":
            assert stored_path(path) == "models/base"
        assert os.path.samefile(usable_path(stored_path(path)), project / "models" / "base")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert stored_path("runs") == str(tmp_path / "elsewhere" / "runs")  # need not be there
    assert stored_path("link") == "models/base"  # leads into the project
    assert stored_base("other") == str(tmp_path / "elsewhere" / "other")
    assert stored_base("org/model") == "org/model" and stored_path("~/games") == str(Path.home() / "games")


def test_a_link_in_the_project_is_a_place_in_the_project(project, tmp_path):
    (project / "big").symlink_to(tmp_path / "elsewhere")
    assert stored_path("big/other") == "big/other"


def test_a_project_that_is_called_by_a_link_is_the_same_project(project, tmp_path):
    (tmp_path / "short").symlink_to(project)
    assert stored_path(tmp_path / "short" / "models" / "base") == "models/base"


def test_one_base_has_many_names(project, tmp_path, capsys):
    names = ["models/base", str(project / "models" / "base"), str(tmp_path / "elsewhere" / "link"), "models/../models/base/"]
    for name in names:
        for other in names:
            check_same_base(name, other, "refused")
    check_same_base("org/model", "org/model", "refused")
    assert capsys.readouterr().out == ""
    for name, other in (("models/base", str(tmp_path / "elsewhere" / "other")), ("org/model", "models/base"), ("org/model", "org/other")):
        with pytest.raises(SettingsError, match="^refused$"):
            check_same_base(name, other, "refused")


def test_a_base_that_is_gone_can_be_given_from_where_it_is_now(project, tmp_path, capsys):
    check_same_base("/gone/ba\x1bse", "models/base", "refused")
    assert capsys.readouterr().out == r"/gone/ba\x1bse, which was the base model, is not there any more: models/base is taken for it" + "\n"


# --- settings -------------------------------------------------------------------------------------------------------


def begin(project, **changed):
    """A run of the project, before its first checkpoint; returns its settings objects."""
    given = types.SimpleNamespace(base_model="models/base", data_root="datasets/games", run_name="one", **changed)
    settings = build_settings(given, {}, *CLASSES)
    make_run_dir(Path(settings[0].runs_dir) / "one", stored_settings(*settings))
    return settings


def again(resume, **given):
    args = types.SimpleNamespace(resume=str(resume), **given)
    return build_settings(args, resumed_settings(args), *CLASSES)


def assert_finds_its_things(settings, project):
    train_settings, _, play, _ = settings
    assert os.path.samefile(play.base_model, project / "models" / "base")
    assert os.path.samefile(train_settings.data_root, project / "datasets" / "games")
    run_dir, _ = find_run(train_settings.resume, train_settings.runs_dir, train_settings.run_name)
    began = Progress(0, 0, 0, "games", data.read_run_settings(run_dir), data.package_versions())
    check_resumable(began, stored_settings(*settings), "games")


def test_a_run_is_resumed_from_any_folder(project, tmp_path, monkeypatch):
    begin(project)
    assert json.loads((project / "runs/one/settings.json").read_text())["base_model"] == "models/base"
    for folder in (project, tmp_path / "elsewhere", "/"):
        monkeypatch.chdir(folder)
        assert_finds_its_things(again(project / "runs" / "one"), project)
        assert_finds_its_things(again(project / "runs" / "one", base_model=str(tmp_path / "elsewhere" / "link")), project)
    other = stored_settings(*again(project / "runs" / "one", base_model=str(tmp_path / "elsewhere" / "other")))
    with pytest.raises(SettingsError, match="--base-model was 'models/base' in the run that is resumed and is now '.*other'"):
        check_resumable(Progress(0, 0, 0, "games", data.read_run_settings(project / "runs" / "one"), {}), other, "games")


def test_a_run_from_before_with_relative_paths_goes_on(project, tmp_path, monkeypatch):
    settings = begin(project)
    old = {name: value for part in settings for name, value in asdict(part).items()}
    (project / "runs/one/settings.json").write_text(json.dumps(old))
    for folder in (project, tmp_path / "elsewhere"):
        monkeypatch.chdir(folder)
        assert_finds_its_things(again(project / "runs" / "one"), project)


def test_a_run_and_a_project_that_moved_go_on(project, tmp_path, monkeypatch):
    begin(project)
    shutil.move(project / "runs" / "one", tmp_path / "elsewhere" / "two")
    assert_finds_its_things(again("../elsewhere/two"), project)
    moved = tmp_path / "home" / "moved"
    shutil.copytree(project, moved)
    shutil.move(tmp_path / "elsewhere" / "two", moved / "runs" / "one")
    shutil.rmtree(project)
    monkeypatch.setattr(data, "PROJECT", moved)
    for folder in (moved, tmp_path / "elsewhere"):
        monkeypatch.chdir(folder)
        assert_finds_its_things(again(moved / "runs" / "one"), moved)


def test_auto_goes_on_with_the_run_it_has_found_whatever_folder_its_settings_name(project, tmp_path, monkeypatch):
    begin(project)
    shutil.copytree(project / "runs", tmp_path / "elsewhere" / "runs")
    (project / "runs/one/settings.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = again("auto", run_name="one")
    assert settings[0].resume == "runs/one"
    assert_finds_its_things(settings, project)


# --- the commands, with the demo model of this project --------------------------------------------------------------


@pytest.fixture(params=["stored", "as before"])
def finished(request, tmp_path, monkeypatch):
    """A run of one update that is done, begun in the project's folder; its paths are stored, or relative to that folder."""
    monkeypatch.chdir(ROOT)
    given = types.SimpleNamespace(max_steps=1, lora_rank=4, games_per_batch=2)
    settings = build_settings(given, train.DEMO_PRESET, *CLASSES)
    everything = {name: value for part in settings for name, value in asdict(part).items()}
    if request.param == "stored":
        everything = stored_settings(*build_settings(given, train.DEMO_PRESET | {
            "base_model": str(ROOT / train.DEMO_MODEL), "data_root": str(ROOT / train.DEMO_DATA)}, *CLASSES))  # fmt: skip
        assert (everything["base_model"], everything["data_root"]) == (train.DEMO_MODEL, train.DEMO_DATA)
    games = shuffle_games(find_games(train.DEMO_DATA, "train"), 42)[:8]
    digest = hashlib.sha256("\n".join(game.game_id for game in games).encode()).hexdigest()
    make_run_dir(tmp_path / "one", everything)
    policy = Policy(train.DEMO_MODEL, lora_rank=4, device="cpu")
    save_checkpoint(tmp_path / "one", policy, Progress(1, 1, 0, digest, everything, {}), keep=0)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "one"


def test_from_another_folder_the_commands_find_base_and_games(finished, monkeypatch, capsys):
    monkeypatch.setattr(train.Sampler, "start", None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", "one", "--swanlab-mode", "disabled"])
    with pytest.raises(SystemExit, match="error: the run has done 1 updates, and --max-steps is 1"):
        train.main()
    sampler = finished / "checkpoints" / "latest" / "sampler"
    assert json.loads((sampler / "adapter_config.json").read_text())["base_model_name_or_path"] == train.DEMO_MODEL
    play = RolloutSettings(base_model=str(ROOT / train.DEMO_MODEL))
    settings = evaluation.EvalSettings(model_path=str(sampler))
    found = evaluation.describe_model(settings, play.base_model)
    header = evaluation.make_header(settings, play, found, [])
    monkeypatch.chdir(ROOT)  # and the result names both as it does from here
    again = replace(settings, model_path=os.path.relpath(sampler)), replace(play, base_model=train.DEMO_MODEL)
    assert evaluation.make_header(*again, evaluation.describe_model(again[0], train.DEMO_MODEL), []) == header
    assert header["base_model"] == train.DEMO_MODEL and header["model_path"] == str(sampler)
