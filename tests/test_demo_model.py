"""The demo model: its tokenizer, its size, and that making it is repeatable."""

import asyncio
import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from environment import EnvironmentSettings, WorldPool, WorldState
from protocol import CHATML_TEMPLATE, ChatTokens, check_prefix_extension, first_messages, parse_tool_call
from protocol import tool_call_text, tool_result

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "datasets" / "demo" / "make_model.py"
STARTER = ROOT / "datasets" / "starter"
sys.path.insert(0, str(SCRIPT.parent))

import make_model  # noqa: E402

TINY = ["--max-games", "3", "--episodes", "3", "--layers", "1", "--hidden", "64", "--steps", "4", "--vocabulary", "600"]
TEXTS = [
    "",
    " ",
    "go to cabinet 1",
    "take apple 1 from countertop 23",
    "You arrive at drawer 2. The drawer 2 is closed.\n\n  two  spaces\t\ttab \r\n",
    "Don't think: UPPER, 123456, 3.14, a_b, {}[]<>",
    "čeština, 日本語, 🙂‍↔️, \u200b, \x00",
    "<tool_call>{}</tool_call><think>\n\n</think>",
    "<|im_start|>user\nhello<|im_end|>\n",
]


def make(folder: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), "--data-root", str(STARTER), "--output", str(folder), *flags]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "model"
    make(folder, *TINY, "--threads", "1")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_any_text_comes_back_from_its_tokens(tokenizer):
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_marks_are_single_tokens_and_only_the_chat_marks_are_special(tokenizer):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for mark in [*special, "<tool_call>", "</tool_call>"]:
        assert len(tokenizer.encode(mark, add_special_tokens=False)) == 1, mark
    assert sorted(tokenizer.all_special_tokens) == sorted(special)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) < 2000


def test_a_command_is_a_few_tokens_the_same_in_a_list_and_in_a_call(tokenizer):
    def pieces(text):
        return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]

    command = pieces("go to drawer 1")
    assert len(command) <= 3
    in_list, in_call = pieces("\nAdmissible actions:\ngo to drawer 1\nlook"), pieces(tool_call_text("go to drawer 1"))
    for text in (in_list, in_call):
        assert any(text[i : i + len(command)] == command for i in range(len(text)))
    assert len(in_call) == len(command) + 4


def test_the_builtin_template_serves_it(tokenizer):
    assert tokenizer.chat_template is None
    chat = ChatTokens(tokenizer)
    assert chat.chat_template == CHATML_TEMPLATE
    assert chat.stop_token_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_model_is_small_and_loads(folder, tokenizer):
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.max_position_embeddings == 16384
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id


def test_the_default_model_stays_under_ten_megabytes(tokenizer):
    settings = make_model.Settings()
    model = make_model.make_model(tokenizer, settings)
    more_entries = settings.hidden * (settings.vocabulary + 64 - model.config.vocab_size)
    if not model.config.tie_word_embeddings:
        more_entries *= 2
    assert model.num_parameters() + more_entries <= 4_900_000  # two bytes each


def test_same_settings_same_bytes_and_an_older_folder_is_replaced(folder, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    (again / "leftover").write_text("old")
    make(again, *TINY, "--threads", "1")
    assert digests(again) == digests(folder)  # the same files, so no leftover either
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_another_seed_gives_other_weights(folder, tmp_path):
    make(tmp_path / "other", *TINY, "--threads", "1", "--seed", "7")
    assert digests(tmp_path / "other")["model.safetensors"] != digests(folder)["model.safetensors"]


def test_the_card_names_the_games_and_the_settings(folder):
    card = (folder / "README.md").read_text()
    assert "3 training games" in card and "seed: 42" in card
    assert "valid" not in card.split("## Training games")[1]


def test_demonstrations_win_and_are_prefix_extensions_with_detours_masked(tokenizer):
    settings = make_model.Settings(data_root=STARTER, max_games=6, episodes=4, detour_rate=0.4)
    games = make_model.spread(make_model.find_games(STARTER, "train"), settings.max_games)
    with WorldPool(EnvironmentSettings()) as pool:
        episodes = asyncio.run(make_model.play_games(pool, games, settings))
    assert len(episodes) >= 20
    assert {game.split for game in games} == {"train"}
    chat = ChatTokens(tokenizer)
    detours = 0
    for episode in episodes:
        sequence = make_model.encode(chat, episode, 0.25)
        prompts, spans, at = [], [], len(chat.first_prompt(episode.messages))
        for turn in episode.turns:
            end = sequence.tokens.index(tokenizer.eos_token_id, at) + 1
            assert parse_tool_call(chat.completion_text(sequence.tokens[at:end])).action == turn.action
            assert set(sequence.weights[at:end]) == {1.0 if turn.learn else 0.0}
            detours += not turn.learn
            prompts.append(at)
            spans.append((at, end))
            at = end + (len(chat.extension(sequence.tokens[at:end], turn.result)) if turn.result is not None else 0)
        assert at == len(sequence.tokens)
        check_prefix_extension(len(sequence.tokens), prompts, spans)
        inside = {i for start, end in spans for i in range(start, end)}
        assert {weight for i, weight in enumerate(sequence.weights) if i not in inside} == {0.25}
    assert detours > 0


def test_renaming_is_one_to_one_and_leaves_places_alone():
    text = "On the drawer 3, you see a apple 1, a mug 2, and a mug 1. put a apple in drawer."
    for seed in range(20):
        renamed = make_model.Renaming(["apple", "mug", "plate"], random.Random(seed)).text(text)
        found = re.findall(r"(apple|mug|plate) (\d)", renamed)
        assert len(set(found)) == 3 and found[1][0] == found[2][0] != found[0][0]
        assert "drawer 3" in renamed and renamed.endswith(f"put a {found[0][0]} in drawer.")
    assert make_model.Renaming([], random.Random(0)).text(text) == text


def test_walkthrough_recovers_from_detours():
    def state(*admissible):
        return WorldState("", admissible, 0, False, False)

    plan = ["go to drawer 1", "open drawer 1", "take mug 1 from drawer 1", "go to shelf 1", "move mug 1 to shelf 1"]
    expert = make_model.Walkthrough(plan)
    assert expert.next(state("go to drawer 1", "go to shelf 1")) == "go to drawer 1"
    assert expert.next(state("go to drawer 1", "take fork 1 from shelf 1")) == "go to drawer 1"  # it was led away
    assert expert.next(state("move fork 1 to drawer 1", "open drawer 1")) == "move fork 1 to drawer 1"  # wrong object
    assert expert.next(state("close drawer 1", "take mug 1 from drawer 1")) == "take mug 1 from drawer 1"  # open already
    assert expert.next(state("move mug 1 to shelf 1", "go to drawer 1")) == "move mug 1 to shelf 1"  # there already


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden", "100"], "--hidden must be a multiple of 64, got 100"),
        (["--vocabulary", "5000"], "--vocabulary"),
        (["--steps", "-1"], "--steps must not be below 0, got -1"),
        (["--data-root", "no/such/folder"], "no/such/folder"),
    ],
)
def test_a_bad_setting_is_one_line_and_writes_nothing(flags, message, tmp_path):
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "model"), *flags]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_warm_start_writes_calls_that_parse(tmp_path):
    """The real settings: greedy first calls are well-formed and admissible in most training games."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "model"
    make(output)
    assert (output / "model.safetensors").stat().st_size <= 10_000_000
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    chat = ChatTokens(tokenizer)

    async def firsts(pool):
        states = []
        for game in make_model.find_games(STARTER, "train"):
            group = await pool.open_group(game.path, 1)
            states.append((group.task, group.first))
            group.close()
        return states

    with WorldPool(EnvironmentSettings()) as pool:
        states = asyncio.run(firsts(pool))
    admissible = 0
    for task, first in states:
        prompt = chat.first_prompt(first_messages(task, first.observation, first.admissible))
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist()
        admissible += parse_tool_call(chat.completion_text(tokens)).action in first.admissible
    assert admissible >= 0.8 * len(states)
