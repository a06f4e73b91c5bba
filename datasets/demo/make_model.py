"""The demo model: a Qwen3-architecture policy of a few million parameters, made here in about two minutes.

Owns the model folder that `--preset demo` starts from: a tokenizer trained on the protocol's own texts, and weights
that a short warm start has taught the form of a tool call and a first idea of the games.

Invariant: demonstrations are played through `environment.py` and written by `protocol.py` alone, token by token as a
rollout writes them, and only over training games; no validation game is read. Same games, settings, thread count and
machine: same bytes.

    python datasets/demo/make_model.py --data-root datasets/starter --output datasets/demo/model

With the defaults the policy wins some 40 % of the starter training games at temperature 1.0 within 20 turns, most
groups with both outcomes. Fewer renamed demonstrations (0.5) teach it those games by heart (nine in ten won), which
leaves reinforcement learning nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import DataError, Game, find_games  # noqa: E402
from environment import EnvironmentFault, EnvironmentSettings, GameError, Group, WorldPool, WorldState  # noqa: E402
from protocol import ChatTokens, first_messages, tool_call_text, tool_result  # noqa: E402

HERE = Path(__file__).resolve().parent


class SettingsError(ValueError):
    """A setting that cannot be; the message names the flag and the value."""


@dataclass(frozen=True)
class Settings:
    """Every setting of the script; each is a flag."""

    output: Path = field(default=HERE / "model", metadata={"help": "model folder to write; replaced if it is there"})
    data_root: Path = field(
        default=HERE.parent / "starter", metadata={"help": "folder of the games; only its training split is read"}
    )
    max_games: int = field(default=64, metadata={"help": "at most so many training games, spread over the split"})
    episodes: int = field(default=32, metadata={"help": "demonstrations a game"})
    max_episode_steps: int = field(default=50, metadata={"help": "the longest demonstration, in actions"})
    renamed: float = field(default=0.9, metadata={"help": "share of demonstrations with shuffled object names"})
    detour_rate: float = field(default=0.3, metadata={"help": "share of random actions in a demonstration"})
    vocabulary: int = field(default=1536, metadata={"help": "entries of the tokenizer"})
    layers: int = field(default=3, metadata={"help": "transformer layers"})
    hidden: int = field(default=192, metadata={"help": "width of the model, a multiple of 64"})
    steps: int = field(default=300, metadata={"help": "optimizer steps of the warm start; 0 leaves random weights"})
    batch_tokens: int = field(default=4096, metadata={"help": "tokens an optimizer step, padding included"})
    learning_rate: float = field(default=0.02, metadata={"help": "of Muon (matrices); AdamW gets a tenth"})
    context_weight: float = field(default=0.2, metadata={"help": "loss weight of tokens the policy only reads"})
    seed: int = field(default=42, metadata={"help": "of games, demonstrations, weights and batches"})
    threads: int = field(default=1, metadata={"help": "CPU threads; 1 is enough, and another number gives other last bits"})

    def __post_init__(self) -> None:
        for name in ("max_games", "episodes", "max_episode_steps", "layers", "batch_tokens", "threads"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.hidden < 64 or self.hidden % 64:
            raise SettingsError(f"--hidden must be a multiple of 64, got {self.hidden}")
        if not 320 <= self.vocabulary < 2000:
            raise SettingsError(f"--vocabulary must be at least 320 and below 2000, got {self.vocabulary}")
        for name in ("detour_rate", "renamed"):
            if not 0 <= getattr(self, name) <= 0.9:
                raise SettingsError(f"--{name.replace('_', '-')} must be in [0, 0.9], got {getattr(self, name)}")
        if self.steps < 0:
            raise SettingsError(f"--steps must not be below 0, got {self.steps}")


# --- demonstrations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One action, whether it is one to learn (a detour is not), and the tool result that follows (None: the end)."""

    action: str
    learn: bool
    result: str | None


@dataclass(frozen=True)
class Episode:
    """A won demonstration as protocol texts."""

    messages: list[dict]
    turns: list[Turn]


class Walkthrough:
    """A game's stored plan, followed from wherever the branch happens to be.

    Going on with the plan needs its last place, that place open, and no wrong object in the hand.
    """

    def __init__(self, plan: Sequence[str]) -> None:
        self.plan = list(plan)
        self.done = 0
        self.place: str | None = None  # where the plan stands, as in "cabinet 1"
        self.holding: str | None = None  # what the plan holds

    def next(self, state: WorldState) -> str | None:
        """The action that goes on with the plan; None if it is used up, undone by a detour."""
        if self.done == len(self.plan):
            return None
        admissible = set(state.admissible)
        wrong = next(
            (a for a in state.admissible if a.startswith("move ") and not a.startswith(f"move {self.holding} ")),
            None,
        )
        if wrong:
            return wrong
        while (
            self.done < len(self.plan) - 1
            and self.plan[self.done].startswith("open ")
            and "close" + self.plan[self.done][4:] in admissible
        ):
            self.done += 1  # a detour has opened it already
        wanted = self.plan[self.done]
        if wanted in admissible:
            self.done += 1
            if wanted.startswith("go to "):
                self.place = wanted[len("go to ") :]
            elif wanted.startswith("take "):
                self.holding = wanted[len("take ") :].split(" from ")[0]
            elif wanted.startswith("move "):
                self.holding = None
            return wanted
        if wanted.startswith("go to "):  # a detour has gone there already: the command is missing from the list
            self.done += 1
            self.place = wanted[len("go to ") :]
            return self.next(state)
        if f"open {self.place}" in admissible:
            return f"open {self.place}"
        return f"go to {self.place}"


class Renaming:
    """Object types under each other's names, and each type's objects under each other's numbers.

    What a game's objects are called then says nothing about where they are, so the warm start must learn to read and
    copy names and not only to recall the few games it has. Receptacles keep their names.
    """

    def __init__(self, objects: Sequence[str], rng: random.Random) -> None:
        types = sorted(objects)
        self.types = dict(zip(types, rng.sample(types, len(types)), strict=True))
        self.numbers = dict(zip("123", rng.sample("123", 3), strict=True))
        self.pattern = re.compile(rf"\b({'|'.join(types)})\b(?: ([1-3])\b)?") if types else re.compile(r"(?!)")

    def text(self, text: str) -> str:
        return self.pattern.sub(
            lambda found: self.types[found[1]] + (f" {self.numbers[found[2]]}" if found[2] else ""), text
        )

    def actions(self, actions: Sequence[str]) -> list[str]:
        return sorted(self.text(action) for action in actions)


def detour(state: WorldState, rng: random.Random) -> str:
    """A random action, now and then one that is not admissible, so that recovery is seen."""
    left_out = {"help", "move", "clean", "heat", "cool", "use"}
    verbs = sorted({action.split()[0] for action in state.admissible} - left_out)
    verb = rng.choice(verbs + ["go"] * 3)
    action = rng.choice([a for a in state.admissible if a.split()[0] == verb] or ["look"])
    if rng.random() < 0.2:
        action = rng.choice(["open", "close", "go to", "examine"]) + " " + " ".join(action.split()[-2:])
    return action


async def demonstrate(
    group: Group, branch: int, plan: Sequence[str], objects: Sequence[str], settings: Settings, rng: random.Random
) -> Episode | None:
    """Play one branch by its walkthrough, with detours; None if it was not won in time."""
    state, walkthrough, turns = group.first, Walkthrough(plan), []
    names = Renaming(objects if rng.random() < settings.renamed else [], rng)
    max_steps = rng.choice((20, 30, 50))
    rate = settings.detour_rate if rng.random() < 0.75 else 0.0
    for step in range(1, settings.max_episode_steps + 1):
        learn = rng.random() >= rate
        action = walkthrough.next(state) if learn else detour(state, rng)
        if action is None:
            break
        status = "executed" if action in state.admissible else "not admissible"
        state = await group.step(branch, action)
        action = names.text(action)
        if state.won:
            group.finish(branch)
            first = first_messages(
                names.text(group.task), names.text(group.first.observation), names.actions(group.first.admissible)
            )
            return Episode(first, [*turns, Turn(action, True, None)])
        if state.done:
            break
        result = tool_result(step, max_steps, status, names.text(state.observation), names.actions(state.admissible))
        turns.append(Turn(action, learn, result))
    group.finish(branch)
    return None


async def play_games(pool: WorldPool, games: Sequence[Game], settings: Settings) -> list[Episode]:
    """Won demonstrations of every game, in an order that depends on the games and the seed alone."""

    plans = {game.game_id: json.loads(game.path.read_text())["walkthrough"] for game in games}
    objects = sorted({action.split()[1] for plan in plans.values() for action in plan if action.startswith("take ")})

    async def play(game: Game) -> list[Episode | None]:
        group = await pool.open_group(game.path, settings.episodes)
        try:
            return await asyncio.gather(
                *(
                    demonstrate(
                        group, k, plans[game.game_id], objects, settings,
                        random.Random(f"{settings.seed}/{game.game_id}/{k}"),
                    )
                    for k in range(settings.episodes)
                )
            )
        finally:
            group.close()

    in_flight = asyncio.Semaphore(4)

    async def bounded(game: Game) -> list[Episode | None]:
        async with in_flight:
            return await play(game)

    played = await asyncio.gather(*(bounded(game) for game in games))
    return [episode for episodes in played for episode in episodes if episode is not None]


# --- tokenizer ------------------------------------------------------------------------------------------------------

# At most one token each: a command or the half of one that names an object (what the policy must copy is then a token
# or two), and the phrases that every tool result is made of. Elsewhere a piece is a word, with the number after it.
PIECES = "|".join(
    (
        r"(?:go to|open|close|examine|use|take|move|clean|heat|cool) [a-z]+ [0-9]+",
        r" (?:from|to|with) [a-z]+ [0-9]+",
        r"\n(?:Observation:|Admissible actions:\n)",
        r" of [0-9]+: (?:executed|not admissible|malformed|won|over)",
        r" You (?:arrive at|are in the middle of a room\. Looking quickly around you)",
        r", you see(?: nothing\.)?|,(?: and)? a(?= )|\. (?:On|In) (?:the|it)(?= )",
        r" ?[A-Za-z]+(?: [0-9]+)?",
        r" ?[0-9]+",
        r"\n+",
        r" ?[^\sA-Za-z0-9]+",
        r"\s",
    )
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL_PIECES = ("<tool_call>", "</tool_call>", "<function=alfworld_step><parameter=action>", "</parameter></function>")


def make_tokenizer(texts: Sequence[str], fixed_lines: Sequence[str], vocabulary: int):
    """Byte-level BPE over `texts`; a line of `fixed_lines` (the same in every first prompt) is one token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    added = [*CALL_PIECES, *fixed_lines]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(added),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(text, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )


def fixed_lines_of(chat_text: str) -> list[str]:
    """The lines of the system block of a rendered prompt that are long enough to be worth a token of their own."""
    system = chat_text.partition("<|im_end|>")[0]
    return [line for line in dict.fromkeys(system.split("\n")) if len(line) > 16]


# --- warm start -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demonstration:
    """One demonstration as a rollout would record it; `weights[i]` is the loss weight of predicting `tokens[i]`."""

    tokens: list[int]
    weights: list[float]


def encode(chat: ChatTokens, episode: Episode, context_weight: float) -> Demonstration:
    """Tokens and loss weights: 1 on the policy's own turns, `context_weight` on what it reads, 0 on detours."""
    end_of_turn = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = chat.first_prompt(episode.messages)
    weights = [context_weight] * len(tokens)
    for turn in episode.turns:
        call = [*chat.tokenizer.encode(tool_call_text(turn.action), add_special_tokens=False), end_of_turn]
        tokens += call
        weights += [1.0 if turn.learn else 0.0] * len(call)
        if turn.result is not None:
            result = chat.extension(call, turn.result)
            tokens += result
            weights += [context_weight] * len(result)
    return Demonstration(tokens, weights)


def batches(
    sequences: Sequence[Demonstration], batch_tokens: int, rng: random.Random
) -> Iterator[list[Demonstration]]:
    """Endless batches of at most `batch_tokens` tokens, padding included (or one sequence), of similar length."""
    while True:
        order = sorted(sequences, key=lambda sequence: len(sequence.tokens) * (1 + 0.2 * rng.random()))
        epoch: list[list[Demonstration]] = [[]]
        for sequence in order:
            if epoch[-1] and (len(epoch[-1]) + 1) * max(len(s.tokens) for s in [*epoch[-1], sequence]) > batch_tokens:
                epoch.append([])
            epoch[-1].append(sequence)
        rng.shuffle(epoch)
        yield from epoch


def make_model(tokenizer, settings: Settings):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(settings.seed)
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 64,
        num_key_value_heads=max(1, settings.hidden // 128),
        head_dim=64,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def warm_start(model, sequences: Sequence[Demonstration], settings: Settings) -> tuple[float, int]:
    """Next-token loss over the demonstrations: Muon for the inner matrices, AdamW for the rest, rate falling to 0.

    Returns the mean loss of the policy's own tokens over the last 20 steps (nats a token) and the tokens trained on.
    Weights stay fp32; the matrix products run in bf16 where the CPU can do them, which is twice as fast.
    """
    import torch

    bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    optimizers = [
        torch.optim.Muon(matrices, lr=settings.learning_rate, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=settings.learning_rate / 4, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 10, 1.5 * (1 - step / settings.steps))
        )
        for optimizer in optimizers
    ]
    feed = batches(sequences, settings.batch_tokens, random.Random(settings.seed))
    pad = model.config.pad_token_id
    model.train()
    started, trained = time.perf_counter(), 0
    recent = collections.deque(maxlen=20)
    for step in range(1, settings.steps + 1):
        batch = next(feed)
        longest = max(len(sequence.tokens) for sequence in batch)
        tokens_BT = torch.tensor([s.tokens + [pad] * (longest - len(s.tokens)) for s in batch])
        weights_BT = torch.tensor([s.weights + [0.0] * (longest - len(s.weights)) for s in batch])[:, 1:]
        # Right padding: under the causal mask no real token sees it, so no attention mask is needed.
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BTV = model(tokens_BT, use_cache=False).logits[:, :-1]
        loss_BT = torch.nn.functional.cross_entropy(
            logits_BTV.float().transpose(1, 2), tokens_BT[:, 1:], reduction="none"
        )
        loss = (loss_BT * weights_BT).sum() / weights_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        trained += sum(len(sequence.tokens) for sequence in batch)
        recent.append(loss_BT[weights_BT == 1.0].mean().item())
        if step % 20 == 0 or step == settings.steps:
            print(
                f"  step {step} of {settings.steps}: loss {sum(recent) / len(recent):.3f} a token of the policy's own, "
                f"{trained / (time.perf_counter() - started):,.0f} tokens/s",
                flush=True,
            )
    model.eval()
    return sum(recent) / len(recent), trained


# --- all of it ------------------------------------------------------------------------------------------------------


def spread(games: Sequence[Game], count: int) -> list[Game]:
    """At most `count` games at equal distances in the sorted list, so that all task types are there."""
    if len(games) <= count:
        return list(games)
    return [games[i * len(games) // count] for i in range(count)]


def texts_of(episodes: Sequence[Episode]) -> Iterator[str]:
    for episode in episodes:
        for message in episode.messages:
            yield f"{message['role']}\n{message['content']}\n"
        for turn in episode.turns:
            yield turn.action
            yield f"assistant\ntool\n{turn.result}\n"


def card(settings: Settings, games: Sequence[Game], parameters: int, episodes: int, loss: float, trained: int) -> str:
    """README.md of the model folder."""
    table = "\n".join(
        f"{f.name.replace('_', '-')}: {getattr(settings, f.name)}"
        for f in dataclasses.fields(settings)
        if f.name not in ("output", "data_root")
    )
    return f"""# Demo policy

A Qwen3-architecture model of {parameters:,} parameters: random weights, then a short warm start. Next-token loss on
{episodes:,} won demonstrations of the {len(games)} training games below; {trained:,} tokens with repeats; loss at the end
{loss:.3f} nats a token of the policy's own. It knows these games a little and nothing else: its use is to be trained on.
A demonstration follows the walkthrough of its game, with random detours, which are not learned; in a part of them the
objects go under other names.
Its tokenizer was trained on the texts of the same demonstrations.

Made by `datasets/demo/make_model.py` with

```
{table}
```

## Training games

{chr(10).join(f"- {game.game_id}" for game in games)}
"""


def make_folder(settings: Settings) -> None:
    """Play, train, and put the finished folder in place of `settings.output`.

    Raises DataError, GameError or EnvironmentFault when the games cannot be played.
    """
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.1f} s] {text}", flush=True)

    games = spread(find_games(settings.data_root, "train"), settings.max_games)
    say(f"making the demo model from {len(games)} training games of {settings.data_root}")
    with WorldPool(EnvironmentSettings()) as pool:
        episodes = asyncio.run(play_games(pool, games, settings))
    say(f"{len(episodes)} of {len(games) * settings.episodes} demonstrations won")

    import torch

    torch.set_num_threads(settings.threads)
    bare = make_tokenizer([], [], 320)
    system_block = bare.decode(ChatTokens(bare).first_prompt(episodes[0].messages))
    tokenizer = make_tokenizer(list(texts_of(episodes)), fixed_lines_of(system_block), settings.vocabulary)
    chat = ChatTokens(tokenizer)
    sequences = [encode(chat, episode, settings.context_weight) for episode in episodes]
    say(
        f"tokenizer of {len(tokenizer)} entries; {sum(len(s.tokens) for s in sequences):,} tokens, the longest "
        f"demonstration {max(len(s.tokens) for s in sequences):,}"
    )
    model = make_model(tokenizer, settings)
    say(f"model of {model.num_parameters():,} parameters; {settings.steps} steps of warm start")
    loss, trained = warm_start(model, sequences, settings) if settings.steps else (math.nan, 0)

    output = settings.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        tokenizer.save_pretrained(temporary)
        model.to(torch.bfloat16).save_pretrained(temporary)
        (temporary / "README.md").write_text(
            card(settings, games, model.num_parameters(), len(episodes), loss, trained), encoding="utf-8"
        )
        if output.exists():
            shutil.rmtree(output)
        temporary.chmod(0o755)  # mkdtemp and safetensors write for the owner alone
        for path in temporary.iterdir():
            path.chmod(0o644)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"wrote {output}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Make the demo model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for setting in dataclasses.fields(Settings):
        kind = Path if isinstance(setting.default, Path) else type(setting.default)
        parser.add_argument(
            "--" + setting.name.replace("_", "-"), type=kind, default=setting.default, **setting.metadata
        )
    given = vars(parser.parse_args(arguments))
    try:
        make_folder(Settings(**given))
    except (SettingsError, DataError, GameError, EnvironmentFault) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
