"""Checkpoints: what is saved comes back to the bit, and damage, malice and other settings are refused by name."""

import errno
import json
import os
import pickle
import random
import shutil
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, Qwen3Config

import data
import train
from data import CheckpointError, Progress, SettingsError, build_settings, explain, read_checkpoint, usable_path
from environment import EnvironmentSettings
from rollout import RolloutSettings
from advantages import SignalSettings, make_datum
from train import (
    Policy, TrainSettings, begin, check_resumable, find_run, make_run_dir, resumed_settings, save_checkpoint,
)  # fmt: skip

WIDE = SignalSettings(ppo_clip_low=0.5, ppo_clip_high=100.0)
EVERYTHING = asdict(TrainSettings()) | asdict(SignalSettings()) | asdict(RolloutSettings()) | asdict(EnvironmentSettings())
PROGRESS = Progress(0, 0, 0, "games", EVERYTHING, {"torch": "1"})


@pytest.fixture(scope="module")
def base(tmp_path_factory, chatml_tokenizer):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    chatml_tokenizer.save_pretrained(folder)
    return str(folder)


def learn(policy, update):
    generator = torch.Generator().manual_seed(update)
    tokens = torch.randint(0, 600, (30,), generator=generator).tolist()
    policy.accumulate(make_datum(tokens, [(9, 14), (20, 27)], [[-6.0] * 5, [-6.5] * 7], [0.5, 0.5]), WIDE)
    policy.step(1.0)


def tensors(policy):
    state = [value for moments in policy.optimizer.state.values() for value in moments.values()]
    return [parameter.detach().clone() for parameter in policy.parameters] + [value.clone() for value in state]


@pytest.fixture
def make(base):
    return lambda rank=4: Policy(base, lora_rank=rank, learning_rate=1e-2, device="cpu", seed=3)


@pytest.fixture
def run_dir(tmp_path):
    make_run_dir(tmp_path / "runs" / "one", EVERYTHING)
    return tmp_path / "runs" / "one"


@pytest.fixture
def saved(run_dir, make):
    """A run with the checkpoints of its updates 1 to 3, and its policy."""
    policy = make()
    for update in (1, 2, 3):
        learn(policy, update)
        save_checkpoint(run_dir, policy, replace(PROGRESS, update=update, weights_version=update), keep=0)
    return run_dir / "checkpoints", policy


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [4, 0])
def test_a_loaded_policy_goes_on_to_the_bit(run_dir, make, rank):
    policy = make(rank)
    for update in (1, 2):
        learn(policy, update)
    before = replace(PROGRESS, update=2, weights_version=2, metrics_bytes=77)
    folder = save_checkpoint(run_dir, policy, before, keep=0)
    assert read_checkpoint(folder) == before
    other = make(rank)
    assert not other.differs_from_base()
    begin(other, folder)
    assert other.differs_from_base()
    for ours, theirs in zip(tensors(policy), tensors(other), strict=True):
        assert torch.equal(ours, theirs)
    for update in (3, 4):
        learn(policy, update)
        learn(other, update)
    for ours, theirs in zip(tensors(policy), tensors(other), strict=True):
        assert torch.equal(ours, theirs)


def test_saved_sampler_weights_are_a_plain_peft_adapter_with_where_they_come_from(saved, base):
    folder, policy = saved[0] / "update-0003", saved[1]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder / "sampler")
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, policy.model(tokens).logits, rtol=1e-4, atol=1e-4)
    about = json.loads((folder / "sampler" / "training.json").read_text())
    assert about["update"] == 3 and about["run"] == "one" and about["settings"] == EVERYTHING
    assert not list(saved[0].glob("*.partial"))


def test_every_weight_is_saved_as_a_plain_model_with_its_tokenizer(run_dir, make):
    policy = make(0)
    learn(policy, 1)
    folder = save_checkpoint(run_dir, policy, replace(PROGRESS, update=1), keep=0) / "sampler"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    names = {name for name, _ in policy.merged_tensors()}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < names
    for name, value in plain.state_dict().items():
        assert torch.equal(value, policy.model.state_dict()[name])
    assert (folder / "tokenizer.json").exists() and not list(folder.glob("*.bin"))


def test_no_generator_that_lives_on_is_drawn_from(base, tmp_path):
    results = []
    for seed in (0, 1):
        policy = Policy(base, lora_rank=4, learning_rate=1e-2, device="cpu", seed=3)
        for update in (1, 2):
            torch.manual_seed(seed * 100 + update)
            random.seed(seed)
            learn(policy, update)
        results.append(tensors(policy))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_only_the_newest_are_kept(run_dir, make):
    policy = make()
    for update in (1, 2, 9, 10):
        save_checkpoint(run_dir, policy, replace(PROGRESS, update=update), keep=2)
    assert sorted(os.listdir(run_dir / "checkpoints")) == ["latest", "update-0009", "update-0010"]
    assert (run_dir / "checkpoints" / "latest").resolve().name == "update-0010"


def test_of_few_none_is_dropped_and_later_ones_of_before_going_back_do_not_count(run_dir, make):
    policy, root = make(), run_dir / "checkpoints"
    for update, left in ((2, "2"), (4, "24"), (6, "246"), (8, "468"), (2, "2468"), (3, "23468"), (7, "4678"), (9, "789")):
        save_checkpoint(run_dir, policy, replace(PROGRESS, update=update), keep=3)
        assert [path.name[-1] for path in sorted(root.glob("update-*"))] == [*left]
        assert (root / "latest").resolve() == (root / f"update-000{update}").resolve()


def test_a_save_cut_short_anywhere_leaves_the_one_before(saved, run_dir, make, monkeypatch):
    """Every call that changes the disk is made to fail in turn, as a full disk or kill -9 would have it."""
    policy, checkpoints = saved[1], saved[0]
    learn(policy, 4)
    calls, stop_at = 0, 0

    def failing(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    for module in (train, safetensors.torch):  # where it is imported, and where it is imported from later
        monkeypatch.setattr(module, "save_file", failing(safetensors.torch.save_file))
    for name in ("rename", "replace", "symlink_to", "mkdir", "write_text"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
    while True:
        stop_at, calls = stop_at + 1, 0
        try:
            save_checkpoint(run_dir, policy, replace(PROGRESS, update=4), keep=0)
            break
        except OSError as error:
            assert "the disk is full" in str(explain(error)), repr(error)
            found = find_run(str(run_dir), "", "")[1]
            assert found.name in ("update-0003", "update-0004")
            assert read_checkpoint(found).update == int(found.name[-4:])
            if found.name == "update-0003":
                shutil.rmtree(checkpoints / "update-0004", ignore_errors=True)
    assert stop_at > 15 and find_run(str(run_dir), "", "")[1].name == "update-0004"


# --- damage and malice ----------------------------------------------------------------------------------------------


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(content)


def test_damage_in_any_file_is_named_and_the_one_before_offered(saved, tmp_path):
    checkpoints, _ = saved
    sound = tmp_path / "sound"
    shutil.copytree(checkpoints / "update-0003", sound)
    damages = {
        "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
        "emptied": lambda path: os.truncate(path, 0),
        "flipped at the start": lambda path: flip(path, 0),
        "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
        "flipped at the end": lambda path: flip(path, -2),
        "missing": lambda path: path.unlink(),
    }
    assert len(files_of(sound)) == 6
    for file in files_of(sound):
        for damage in damages.values():
            damage(checkpoints / "update-0003" / file)
            with pytest.raises(CheckpointError) as refused:
                read_checkpoint(checkpoints / "update-0003")
            assert Path(file).name in str(refused.value) and str(checkpoints / "update-0002") in str(refused.value)
            shutil.copy(sound / file, checkpoints / "update-0003" / file)
            read_checkpoint(checkpoints / "update-0003")
    flip(checkpoints / "update-0003" / "state" / "optimizer.safetensors", 100)
    flip(checkpoints / "update-0002" / "state" / "optimizer.safetensors", 100)
    with pytest.raises(CheckpointError, match="--resume .*update-0001$"):
        read_checkpoint(checkpoints / "update-0003")
    shutil.rmtree(checkpoints / "update-0001")
    with pytest.raises(CheckpointError, match="there is no sound one before it"):
        read_checkpoint(checkpoints / "update-0003")


def seal(folder):
    """Right checksums for whatever is in the folder: only what is inside can then give it away."""
    files = [path for path in files_of(folder) if path.name != data.CHECKSUMS]
    (folder / data.CHECKSUMS).write_text("".join(f"{data.sha256_of(folder / path)}  {path}\n" for path in files))


class Evil:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return (os.mkdir, (self.target,))


def test_nothing_in_a_checkpoint_is_run(saved, make, tmp_path):
    folder = saved[0] / "update-0003"
    for content in (pickle.dumps(Evil(tmp_path / "ran")), b"", b"PK\x03\x04", b"junk"):
        (folder / "state" / "optimizer.safetensors").write_bytes(content)
        seal(folder)
        read_checkpoint(folder)
        with pytest.raises(CheckpointError, match="optimizer.safetensors is no state of this run's optimizer"):
            begin(make(), folder)
    torch.save(Evil(tmp_path / "ran"), folder / "state" / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="optimizer.safetensors is no state of this run's optimizer"):
        begin(make(), folder)
    assert not (tmp_path / "ran").exists()


def test_an_adam_state_of_other_weights_is_refused(saved, make, run_dir):
    other = make(8)
    learn(other, 1)
    folder = save_checkpoint(run_dir, other, replace(PROGRESS, update=9), keep=0)
    shutil.copy(folder / "state" / data.ADAM, saved[0] / "update-0003" / "state" / data.ADAM)
    with pytest.raises(CheckpointError, match="moments of another shape than weight 0"):
        begin(make(4), saved[0] / "update-0003")


def test_checksums_cannot_point_outside(saved, tmp_path):
    folder = saved[0] / "update-0003"
    with (folder / data.CHECKSUMS).open("a") as file:
        file.write(f"{'0' * 64}  ../../../../etc/passwd\n")
    with pytest.raises(CheckpointError, match="which is outside"):
        read_checkpoint(folder)


def mutated(text, rng):
    """A settings or progress file that someone has been at."""
    about = json.loads(text)
    kind = rng.randrange(9)
    if kind == 0:
        return text[: rng.randrange(len(text))].encode()
    if kind == 1:
        at = rng.randrange(len(text))
        return text[:at].encode() + bytes([rng.randrange(256)]) + text[at + 1 :].encode()
    if kind == 2:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    if kind == 3:
        return b"[" * rng.choice((10, 100_000))
    if kind == 4:
        return text.replace("0", rng.choice(("NaN", "Infinity", "9" * 5000, "-1", "1e999", '"0"', "null"))).encode()
    target = rng.choice([about, about.get("settings", about)])
    name = rng.choice(sorted(target))
    if kind == 5:
        del target[name]
    else:
        target[name] = rng.choice(
            (None, -1, "", "x" * 100_000, [], {}, {"a": [None]}, True, 1e308, 2**70, "\ud800", "\0", "../../x", [[]] * 50)
        )
    return json.dumps(about, allow_nan=True).encode()


def test_a_thousand_spoilt_checkpoints_give_one_clear_error_or_the_right_result(saved, make):
    rng, (checkpoints, _) = random.Random(0), saved
    folder = checkpoints / "update-0003"
    path = folder / "state" / "training.json"
    sound, refused, accepted = path.read_text(), 0, 0
    settings_file = checkpoints.parent / "settings.json"
    listed = files_of(folder)
    policy = make()
    for number in range(1000):
        args = types.SimpleNamespace(resume=str(folder))
        if number % 4 == 0:  # any file, whose checksum gives it away
            victim = folder / rng.choice(listed)
            before = victim.read_bytes()
            victim.write_bytes(before[: rng.randrange(len(before))] + bytes([rng.randrange(256)]))
        elif number % 4 == 1:  # Adam's state, sealed
            victim = folder / "state" / "optimizer.safetensors"
            before = victim.read_bytes()
            spoilt = bytearray(before)
            for _ in range(rng.randrange(1, 40)):
                spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
            victim.write_bytes(spoilt[: rng.choice((len(spoilt), rng.randrange(len(spoilt))))])
            seal(folder)
        else:  # where the run stands and its settings, sealed; before the first checkpoint, the run's settings
            victim = path if number % 4 == 2 else settings_file
            before = victim.read_bytes()
            victim.write_bytes(mutated(sound if victim == path else before.decode(), rng))
            seal(folder)
            args.resume = str(folder if victim == path else checkpoints.parent)
            if victim == settings_file:
                checkpoints.rename(checkpoints.with_name("aside"))
        try:
            settings = build_settings(
                types.SimpleNamespace(), resumed_settings(args), TrainSettings, RolloutSettings, EnvironmentSettings
            )
            if number % 4 == 1:
                begin(policy, folder)
            assert len(settings) == 3
            accepted += 1
        except (CheckpointError, SettingsError, ValueError) as error:
            assert type(error) in (CheckpointError, SettingsError) or type(error).__module__ == "builtins"
            assert "\n" not in str(error) and len(str(error)) < 2000
            refused += 1
        finally:
            if checkpoints.with_name("aside").exists():
                checkpoints.with_name("aside").rename(checkpoints)
            victim.write_bytes(before)
            seal(folder)
    assert refused > 700 and accepted > 20
    assert read_checkpoint(folder).update == 3


# --- going on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"learning_rate": 1e-5}, "--learning-rate was 1e-06 in the run that is resumed and is now 1e-05"),
        ({"seed": 1}, "--seed was 42"), ({"group_size": 4}, "--group-size was 8"), ({"dtype": "float32"}, "--dtype was 'auto'"),
        ({"include_admissible_actions": False}, "--include-admissible-actions was True"), ({"lora_rank": 0}, "--lora-rank was 32"),
    ],
)  # fmt: skip
def test_a_setting_that_would_alter_the_result_is_refused_by_name(changed, flag):
    with pytest.raises(CheckpointError) as refused:
        check_resumable(replace(PROGRESS, update=2), EVERYTHING | changed, "games")
    assert flag in str(refused.value)


def test_harmless_settings_may_change_and_other_versions_are_named(capsys):
    harmless = {"max_steps": 100, "save_every": 1, "swanlab_mode": "disabled", "keep_checkpoints": 3, "workers": 4}
    check_resumable(replace(PROGRESS, update=2), EVERYTHING | harmless, "games")
    assert "torch was 1 when the run was saved and is now " in capsys.readouterr().out


def test_other_games_and_a_finished_run_are_refused():
    with pytest.raises(CheckpointError, match="the games in .* are not those the run began with"):
        check_resumable(PROGRESS, EVERYTHING, "others")
    with pytest.raises(CheckpointError, match="the run has done 80 updates, and --max-steps is 80"):
        check_resumable(replace(PROGRESS, update=80), EVERYTHING, "games")


def test_which_run_and_checkpoint_is_meant(saved, tmp_path):
    checkpoints, _ = saved
    runs = tmp_path / "runs"
    make_run_dir(runs / "young", EVERYTHING)
    os.utime(runs / "young", (1, 1))
    last = (checkpoints / "update-0003").resolve()
    assert find_run("auto", str(runs), "") == (runs / "one", last)
    assert find_run("auto", str(runs), "young") == (runs / "young", None)
    assert find_run(str(runs / "one"), "", "") == (runs / "one", last)
    assert find_run(str(checkpoints / "update-0001"), "", "")[1].name == "update-0001"
    data.point_to(checkpoints / "update-0002")  # gone back to: that is where the run stands
    assert find_run("auto", str(runs), "one")[1].name == "update-0002"
    (checkpoints / "latest").unlink()
    assert find_run("auto", str(runs), "one")[1] == last
    for missing in (str(tmp_path), str(tmp_path / "nothing"), "auto"):
        with pytest.raises(CheckpointError, match="there is no run in"):
            find_run(missing, str(tmp_path / "empty"), "")


def test_settings_come_from_the_run_and_flags_win(saved):
    folder = saved[0] / "update-0002"
    args = types.SimpleNamespace(resume=str(folder), max_steps=5)
    settings, *_ = build_settings(args, resumed_settings(args), TrainSettings)
    found = {name: usable_path(getattr(TrainSettings, name)) for name in ("data_root", "runs_dir")}  # if they are there
    assert settings == replace(TrainSettings(), max_steps=5, resume=str(folder), **found)
    assert resumed_settings(types.SimpleNamespace()) == {}


def test_auto_begins_a_run_that_is_not_there_and_goes_on_with_one_that_is(saved):
    runs = saved[0].parent.parent
    args = types.SimpleNamespace(resume="auto", runs_dir=str(runs), run_name="two")
    assert resumed_settings(args) == {} and args.resume == ""
    args = types.SimpleNamespace(resume="auto", runs_dir=str(runs), run_name="one")
    assert resumed_settings(args) and args.resume == str(runs / "one")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "the disk is full"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "--head-chunk"),
        (FloatingPointError("loss is nan"), "loss is nan"),
        (CheckpointError("x"), "x"),
    ],
)
def test_errors_with_a_known_cause_end_in_one_line(error, text):
    assert text in explain(error)
    assert "\n" not in explain(error)


def test_a_defect_keeps_its_traceback():
    assert explain(KeyError("x")) is None
