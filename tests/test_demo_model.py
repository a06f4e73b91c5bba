"""The demo model: its expert, its tokenizer, its sequences, and that making it is repeatable and can be interrupted."""

import hashlib
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data import TASK_TYPES
from environment import World, compile_game
from protocol import CHATML_TEMPLATE, ChatTokens, check_prefix_extension, parse_tool_call, tool_call_text

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "datasets" / "demo" / "make_model.py"
STARTER = ROOT / "datasets" / "starter"
sys.path.insert(0, str(SCRIPT.parent))

import episodes  # noqa: E402
import make_model  # noqa: E402
from expert import TASK, Expert  # noqa: E402

TINY = (
    "--max-games 6 --held-out 2 --episodes 2 --layers 1 --hidden 64 --vocabulary 600 --steps 5 --batch-tokens 1500 "
    "--max-episode-steps 30"
).split()
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


def make(folder: Path, work: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), "--data-root", str(STARTER)]
    command += ["--output", str(folder), "--work-dir", str(work), *flags]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model folder, and the work folder it came from."""
    base = tmp_path_factory.mktemp("demo")
    make(base / "model", base / "work", *TINY)
    return base


@pytest.fixture(scope="module")
def folder(made):
    return made / "model"


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def games():
    return make_model.find_games(STARTER, "train")


@pytest.fixture(scope="module")
def surveyed(games):
    return episodes.survey(games)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# --- expert ---------------------------------------------------------------------------------------------------------


def finish(world, expert, state, reply, steps):
    """Let the expert play on; returns its actions and the last reply."""
    actions = []
    while not reply[4] and len(actions) < steps:
        actions.append(expert.action())
        assert actions[-1] in reply[1], "the expert does what is admissible"
        state, reply = world.step(state, reply, actions[-1])
        expert.see(reply[0], reply[1])
    return actions, reply


def test_the_expert_wins_games_of_every_task_type(games, surveyed):
    lost = []
    for game in games:
        world = World(compile_game(game.path))
        expert, (state, reply) = Expert(world.task, surveyed[0]), world.start()
        expert.see(reply[0], reply[1])
        if not finish(world, expert, state, reply, 50)[1][3]:
            lost.append(game.game_id)
    assert {game.task_type for game in games} == set(TASK_TYPES)
    assert lost == []


def test_the_expert_wins_from_wherever_random_actions_have_led(games, surveyed):
    won = 0
    for number, game in enumerate(games):
        rng, world = random.Random(number), World(compile_game(game.path))
        expert, (state, reply) = Expert(world.task, surveyed[0]), world.start()
        expert.see(reply[0], reply[1])
        for _ in range(20):
            action = episodes.detour(reply[1], rng)
            state, reply = world.step(state, reply, action)
            expert.see(reply[0], reply[1])
        won += finish(world, expert, state, reply, 50)[1][3]
    assert won >= 0.97 * len(games)


def test_the_expert_knows_only_what_was_shown(surveyed):
    """A made-up room: it opens what is closed, takes the right type, uses the right place, puts a wrong object away."""
    expert = Expert("put a hot mug in shelf.", surveyed[0])
    go = [f"go to {place}" for place in ("cabinet 1", "cabinet 2", "microwave 1", "shelf 1")]

    def here(place, *more):
        return [f"examine {place}", *(action for action in go if not action.endswith(place)), *more]

    expert.see("You are in the middle of a room. Looking quickly around you, you see a cabinet 1.", go)
    first = expert.action()
    assert first in go
    expert.see("You arrive at cabinet 2. The cabinet 2 is closed.", here("cabinet 2", "open cabinet 2"))
    assert expert.action() == "open cabinet 2"
    shown = "You open the cabinet 2. The cabinet 2 is open. In it, you see a fork 1, and a mug 2."
    takes = ("close cabinet 2", "take fork 1 from cabinet 2", "take mug 2 from cabinet 2")
    expert.see(shown, here("cabinet 2", *takes))
    assert expert.action() == "take mug 2 from cabinet 2"
    expert.see(
        "You pick up the fork 1 from the cabinet 2.",  # the wrong one
        here("cabinet 2", "close cabinet 2", "examine fork 1", "move fork 1 to cabinet 2"),
    )
    assert expert.action() == "move fork 1 to cabinet 2"
    expert.see("You move the fork 1 to the cabinet 2.", here("cabinet 2", *takes))
    assert expert.action() == "take mug 2 from cabinet 2"
    expert.see(
        "You pick up the mug 2 from the cabinet 2.",
        here("cabinet 2", "close cabinet 2", "examine mug 2", "move mug 2 to cabinet 2"),
    )
    assert expert.action() == "go to microwave 1"
    heat = here("microwave 1", "open microwave 1", "examine mug 2", "heat mug 2 with microwave 1")
    expert.see("You arrive at microwave 1. The microwave 1 is closed.", heat)
    assert expert.action() == "heat mug 2 with microwave 1"
    expert.see("Nothing happens.", heat)
    assert expert.action() == "heat mug 2 with microwave 1"
    expert.see("You heat the mug 2 using the microwave 1.", heat)
    assert expert.action() == "go to shelf 1"


@pytest.mark.parametrize(
    ("task", "wanted", "goal", "verb"),
    [
        ("look at pillow under the desklamp.", "pillow", None, None),
        ("examine the cd with the desklamp.", "cd", None, None),
        ("put a candle in toilet.", "candle", "toilet", None),
        ("put some cd on shelf.", "cd", "shelf", None),
        ("put a clean mug in coffeemachine.", "mug", "coffeemachine", "clean"),
        ("clean some pan and put it in cabinet.", "pan", "cabinet", "clean"),
        ("put a hot egg in fridge.", "egg", "fridge", "heat"),
        ("heat some cup and put it in cabinet.", "cup", "cabinet", "heat"),
        ("put a cool bread in countertop.", "bread", "countertop", "cool"),
        ("put two cd in drawer.", "cd", "drawer", None),
        ("find two candle and put them in cabinet.", "candle", "cabinet", None),
    ],
)
def test_every_wording_of_a_task_is_understood(task, wanted, goal, verb, surveyed):
    expert = Expert(task, surveyed[0])
    assert (expert.wanted, expert.goal, expert.verb) == (wanted, goal, verb)
    assert TASK.match(task)["two"] == ("two" if "two" in task else None)


# --- demonstrations and their tokens --------------------------------------------------------------------------------


def test_demonstrations_are_written_as_a_rollout_writes_them(tokenizer, games, surveyed):
    how = {"renamed": 0.5, "detours": True, "max_steps": 50, "seed": 1}
    played = list(episodes.demonstrations(games[::8], 4, surveyed[0], surveyed[2], **how))
    assert len(played) >= 0.9 * 4 * len(games[::8])
    chat, detours = ChatTokens(tokenizer), 0
    for episode in played:
        sequence = episodes.encode_episode(chat, episode)
        messages, prompts, spans = list(episode.messages), [], []
        expected = chat.first_prompt(messages)
        for turn in episode.turns:
            call = [*tokenizer.encode(tool_call_text(turn.action)), tokenizer.eos_token_id]
            assert parse_tool_call(chat.completion_text(call)).action == turn.action
            start, end = len(expected), len(expected) + len(call)
            prompts.append(start)
            spans.append((start, end))
            expected = [*expected, *call]
            if turn.result is not None:
                expected += chat.extension(call, turn.result)
            learned = sequence.codes_T[start:end].count(episodes.LEARN)
            if turn.action == turn.label:
                assert learned == len(call) and sequence.targets_T[start:end] == call
            else:
                detours += 1
                label = episodes.call_tokens(chat, turn.label)
                assert sequence.targets_T[start : start + learned] == label[:learned]
                assert call[:learned] != label[:learned] and call[: learned - 1] == label[: learned - 1]
                assert set(sequence.codes_T[start + learned : end]) <= {episodes.SKIP}
        assert sequence.tokens_T == expected
        check_prefix_extension(len(expected), prompts, spans)
        inside = {i for start, end in spans for i in range(start, end)}
        outside = [i for i in range(len(expected)) if i not in inside]
        assert {sequence.codes_T[i] for i in outside} == {episodes.READ}
        assert all(sequence.targets_T[i] == expected[i] for i in outside)
    assert detours > 20


def test_renaming_goes_back_and_leaves_places_alone():
    kinds = ["apple", "mug", "plate"]
    for seed in range(20):
        names = episodes.Renaming(kinds, random.Random(seed))
        shown = names.text("take mug 2 from drawer 3")
        assert re.fullmatch(r"take (apple|mug|plate) 2 from drawer 3", shown)
        assert names.real(shown) == "take mug 2 from drawer 3"
        assert {names.text(each) for each in kinds} == set(kinds)
    assert episodes.Renaming([], random.Random(0)).text("a mug 1") == "a mug 1"


def test_sequences_come_back_from_the_disk(tmp_path):
    made = [episodes.Encoded([1, 2, 3], [1, 5, 3], [1, 2, 0]), episodes.Encoded([4], [4], [1])]
    episodes.save_sequences(tmp_path / "x.npz", made)
    back = episodes.load_sequences(tmp_path / "x.npz")
    assert [[list(part) for part in (s.tokens_T, s.targets_T, s.codes_T)] for s in back] == [
        [s.tokens_T, s.targets_T, s.codes_T] for s in made
    ]


# --- tokenizer ------------------------------------------------------------------------------------------------------


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


def test_a_command_is_a_few_tokens_and_an_object_type_the_same_everywhere(games, surveyed):
    yields, places, kinds = surveyed
    how = {"renamed": 0.5, "detours": True, "max_steps": 50, "seed": 1}
    played = list(episodes.demonstrations(games, 1, yields, kinds, **how))
    tokenizer = episodes.tokenizer_for(played, places, 1600)

    def pieces(text):
        return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces(tool_call_text("go to drawer 1"))[1:-1] == ["go to drawer 1"]
    assert pieces(tool_call_text("take mug 1 from cabinet 1"))[1:-1] == ["take", " mug", " 1", " from cabinet 1"]
    for text in ("put a hot mug in cabinet.", "On the cabinet 1, you see a mug 1.", "\ntake mug 1 from cabinet 1"):
        assert " mug" in pieces(text)
    turns = [turn for episode in played for turn in episode.turns if turn.result]
    tokens = sum(len(tokenizer.encode(turn.result)) for turn in turns)
    assert tokens / len(turns) < 70


def test_the_builtin_template_serves_it(tokenizer):
    assert tokenizer.chat_template is None
    chat = ChatTokens(tokenizer)
    assert chat.chat_template == CHATML_TEMPLATE
    assert chat.stop_token_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


# --- model and training ---------------------------------------------------------------------------------------------


def test_model_is_small_and_loads(folder, tokenizer):
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.max_position_embeddings == 16384
    assert not model.config.tie_word_embeddings  # a tied head cannot be reloaded into a running CPU engine
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id


def test_the_default_model_stays_under_ten_megabytes(tokenizer):
    settings = make_model.Settings()
    model = make_model.make_model(tokenizer, settings)
    more_entries = 2 * settings.hidden * (settings.vocabulary + 64 - model.config.vocab_size)
    assert model.num_parameters() + more_entries <= 4_900_000  # two bytes each


def test_a_model_read_in_pieces_answers_as_in_one(folder, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model, rng = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), random.Random(0)
    rows = [[rng.randrange(len(tokenizer)) for _ in range(length)] for length in (30, 7, 19)]
    with torch.no_grad():
        cache, at = make_model.Cache(model, 3), [0, 0, 0]
        for until in ((12, 3, 0), (12, 7, 1), (29, 7, 18), (30, 7, 19)):
            logits = cache.read([row[a:b] for row, a, b in zip(rows, at, until, strict=True)])
            at = until
        for k in (0, 2):
            torch.testing.assert_close(logits[k], model(torch.tensor([rows[k]])).logits[0, -1], atol=1e-4, rtol=1e-4)
        cache.keep([2])
        again = cache.read([[5]])
        torch.testing.assert_close(again[0], model(torch.tensor([[*rows[2], 5]])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_same_settings_same_bytes_and_an_older_folder_is_replaced(folder, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    (again / "leftover").write_text("old")
    make(again, tmp_path / "work", *TINY)
    assert digests(again) == digests(folder)  # the same files, so no leftover either
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "work"]


def test_an_interrupted_run_goes_on_to_the_same_bytes(folder, tmp_path, monkeypatch):
    """It is stopped after every step, right after its checkpoint, until it comes through."""
    arguments = ["--data-root", str(STARTER), *TINY]
    arguments += ["--output", str(tmp_path / "model"), "--work-dir", str(tmp_path / "work")]
    learn, save = make_model.Training.learn, make_model.Training.save

    def learn_and_stop(training, batch):
        loss = learn(training, batch)
        save(training, tmp_path / "work" / "checkpoint.pt")
        raise KeyboardInterrupt

    monkeypatch.setattr(make_model.Training, "learn", learn_and_stop)
    stops = 0
    while True:
        try:
            make_model.main(arguments)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops == 5
    assert digests(tmp_path / "model") == digests(folder)


def test_the_card_says_what_it_was_trained_on(folder):
    card = (folder / "README.md").read_text()
    assert "4 training" in card and "seed: 42" in card and "Measured on 2 training games" in card
    assert str(ROOT) not in card


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden", "100"], "--hidden must be a multiple of 64, got 100"),
        (["--vocabulary", "5000"], "--vocabulary"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--held-out", "40", "--max-games", "40"], "--held-out is 40, but there are only 40 training games"),
        (["--data-root", "no/such/folder"], "no/such/folder"),
    ],
)
def test_a_bad_setting_is_one_line_and_writes_nothing(flags, message, tmp_path):
    command = [sys.executable, str(SCRIPT), "--data-root", str(STARTER)]
    command += ["--output", str(tmp_path / "model"), "--work-dir", str(tmp_path / "work"), *flags]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_work_folder_of_other_settings_is_refused(made):
    command = [sys.executable, str(SCRIPT), "--data-root", str(STARTER), "--output", str(made / "other")]
    command += ["--work-dir", str(made / "work"), *TINY, "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode != 0
    assert "--seed 42, not 7" in done.stderr and done.stderr.count("\n") == 1
    assert not (made / "other").exists()
