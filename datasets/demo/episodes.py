"""Demonstrations of the demo policy, as texts and as tokens, and the tokenizer that is made from them.

Owns what an episode, the expert's or the policy's own, looks like to the policy.

Invariant: texts and tokens are those that a rollout would write, made by `protocol.py` alone. What is to be learned in
a turn is what the expert would do there, whoever acted.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import Game
from environment import World, compile_game
from protocol import ChatTokens, first_messages, tool_call_text, tool_result
from expert import Expert, Yields, kind


# --- demonstrations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What was done, what the expert would have done there, and the tool result that followed (None: the end)."""

    action: str
    label: str
    result: str | None


@dataclass(frozen=True)
class Episode:
    """A won demonstration as protocol texts."""

    messages: list[dict]
    turns: list[Turn]


class Renaming:
    """Object types under each other's names: what is shown, and back to what the world knows.

    What an object is called then says less about where it is, so the policy must read and copy names. The expert goes
    by the shown names too. Places and lamps keep theirs.
    """

    def __init__(self, kinds: Sequence[str], rng: random.Random) -> None:
        self._shown = dict(zip(kinds, rng.sample(kinds, len(kinds)), strict=True))
        self._real = {shown: real for real, shown in self._shown.items()}
        self._pattern = re.compile(rf"\b({'|'.join(kinds)})\b") if kinds else re.compile(r"(?!)")

    def text(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._shown[found[1]], text)

    def actions(self, actions: Sequence[str]) -> list[str]:
        return sorted(self.text(action) for action in actions)

    def real(self, action: str) -> str:
        return self._pattern.sub(lambda found: self._real[found[1]], action)


def detour(admissible: Sequence[str], rng: random.Random) -> str:
    """A random action, now and then one that is not admissible, so that recovery is seen."""
    verbs = sorted({action.split()[0] for action in admissible} - {"help"})
    verb = rng.choice(verbs + ["go"] * 3)
    action = rng.choice([each for each in admissible if each.split()[0] == verb] or ["look"])
    if rng.random() < 0.25:
        words = action.split()
        other = rng.choice([each for each in admissible if each.startswith("go to ")] or ["look"]).split()[-2:]
        action = rng.choice(
            (f"{rng.choice(('open', 'close', 'go to', 'take'))} {' '.join(words[-2:])}", " ".join(words[:-2] + other))
        )
    return action


def demonstrate(
    world: World,
    yields: Yields,
    kinds: Sequence[str],
    renamed: float,
    detours: bool,
    max_steps: int,
    rng: random.Random,
) -> Episode | None:
    """Let the expert play, in a share `renamed` of cases with shuffled names; None if it did not win in time."""
    names = Renaming(kinds if rng.random() < renamed else [], rng)
    rate = rng.choice((0.0, 0.1, 0.3)) if detours else 0.0
    state, reply = world.start()
    task, admissible = names.text(world.task), names.actions(reply[1])
    messages = first_messages(task, names.text(reply[0]), admissible)
    expert = Expert(task, yields)
    expert.see(names.text(reply[0]), admissible)
    played = []
    while not reply[4]:
        if len(played) == max_steps:
            return None
        label = expert.action()
        action = detour(admissible, rng) if rng.random() < rate else label
        status = "executed" if action in admissible else "not admissible"
        state, reply = world.step(state, reply, names.real(action))
        observation, admissible = names.text(reply[0]), names.actions(reply[1])
        expert.see(observation, admissible)
        played.append((action, label, status, observation, admissible))
    limit = rng.choice([limit for limit in (20, 30, 50, 50) if limit >= len(played)] or [len(played)])
    results = [tool_result(step, limit, *shown) for step, (_, _, *shown) in enumerate(played[:-1], 1)]
    return Episode(messages, [Turn(*turn[:2], result) for turn, result in zip(played, [*results, None], strict=True)])


def survey(games: Sequence[Game]) -> tuple[Yields, list[str], list[str]]:
    """Over training games: where things are, the types of places, the types of objects that tasks ask for."""
    yields, places, kinds = Yields(), set(), set()
    for game in games:
        first = World(compile_game(game.path)).start()[1]
        walkthrough = json.loads(game.path.read_text())["walkthrough"]
        here = [action[6:] for action in first[1] if action.startswith("go to ")]
        yields.add(here, walkthrough)
        places |= set(map(kind, here))
        kinds |= {action.split()[1] for action in walkthrough if action.startswith("take ")}
    return yields, sorted(places), sorted(kinds)


def demonstrations(
    games: Sequence[Game],
    episodes: int,
    yields: Yields,
    kinds: Sequence[str],
    renamed: float,
    detours: bool,
    max_steps: int,
    seed: int,
) -> Iterator[Episode]:
    """Won demonstrations of every game; they depend on the games and the seed alone."""
    for game in games:
        world = World(compile_game(game.path))
        for k in range(episodes):
            rng = random.Random(f"{seed}/{game.game_id}/{k}")
            episode = demonstrate(world, yields, kinds, renamed, detours, max_steps, rng)
            if episode is not None:
                yield episode


# --- tokenizer ------------------------------------------------------------------------------------------------------

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL_OPEN, CALL_CLOSE = tool_call_text("|").split("|")
TURN_MARKS = ("\n<|im_start|>tool\nStep", "\n<|im_start|>assistant\n", "\n<|im_start|>user\nTask:")


def pieces_of(places: Iterable[str]) -> str:
    """A pattern of what is at most one token.

    A command on a place is one, and so is a place with its number. An object is two, its type and its number, whether
    it stands in the task, in a room or in a command: that is what the policy has to compare and to copy.
    """
    place = rf"(?:{'|'.join(sorted(places))}) \d+"
    return "|".join(
        (
            rf"\n?(?:go to|open|close|examine) {place}",
            rf" (?:from|to|with) {place}",
            rf" {place}",
            r"\n(?:take|move|clean|heat|cool|use|examine)(?= )",
            r"\ninventory\nlook",
            r"\nObservation: You (?:arrive at|pick up the|open the|move the)",
            r"\n(?:Observation:|Admissible actions:)",
            r" of \d+: (?:executed|not admissible|malformed|won|over)",
            r" You are in the middle of a room\. Looking quickly around you",
            r"\. On the(?= )|, you see(?: nothing\.)?|,(?: and)? a(?= )| is open\. In it",
            r" ?[A-Za-z]+",
            r" ?[0-9]+",
            r"\n+",
            r" ?[^\sA-Za-z0-9]+",
            r"\s",
        )
    )


def make_tokenizer(texts: Iterable[str], places: Iterable[str], fixed_lines: Sequence[str], vocabulary: int):
    """The most frequent pieces of `texts` as tokens, bytes for the rest; a line of `fixed_lines` is one token too.

    A unigram model, as it needs no shorter tokens to build a long one from (BPE would spend a third of the vocabulary).
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    added = [*SPECIAL, CALL_OPEN, CALL_CLOSE, "<tool_call>", "</tool_call>", *TURN_MARKS, *fixed_lines]
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces_of(places)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text) if len(piece) > 1)
    common = sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocabulary - len(added) - 256]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*((piece, -1.0) for piece in common), *((byte, -20.0) for byte in bytes_)]
    unigram = Tokenizer(models.Unigram(entries, unk_id=None, byte_fallback=False))
    unigram.pre_tokenizer = split
    unigram.decoder = decoders.ByteLevel()
    unigram.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    unigram.add_tokens([AddedToken(text, normalized=False) for text in added[len(SPECIAL) :]])
    return PreTrainedTokenizerFast(
        tokenizer_object=unigram,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )


def tokenizer_for(episodes: Sequence[Episode], places: Iterable[str], vocabulary: int):
    """Tokenizer for the texts of `episodes`; the long lines of their common system block are a token each."""
    bare = make_tokenizer([], places, [], 480)
    system = bare.decode(ChatTokens(bare).first_prompt(episodes[0].messages)).partition("<|im_end|>")[0]
    fixed_lines = [line for line in dict.fromkeys(system.split("\n")) if len(line) > 16]
    texts = [message["content"] for episode in episodes for message in episode.messages[1:]]
    for episode in episodes:
        for turn in episode.turns:
            texts += [turn.action, (turn.result or "").removeprefix("Step")]
    return make_tokenizer(texts, places, fixed_lines, vocabulary)


# --- sequences ------------------------------------------------------------------------------------------------------

LEARN, READ, SKIP = 2, 1, 0  # codes of loss weights: 1, the context weight, 0


@dataclass(frozen=True)
class Encoded:
    """An episode as a rollout would record it; `targets_T[i]` is to be predicted in the place of `tokens_T[i]`."""

    tokens_T: list[int]
    targets_T: list[int]
    codes_T: list[int]


def call_tokens(chat: ChatTokens, action: str) -> list[int]:
    """The assistant turn that takes this action."""
    return [*chat.tokenizer.encode(tool_call_text(action), add_special_tokens=False), chat.stop_token_ids[0]]


# Tokens of what was done, tokens of what was right, the tool result.
TurnTokens = tuple[list[int], list[int], str | None]


def encode(chat: ChatTokens, prompt: Sequence[int], turns: Iterable[TurnTokens]) -> Encoded:
    """A first prompt and turns as one sequence.

    Where something else was done than what was right, the right token is the target up to and including the first
    place where they differ; after it nothing is learned from that turn.
    """
    tokens, targets, codes = list(prompt), list(prompt), [READ] * len(prompt)
    for done, right, result in turns:
        same = next((i for i, (a, b) in enumerate(zip(done, right)) if a != b), min(len(done), len(right)))
        tokens += done
        targets += [*right[: same + 1], *done[same + 1 :]][: len(done)]
        codes += [LEARN if i <= same else SKIP for i in range(len(done))]
        if result is not None:
            extension = chat.extension(done, result)
            tokens += extension
            targets += extension
            codes += [READ] * len(extension)
    return Encoded(tokens, targets, codes)


def encode_episode(chat: ChatTokens, episode: Episode) -> Encoded:
    turns = ((call_tokens(chat, turn.action), call_tokens(chat, turn.label), turn.result) for turn in episode.turns)
    return encode(chat, chat.first_prompt(episode.messages), turns)


def save_sequences(path: Path, sequences: Sequence[Encoded]) -> None:
    def joined(parts: Iterable[list[int]], dtype: str) -> np.ndarray:
        return np.fromiter((value for part in parts for value in part), dtype)

    partial = path.with_suffix(".partial.npz")
    np.savez(
        partial,
        lengths=np.array([len(s.tokens_T) for s in sequences]),
        tokens=joined((s.tokens_T for s in sequences), "int16"),
        targets=joined((s.targets_T for s in sequences), "int16"),
        codes=joined((s.codes_T for s in sequences), "int8"),
    )
    os.replace(partial, path)


def load_sequences(path: Path) -> list[Encoded]:
    """As saved, but arrays for lists."""
    with np.load(path) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        parts = [np.split(file[name], ends) for name in ("tokens", "targets", "codes")]
    return [Encoded(*each) for each in zip(*parts, strict=True)]
