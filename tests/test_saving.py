"""Saving a whole model: with the generation config that the base has, and tried before anything is learned."""

import json
import shutil

import pytest
import torch
from conftest import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import train
from data import Progress, SettingsError
from protocol import load_chat_tokens
from train import Policy, save_checkpoint, try_saving

GENERATION = {
    "as the base's": None,
    "sampling off, and a temperature": {"do_sample": False, "temperature": 0.7, "top_k": 3, "eos_token_id": [2, 5]},
    "penalties without beams": {"length_penalty": 2.0, "early_stopping": True, "eos_token_id": 2},
    "a negative pad": {"pad_token_id": -1, "eos_token_id": 2},
    "none": {},
}


@pytest.fixture
def base(tmp_path):
    shutil.copytree(ROOT / "datasets" / "demo" / "model", tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


@pytest.mark.parametrize("about", GENERATION.values(), ids=GENERATION)
def test_a_whole_model_is_saved_with_its_bases_generation_config_whatever_that_says(base, run_dir, about):
    path = base / "generation_config.json"
    if about == {}:
        path.unlink()
    elif about:
        path.write_text(json.dumps(about))
        with pytest.raises(ValueError, match="Fix these issues to save"):
            GenerationConfig.from_pretrained(base).save_pretrained(run_dir)  # what transformers makes of it
    try_saving(run_dir, str(base), lora_rank=0)
    assert not list((run_dir / "checkpoints").iterdir())
    policy = Policy(str(base), lora_rank=0, device="cpu")
    sampler = save_checkpoint(run_dir, policy, Progress(1, 1, 0, "games", {}, {}), keep=0) / "sampler"
    saved = sampler / "generation_config.json"
    assert saved.exists() == path.exists() and (not path.exists() or saved.read_bytes() == path.read_bytes())
    assert load_chat_tokens(str(sampler)).stop_token_ids == load_chat_tokens(str(base)).stop_token_ids
    weights = AutoModelForCausalLM.from_pretrained(sampler).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in policy.model.state_dict().items())


def test_what_is_tried_is_all_that_is_saved_but_the_weights(base, run_dir, monkeypatch):
    """Of every weight and of an adapter; so a file that cannot be written is found by trying."""
    monkeypatch.setattr(train.shutil, "rmtree", lambda *args, **kwargs: None)
    for lora_rank, weights in ((0, {"model.safetensors"}), (4, {"model.safetensors", "adapter_model.safetensors"})):
        try_saving(run_dir, str(base), lora_rank)
        Policy(str(base), lora_rank=lora_rank, device="cpu").save(run_dir / "saved")
        tried, saved = ({path.name for path in (run_dir / folder).iterdir()} for folder in ("checkpoints/trial.partial", "saved"))
        assert tried | weights == saved
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")
    for name in names:
        contents = [json.loads((run_dir / folder / name).read_text()) for folder in ("checkpoints/trial.partial", "saved")]
        if name == "config.json":
            contents = [about | {"dtype": "float32", "use_cache": False} for about in contents]
        assert contents[0] == contents[1], name


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), TypeError("no")])
def test_a_model_that_cannot_be_saved_is_refused_by_its_reason(base, run_dir, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(type(AutoConfig.from_pretrained(base)), "save_pretrained", fail)
    with pytest.raises(SettingsError, match=f"could be trained, but not saved: {type(error).__name__}: no; mend that"):
        try_saving(run_dir, str(base), lora_rank=0)
    assert not list((run_dir / "checkpoints").iterdir())
