"""The commands a person types: train.py, eval.py and analysis.py on the starter games, and what they say to bad input."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import huggingface_hub
import pytest
from conftest import ROOT, STARTER, processes_of, run_command
from transformers import PreTrainedTokenizerBase

import eval as evaluation
import train
from data import SettingsError
from protocol import reach_hub
from analysis import main as analyse


def command(module, monkeypatch, capsys, *arguments):
    """Run a command in this process; returns its error message. Only for what ends before the engine starts."""
    monkeypatch.setattr(sys, "argv", ["x.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code not in (0, None)
    return str(ended.value.code) + capsys.readouterr().err


# --- the main job ---------------------------------------------------------------------------------------------------


def test_training_saves_weights_metrics_and_every_trajectory(trained):
    home, output, _ = trained
    run_dir = home / "runs" / "one"
    for update in (1, 2, 3, 4):
        folder = f"runs/one/checkpoints/update-{update:04d}"
        assert f"Saved state: {folder}\n" in output and f"Saved sampler weights: {folder}/sampler\n" in output
        records = [json.loads(line) for line in (run_dir / f"rollouts/update-{update:04d}.jsonl").read_text().splitlines()]
        assert len(records) == 8 and {r["policy_version"] for r in records} == {"base" if update == 1 else f"update-{update - 1}"}
    assert sorted(os.listdir(run_dir / "checkpoints")) == ["latest", "update-0003", "update-0004"]
    for update in (3, 4):
        assert (run_dir / f"checkpoints/update-{update:04d}/sampler/adapter_model.safetensors").stat().st_size > 1000
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [m["update"] for m in metrics] == [1, 2, 3, 4]
    for m in metrics:
        assert {key.split("/")[0] for key in m} == {"update", "reward", "rollout", "advantage", "train", "mismatch", "tokens", "time"}
        assert m["tokens/prompt_computed"] < m["tokens/prompt_read"] and m["mismatch/mean"] < 1e-4
        assert m["tokens/trained"] > 0 and m["rollout/env_faults"] == 0
    assert json.loads((run_dir / "settings.json").read_text())["learning_rate"] == 1e-3
    assert list((run_dir / "swanlog").iterdir())


def assert_only_progress(stderr):
    """Nothing but progress bars: no warning of a library at the start, and nothing of what was left behind at the end."""
    lines = [line.strip() for line in re.split(r"[\r\n]|\x1b\[A", stderr.read_text())]
    assert [line for line in lines if line and not re.match("(updates|trajectories|games): ", line)] == []


def test_a_healthy_run_prints_nothing_but_its_lines_and_its_progress(trained):
    assert_only_progress(trained[0] / "stderr-of-train.py.txt")


def test_no_process_and_no_shared_memory_is_left_behind(trained):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                             env=os.environ | {"STARTED_BY_TEST": str(trained[0])})  # fmt: skip
    assert processes_of(trained[0]) == [str(child.pid)]  # the check sees what it should see
    child.communicate(b"\n")
    assert processes_of(trained[0]) == []
    assert {name for name in os.listdir("/dev/shm") if name.startswith("sampler-weights-")} <= trained[2]
    assert (trained[0] / "runs/one").exists() and not (trained[0] / "runs/one/sampler-weights").exists()


def test_checkpoint_and_base_are_evaluated_and_drawn(trained, warm_model, capsys):
    home, *_ = trained
    common = ("--base-model", warm_model, "--data-root", STARTER, "--limit-per-split", 3, "--max-episode-steps", 6,
              "--max-trajectory-tokens", 6000, "--max-assistant-tokens", 24)  # fmt: skip
    base = run_command("eval.py", *common, "--games-per-batch", 1, cwd=home)
    tuned = run_command("eval.py", *common, "--model-path", "runs/one/checkpoints/update-0004/sampler", "--no-texts", cwd=home)
    assert_only_progress(home / "stderr-of-eval.py.txt")
    assert "Wrote eval_results/base.jsonl" in base and "Wrote eval_results/one-update-0004.jsonl" in tuned
    files = {}
    for name, update in (("base", 0), ("one-update-0004", 4)):
        *records, summary = [json.loads(line) for line in (home / f"eval_results/{name}.jsonl").read_text().splitlines()]
        assert summary["type"] == "summary" and summary["update"] == update and summary["settings"]["temperature"] == 0.01
        assert [r["split"] for r in records] == ["valid_seen"] * 3 + ["valid_unseen"] * 3
        assert summary["splits"]["all"]["games"] == 6
        assert summary["splits"]["all"]["success"] == sum(r["won"] for r in records) / 6
        files[name] = records
    assert [r["game_id"] for r in files["base"]] == [r["game_id"] for r in files["one-update-0004"]]
    # a learning rate of 1e-3 is a large one: the new weights play another game
    assert [r["mean_logprob"] for r in files["base"]] != [r["mean_logprob"] for r in files["one-update-0004"]]
    texts = {"task", "messages", "turns"}
    assert texts < files["base"][0].keys() and files["base"][0].keys() - texts == files["one-update-0004"][0].keys()
    analyse(["--result-dir", str(home / "eval_results"), "--output", str(home / "images")])
    assert (home / "images" / "checkpoints.png").stat().st_size > 10_000
    assert "McNemar" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluation_does_not_depend_on_how_many_games_are_in_flight(warm_model, tmp_path):
    common = ("--base-model", warm_model, "--data-root", STARTER, "--max-episode-steps", 6, "--max-assistant-tokens", 24,
              "--max-trajectory-tokens", 6000)  # fmt: skip
    for n in (1, 5, 64):
        run_command("eval.py", *common, "--games-per-batch", n, "--output", f"{n}.jsonl", cwd=tmp_path)
    one, *others = [(tmp_path / f"{n}.jsonl").read_text().splitlines()[:-1] for n in (1, 5, 64)]
    assert all(other == one for other in others)


# --- bad input: one clear line, before any model is loaded ----------------------------------------------------------


@pytest.fixture(autouse=True)
def no_engine(request, monkeypatch):
    """Bad input must be refused before weights are read: loading any here is an error of its own."""
    if "capsys" in request.fixturenames and "trained" not in request.fixturenames:

        def refuse(*args, **kwargs):
            raise AssertionError("a model was loaded before the input was checked")

        monkeypatch.setattr(train, "Policy", refuse)
        for module in (train, evaluation):
            monkeypatch.setattr(module.Sampler, "start", refuse)


@pytest.fixture
def small(warm_model):
    return ("--base-model", warm_model, "--max-trajectory-tokens", "6000")


@pytest.mark.parametrize("module", [train, evaluation])
def test_machine_without_cuda_is_told_both_ways_on(module, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = command(module, monkeypatch, capsys)
    assert "no CUDA device" in error and "--preset demo" in error and "--base-model" in error


@pytest.mark.parametrize("module", [train, evaluation])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data-root", "nowhere"], "nowhere"),
        (["--max-episode-steps", "0"], "--max-episode-steps is 0"),
        (["--max-trajectory-tokens", "0"], "--max-trajectory-tokens is 0"),
        (["--max-trajectory-tokens", "99999"], "reads at most"),
        (["--max-trajectory-tokens", "60"], "the first prompt of"),
        (["--games-per-batch", "0"], "--games-per-batch is 0"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--temperature", "0.001"], "--temperature is 0.001; it must be a number of 0.01 or more"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", "4294967296"], "--seed is 4294967296"),
        (["--base-model", "no/such-model-here"], "no/such-model-here"),
        (["--base-model", str(ROOT / "tests")], "is no model"),
        (["--swanlab-mode", "sometimes"], "sometimes"),
    ],
)
def test_bad_flags_are_named_with_their_value(module, flags, named, small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it retries for half a minute
    error = command(module, monkeypatch, capsys, *small, "--data-root", STARTER, *flags)
    assert named in error


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--train-split", "test"], "unknown split"),
        (["--top-p", "0.9"], "--top-p is 0.9"),
        (["--ppo-clip-low", "1.5"], "--ppo-clip-low"),
        (["--max-steps", "0"], "--max-steps is 0"),
        (["--group-size", "1"], "--group-size is 1; it must be at least 2"),
        (["--games-per-batch", "500"], "--games-per-batch is 500"),
        (["--runs-dir", "/proc/nowhere"], "cannot write to /proc/nowhere"),
    ],
)
def test_bad_training_flags_are_named(flags, named, small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert named in command(train, monkeypatch, capsys, *small, "--data-root", STARTER, "--swanlab-mode", "disabled", *flags)


def test_every_weight_of_a_model_whose_head_is_tied_is_refused_on_a_cpu(small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = json.loads((ROOT / "datasets/demo/model/config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "config.json").write_text(json.dumps(config))
    flags = (*small, "--base-model", "tied", "--data-root", STARTER, "--swanlab-mode", "disabled", "--lora-rank", "0")
    assert "--lora-rank is 0; it must be above 0 on a CPU" in command(train, monkeypatch, capsys, *flags)


def test_a_model_that_cannot_be_saved_is_refused_before_it_is_trained(small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def refuse(*args, **kwargs):
        raise ValueError("the tokenizer cannot be written")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    flags = (*small, "--data-root", STARTER, "--swanlab-mode", "disabled", "--lora-rank", "0", "--run-name", "mine")
    for more in ((), ("--resume", "runs/mine")):  # it can be mended
        error = command(train, monkeypatch, capsys, *(more or flags))
        assert "could be trained, but not saved: ValueError: the tokenizer cannot be written; mend that" in error
        assert "go on with --resume runs/mine" in error and not list((tmp_path / "runs/mine/checkpoints").iterdir())


def test_a_hub_that_does_not_answer_is_named_in_one_line_and_asked_once(small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    reach_hub.cache_clear()
    started = time.monotonic()
    error = command(train, monkeypatch, capsys, *small, "--data-root", STARTER, "--base-model", "no/such-model")
    assert time.monotonic() - started < 10
    assert "'no/such-model' is no model" in error
    assert error.count("\n") == 1 and "the hub cannot be reached (ConnectError" in error
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    reach_hub.cache_clear()


def test_existing_run_and_existing_output_are_left_alone(small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    flags = (*small, "--data-root", STARTER, "--swanlab-mode", "disabled")
    assert "exists: choose another --run-name" in command(train, monkeypatch, capsys, *flags, "--run-name", "mine")
    (tmp_path / "out.jsonl").write_text("precious\n")
    assert "give --overwrite-output" in command(evaluation, monkeypatch, capsys, *flags, "--output", "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    assert "cannot write" in command(evaluation, monkeypatch, capsys, *flags, "--output", "/proc/nowhere/out.jsonl")


def test_unknown_split_and_empty_folder_are_named(small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "--split is 'test'" in command(evaluation, monkeypatch, capsys, *small, "--split", "test")
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    assert "no playable game in" in command(train, monkeypatch, capsys, *small, "--data-root", tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "old release"])
def test_damaged_game_is_named_before_the_engine_starts(damage, small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = next((STARTER / "json_2.1.1" / "train").glob("*/*/game.tw-pddl")).parent
    target = tmp_path / "games" / "json_2.1.1" / "train" / source.parent.name / source.name
    shutil.copytree(source, target)
    game = target / "game.tw-pddl"
    text = game.read_text()
    if damage == "old release":
        content = json.loads(text)
        content["grammar"] = content["grammar"].replace('"move {o} to {r}"', '"put {o} in/on {r}"')
        game.write_text(json.dumps(content))
    else:
        game.write_text(text[:3000] if damage == "truncated" else "\x00 no game")
    error = command(train, monkeypatch, capsys, *small, "--data-root", tmp_path / "games", "--swanlab-mode", "disabled",
                    "--games-per-batch", 1)  # fmt: skip
    assert str(game) in error and "alfworld-download" in error


def test_model_path_that_is_no_adapter_or_has_another_base_is_refused(small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = (*small, "--data-root", STARTER, "--model-path")
    assert "no adapter in nowhere" in command(evaluation, monkeypatch, capsys, *flags, "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_model.safetensors").write_bytes(b"x")
    (tmp_path / "other" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "base_model_name_or_path": "Qwen/Other"}')
    error = command(evaluation, monkeypatch, capsys, *flags, "other")
    assert "trained on another base, Qwen/Other" in error and "--base-model Qwen/Other" in error
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": small[1]}
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match="adapter_model.safetensors is damaged"):
        evaluation.SavedAdapter(tmp_path / "other", small[1])
    assert "adapter_model.safetensors is damaged" in command(evaluation, monkeypatch, capsys, *flags, "other")
    (tmp_path / "other" / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in command(evaluation, monkeypatch, capsys, *flags, "other")
    config = json.loads((ROOT / "datasets/demo/model/config.json").read_text()) | {"hidden_size": 8}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert "another shape (hidden_size 8)" in command(evaluation, monkeypatch, capsys, *flags, "other")


def test_preset_sets_defaults_and_flags_win(monkeypatch):
    import argparse

    from data import add_flags, build_settings
    from rollout import RolloutSettings

    parser = argparse.ArgumentParser()
    add_flags(parser, {}, train.TrainSettings, train.SignalSettings, RolloutSettings)
    args = parser.parse_args(["--max-steps", "7", "--no-include-admissible-actions"])
    settings, play = build_settings(args, train.DEMO_PRESET, train.TrainSettings, RolloutSettings)
    assert settings.max_steps == 7 and settings.data_root == train.DEMO_PRESET["data_root"]
    assert play.include_admissible_actions is False and play.base_model == train.DEMO_PRESET["base_model"]
    recipe, play = build_settings(parser.parse_args([]), {}, train.TrainSettings, RolloutSettings)
    assert (recipe.max_steps, recipe.games_per_batch, recipe.group_size, recipe.lora_rank) == (80, 8, 8, 32)
    assert (recipe.learning_rate, recipe.beta1, recipe.beta2, recipe.weight_decay, recipe.grad_clip_norm) == (1e-6, 0.9, 0.95, 0, 1)
    [signal] = build_settings(parser.parse_args([]), {}, train.SignalSettings)
    assert (signal.ppo_clip_low, signal.ppo_clip_high, recipe.save_every) == (0.8, 1.2, 20)
    assert (play.max_episode_steps, play.max_trajectory_tokens, play.max_assistant_tokens) == (50, 12_000, 2_048)
    assert (play.temperature, play.top_p, play.seed, play.base_model) == (1.0, 1.0, 42, "Qwen/Qwen3.5-4B")
