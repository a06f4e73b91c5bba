"""The demo model: a Qwen3-architecture policy of a few million parameters, warm-started on the official training games.

Owns the model folder that `--preset demo` starts from: a tokenizer made from the protocol's own texts, and weights that
have imitated an exploring expert (`expert.py`).

Invariant: episodes are played in `environment.py`'s worlds and written by `protocol.py` alone, token by token as a
rollout writes them, and only over training games: no validation game is ever read. Same games, settings, threads and
machine: same bytes, also when a run is stopped and started again with the same `--work-dir`, where everything made on
the way is kept (games' tokens, a checkpoint every few minutes).

    python datasets/demo/make_model.py --data-root datasets/alfworld --work-dir /tmp/demo    # 40 minutes on one core

Twice the steps win some seven in ten of the held-out games, which would leave reinforcement learning little to do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from data import DataError, Game, find_games, write_any_text
from environment import GameError, World, compile_game
from protocol import ChatTokens, first_messages, parse_tool_call, tool_result
from episodes import CALL_OPEN, LEARN, Encoded, demonstrations  # noqa: E402
from episodes import encode_episode, load_sequences, save_sequences, survey, tokenizer_for  # noqa: E402

MAX_CALL_TOKENS = 32  # of a turn that the policy samples here
ROWS = 24  # games that it plays side by side


class SettingsError(ValueError):
    """A setting that cannot be; the message names the flag and the value."""


@dataclass(frozen=True)
class Settings:
    """Every setting of the script; each is a flag."""

    output: Path = field(default=HERE / "model", metadata={"help": "model folder to write; replaced if it is there"})
    work_dir: Path = field(
        default=HERE / "work", metadata={"help": "what is made on the way; a run started again goes on from it"}
    )
    data_root: Path = field(
        default=HERE.parent / "alfworld", metadata={"help": "folder of the games; only its training split is read"}
    )
    max_games: int = field(default=100_000, metadata={"help": "at most so many training games, spread over the split"})
    held_out: int = field(default=100, metadata={"help": "training games that are only measured on"})
    episodes: int = field(default=7, metadata={"help": "demonstrations a game"})
    max_episode_steps: int = field(default=50, metadata={"help": "the longest demonstration, in actions"})
    renamed: float = field(default=0.2, metadata={"help": "share of demonstrations with shuffled object names"})
    vocabulary: int = field(default=1984, metadata={"help": "entries of the tokenizer"})
    layers: int = field(default=4, metadata={"help": "transformer layers"})
    hidden: int = field(default=256, metadata={"help": "width of the model, a multiple of 64"})
    steps: int = field(default=2100, metadata={"help": "optimizer steps on the demonstrations"})
    batch_tokens: int = field(default=3072, metadata={"help": "tokens an optimizer step, padding included"})
    learning_rate: float = field(default=0.02, metadata={"help": "of Muon (matrices); AdamW gets a quarter"})
    context_weight: float = field(default=0.2, metadata={"help": "loss weight of tokens the policy only reads"})
    seed: int = field(default=42, metadata={"help": "of games, demonstrations, weights and batches"})
    threads: int = field(default=1, metadata={"help": "CPU threads; another number gives other last bits"})

    def __post_init__(self) -> None:
        for each in fields(self):
            lowest, value = (0 if each.name == "seed" else 1), getattr(self, each.name)
            if type(each.default) is int and value < lowest:
                raise SettingsError(f"--{each.name.replace('_', '-')} must be at least {lowest}, got {value}")
        if self.hidden < 64 or self.hidden % 64:
            raise SettingsError(f"--hidden must be a multiple of 64, got {self.hidden}")
        if not 480 <= self.vocabulary < 2000:
            raise SettingsError(f"--vocabulary must be at least 480 and below 2000, got {self.vocabulary}")
        if not 0 <= self.renamed <= 1:
            raise SettingsError(f"--renamed must be in [0, 1], got {self.renamed}")


# --- model and training ---------------------------------------------------------------------------------------------


def make_model(tokenizer, settings: Settings):
    """A fresh model. Its embeddings are not tied: a tied head cannot be reloaded into a running CPU engine."""
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
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def autocast():
    """Weights stay fp32; matrix products run in bf16 where the CPU can do them, which is twice as fast."""
    import torch

    return torch.autocast("cpu", torch.bfloat16, enabled=bool(torch.cpu.get_capabilities().get("avx512_bf16")))


def batches(lengths: Sequence[int], batch_tokens: int, rng: random.Random) -> list[list[int]]:
    """One pass over sequences as batches of at most `batch_tokens` tokens (or one sequence), of similar length."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] * (1 + 0.1 * rng.random()))
    passes: list[list[int]] = [[]]
    for i in order:
        longest = max(lengths[j] for j in [*passes[-1], i])
        if passes[-1] and (len(passes[-1]) + 1) * longest > batch_tokens:
            passes.append([])
        passes[-1].append(i)
    rng.shuffle(passes)
    return passes


def feed(sequences: Sequence[Encoded], seed: str, batch_tokens: int) -> Iterator[list[Encoded]]:
    """Endless batches; the n-th depends on the arguments alone."""
    rng = random.Random(seed)
    lengths = [len(sequence.tokens_T) for sequence in sequences]
    while True:
        for batch in batches(lengths, batch_tokens, rng):
            yield [sequences[i] for i in batch]


def tensors(batch: Sequence[Encoded], settings: Settings):
    """Tokens, targets and loss weights, padded on the right: under the causal mask no real token sees the padding."""
    import torch

    shape = len(batch), max(len(sequence.tokens_T) for sequence in batch)
    tokens_BT, targets_BT, codes_BT = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    for row, sequence in enumerate(batch):
        parts = (sequence.tokens_T, sequence.targets_T, sequence.codes_T)
        for tensor, values in zip((tokens_BT, targets_BT, codes_BT), parts, strict=True):
            tensor[row, : len(values)] = torch.as_tensor(np.asarray(values, dtype=np.int64))
    weights_BT = torch.tensor([0.0, settings.context_weight, 1.0])[codes_BT]
    return tokens_BT, targets_BT[:, 1:], weights_BT[:, 1:]


class Training:
    """Model, optimizers and how far they are; `save` and `load` are exact, so a resumed run goes on as if never ended.

    Muon for the inner matrices, AdamW for the rest. The rate rises over 100 steps and falls to 0 over the last 30 %.
    """

    def __init__(self, model, settings: Settings) -> None:
        import torch

        self.model, self.settings, self.step, self.tokens = model, settings, 0, 0
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
        others = [p for name, p in named if not (p.ndim == 2 and "layers" in name)]
        rate = settings.learning_rate
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(others, lr=rate / 4, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rates = [rate, rate / 4]

    def learn(self, batch: Sequence[Encoded]) -> float:
        """One optimizer step; returns the mean loss of what the policy is to say, nats a token."""
        import torch

        factor = min(1.0, (self.step + 1) / 100, (1 - self.step / self.settings.steps) / 0.3)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        tokens_BT, targets_BT, weights_BT = tensors(batch, self.settings)
        with autocast():
            logits_BTV = self.model(tokens_BT, use_cache=False).logits[:, :-1]
        loss_BT = torch.nn.functional.cross_entropy(logits_BTV.float().transpose(1, 2), targets_BT, reduction="none")
        loss = (loss_BT * weights_BT).sum() / weights_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += sum(len(sequence.tokens_T) for sequence in batch)
        return loss_BT[weights_BT == 1.0].mean().item()

    def save(self, path: Path) -> None:
        import torch

        partial = path.with_suffix(".partial")
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save([self.model.state_dict(), states, self.step, self.tokens], partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        import torch

        weights, states, self.step, self.tokens = torch.load(path, weights_only=True)
        self.model.load_state_dict(weights)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def action_accuracy(model, sequences: Sequence[Encoded], tokenizer, settings: Settings) -> dict[str, tuple[int, int]]:
    """verb -> (whole actions that are the likeliest at every token, all), teacher-forced; "all" sums up."""
    import torch

    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    opening = tokenizer.convert_tokens_to_ids(CALL_OPEN)
    for batch in batches([len(s.tokens_T) for s in sequences], settings.batch_tokens, random.Random(0)):
        chosen = [sequences[i] for i in batch]
        tokens_BT, targets_BT, weights_BT = tensors(chosen, settings)
        with torch.no_grad(), autocast():
            right_BT = (model(tokens_BT, use_cache=False).logits[:, :-1].argmax(-1) == targets_BT).numpy()
        for row, sequence in enumerate(chosen):
            learned = np.flatnonzero(np.asarray(sequence.codes_T) == LEARN)
            for run in np.split(learned, np.flatnonzero(np.diff(learned) > 1) + 1):
                if sequence.targets_T[run[0]] == opening:
                    verb = tokenizer.decode(sequence.targets_T[run[1:]]).split()[0]
                    for name in (verb, "all"):
                        counts[name][0] += bool(right_BT[row, run - 1].all())
                        counts[name][1] += 1
    return {verb: tuple(counts[verb]) for verb in sorted(counts)}


# --- playing --------------------------------------------------------------------------------------------------------


class Cache:
    """A model's keys and values for rows (texts) that grow at their own pace, in plain torch."""

    def __init__(self, model, rows: int) -> None:
        self.model, self.lengths = model, [0] * rows
        self.kept: list = []  # a tensor [2, rows, heads, tokens, head size] for each layer

    def read(self, new: Sequence[Sequence[int]]):
        """Append new[row] to each row (nothing for some); returns the logits after each row's last new token."""
        import torch
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        body, config = self.model.model, self.model.config
        rows, longest = len(new), max(map(len, new))
        tokens_BT = torch.tensor([[*each, *[0] * (longest - len(each))] for each in new])
        positions_BT = torch.tensor(self.lengths)[:, None] + torch.arange(longest)
        room = int(positions_BT.max()) + 1
        # Row b may look at its own past; what padding leaves behind lies after that and is overwritten in time.
        mask_B1TS = (torch.arange(room)[None, None] <= positions_BT[:, :, None])[:, None]
        hidden_BTD = body.embed_tokens(tokens_BT)
        angles = body.rotary_emb(hidden_BTD, positions_BT)
        row_index = torch.arange(rows)[:, None]
        for number, layer in enumerate(body.layers):
            attention = layer.self_attn
            normed_BTD = layer.input_layernorm(hidden_BTD)
            heads = (rows, longest, -1, config.head_dim)
            queries = attention.q_norm(attention.q_proj(normed_BTD).view(heads)).transpose(1, 2)
            keys = attention.k_norm(attention.k_proj(normed_BTD).view(heads)).transpose(1, 2)
            values = attention.v_proj(normed_BTD).view(heads).transpose(1, 2)
            queries, keys = apply_rotary_pos_emb(queries, keys, *angles)
            if number == len(self.kept):
                self.kept.append(torch.zeros(2, rows, config.num_key_value_heads, 0, config.head_dim))
            if self.kept[number].shape[3] < room:
                grown = torch.zeros(2, rows, config.num_key_value_heads, room + 512, config.head_dim)
                grown[:, :, :, : self.kept[number].shape[3]] = self.kept[number]
                self.kept[number] = grown
            self.kept[number][0, row_index, :, positions_BT] = keys.transpose(1, 2)
            self.kept[number][1, row_index, :, positions_BT] = values.transpose(1, 2)
            past_keys, past_values = self.kept[number][:, :, :, :room]
            mixed = torch.nn.functional.scaled_dot_product_attention(
                queries, past_keys, past_values, attn_mask=mask_B1TS, enable_gqa=True
            )
            hidden_BTD = hidden_BTD + attention.o_proj(mixed.transpose(1, 2).reshape(rows, longest, -1))
            hidden_BTD = hidden_BTD + layer.mlp(layer.post_attention_layernorm(hidden_BTD))
        last = torch.tensor([max(len(each) - 1, 0) for each in new])
        self.lengths = [length + len(each) for length, each in zip(self.lengths, new, strict=True)]
        return self.model.lm_head(body.norm(hidden_BTD[torch.arange(rows), last]))

    def keep(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.kept = [layer[:, list(rows)] for layer in self.kept]


@dataclass
class Player:
    """One game that the policy plays."""

    world: World
    prompt: list[int]
    state: int
    reply: tuple
    turns: int = 0
    invalid: int = 0


def play_batch(
    model, chat: ChatTokens, games: Sequence[Game], temperature: float, seed: int, max_steps: int
) -> list[Player]:
    """The policy plays each game once, in lockstep, as a rollout does."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    players = []
    for game in games:
        world = World(compile_game(game.path))
        state, reply = world.start()
        prompt = chat.first_prompt(first_messages(world.task, reply[0], reply[1]))
        players.append(Player(world, prompt, state, reply))
    finished, cache, new = list(players), Cache(model, len(players)), [player.prompt for player in players]
    while players:
        logits_BV = cache.read(new)
        calls: list[list[int]] = [[] for _ in players]
        open_ = set(range(len(players)))
        while open_:
            if temperature:
                chances_BV = torch.softmax(logits_BV.float() / temperature, -1)
                picks = torch.multinomial(chances_BV, 1, generator=generator)[:, 0].tolist()
            else:
                picks = logits_BV.argmax(-1).tolist()
            for row in list(open_):
                calls[row].append(picks[row])
                if picks[row] in chat.stop_token_ids or len(calls[row]) == MAX_CALL_TOKENS:
                    open_.discard(row)
            if open_:  # the last token of a call is read together with what follows it
                logits_BV = cache.read([[calls[row][-1]] if row in open_ else [] for row in range(len(players))])
        going, new = [], []
        for row, (player, call) in enumerate(zip(players, calls, strict=True)):
            result = take_turn(chat, player, call, max_steps)
            if result is not None:
                going.append(row)
                new.append([call[-1], *chat.extension(call, result)])
        if len(going) < len(players):
            cache.keep(going)
            players = [players[row] for row in going]
    return finished


def take_turn(chat: ChatTokens, player: Player, call: list[int], max_steps: int) -> str | None:
    """Carry out a sampled call; returns its tool result, None if the game ended."""
    parsed = parse_tool_call(chat.completion_text(call))
    player.turns += 1
    if parsed.action is None:
        status = "malformed"
        observation = f"No action was taken: {parsed.error}. Call alfworld_step exactly once, at the end of your turn."
    else:
        status = "executed" if parsed.action in player.reply[1] else "not admissible"
        player.state, player.reply = player.world.step(player.state, player.reply, parsed.action)
        observation = player.reply[0]
    player.invalid += status != "executed"
    if player.reply[4] or player.turns == max_steps:
        return None
    return tool_result(player.turns, max_steps, status, observation, player.reply[1])


def play(model, chat: ChatTokens, games: Sequence[Game], temperature: float, settings: Settings) -> str:
    """The policy plays each game once (greedily at temperature 0), `ROWS` at a time; returns the score in words."""
    import torch

    players = []
    with torch.no_grad():
        for start in range(0, len(games), ROWS):
            batch = games[start : start + ROWS]
            players += play_batch(model, chat, batch, temperature, settings.seed + start, settings.max_episode_steps)
    wins = sum(player.reply[3] for player in players)
    turns = sum(player.turns for player in players) / len(players)
    invalid = sum(player.invalid for player in players) / len(players)
    return f"{wins} of {len(players)} won, {turns:.1f} turns and {invalid:.1f} invalid actions a game"


# --- all of it ------------------------------------------------------------------------------------------------------


def spread(games: Sequence[Game], count: int) -> list[Game]:
    """At most `count` games at equal distances in the sorted list, so that all task types are there."""
    if len(games) <= count:
        return list(games)
    return [games[i * len(games) // count] for i in range(count)]


def card(settings: Settings, games: int, parameters: int, tokens: int, measured: Sequence[str]) -> str:
    """README.md of the model folder."""
    table = "\n".join(
        f"{f.name.replace('_', '-')}: {getattr(settings, f.name)}"
        for f in fields(settings)
        if f.name not in ("output", "data_root", "work_dir")
    )
    return f"""# Demo policy

A Qwen3-architecture model of {parameters:,} parameters: random weights, then imitation of an expert that explores
and goes by the texts alone (`datasets/demo/expert.py`). Next-token loss over {tokens:,} tokens of its ALFWorld episodes
in {games:,} training games, with random detours after which it says what would be right. No validation game was read.
It speaks this project's protocol and nothing else: its use is to be trained on.

Measured on {settings.held_out} training games that it was not trained on, in {settings.max_episode_steps} steps:

{chr(10).join(f"- {line}" for line in measured)}

Made by `datasets/demo/make_model.py` with

```
{table}
```
"""


class Say:
    """Prints with the time since the start."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.0f} s] {text}", flush=True)


def claim(settings: Settings) -> None:
    """Make the work folder ours. Raises SettingsError if it holds what other settings have made."""
    names = [f.name for f in fields(settings) if f.name not in ("output", "work_dir")]
    made_by = {name: str(getattr(settings, name)) for name in names}
    path = settings.work_dir / "settings.json"
    if path.exists():
        other = json.loads(path.read_text())
        for name, value in made_by.items():
            if other.get(name) != value:
                raise SettingsError(
                    f"--work-dir {settings.work_dir} was begun with --{name.replace('_', '-')} {other.get(name)}, "
                    f"not {value}: give the same settings to go on, or an empty folder"
                )
    settings.work_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made_by, indent=1))


def warm_start(model, chat: ChatTokens, settings: Settings, say: Say) -> Training:
    """Train on the demonstrations in the work folder, from where an earlier call broke off."""
    training, work = Training(model, settings), settings.work_dir
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        training.load(checkpoint)
        say(f"going on from step {training.step}")
    shown, watched = load_sequences(work / "demonstrations.npz"), load_sequences(work / "held_out.npz")
    source = feed(shown, f"{settings.seed}/0", settings.batch_tokens)
    for _ in range(training.step):
        next(source)
    losses, started, tokens = [], time.perf_counter(), training.tokens
    saved = started
    while training.step < settings.steps:
        losses.append(training.learn(next(source)))
        ended = training.step == settings.steps
        if training.step % 100 == 0 or ended:
            rate = (training.tokens - tokens) / (time.perf_counter() - started)
            say(
                f"step {training.step} of {settings.steps}: loss {np.mean(losses[-100:]):.3f} a token of the policy's own, "
                f"{training.tokens:,} tokens, {rate:,.0f}/s"
            )
        if training.step % 500 == 0 or ended:
            counts = action_accuracy(model, watched, chat.tokenizer, settings)
            say("right actions, held out: " + ", ".join(f"{v} {a / b:.3f}" for v, (a, b) in counts.items()))
        if ended or time.perf_counter() - saved > 180:
            training.save(checkpoint)
            saved = time.perf_counter()
    return training


def make_folder(settings: Settings) -> None:
    """Play, train, and put the finished folder in place of `settings.output`.

    Raises DataError or GameError when the games cannot be played.
    """
    say = Say()
    games = spread(find_games(settings.data_root, "train"), settings.max_games)
    if len(games) <= settings.held_out:
        raise SettingsError(f"--held-out is {settings.held_out}, but there are only {len(games)} training games")
    claim(settings)
    held_ids = {game.game_id for game in random.Random(settings.seed).sample(games, settings.held_out)}
    held = [game for game in games if game.game_id in held_ids]
    learned = [game for game in games if game.game_id not in held_ids]
    yields, places, kinds = survey(learned)
    say(f"{len(learned)} training games of {settings.data_root} to learn from, {len(held)} to measure on")

    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(settings.threads)
    work, folder = settings.work_dir, settings.work_dir / "tokenizer"
    common = {"yields": yields, "kinds": kinds, "max_steps": settings.max_episode_steps, "seed": settings.seed}
    if not folder.exists():
        sample = list(demonstrations(learned, 1, renamed=settings.renamed, detours=True, **common))
        partial = work / "tokenizer.partial"
        tokenizer_for(sample, places, settings.vocabulary).save_pretrained(partial)
        partial.rename(folder)
    chat = ChatTokens(AutoTokenizer.from_pretrained(folder))
    for name, of, episodes, how in (
        ("held_out", held, 1, {"renamed": 0.0, "detours": False}),
        ("demonstrations", learned, settings.episodes, {"renamed": settings.renamed, "detours": True}),
    ):
        if not (work / f"{name}.npz").exists():
            made = [encode_episode(chat, each) for each in demonstrations(of, episodes, **how, **common)]
            if not made:
                raise SettingsError(f"no demonstration was won within --max-episode-steps {settings.max_episode_steps}")
            save_sequences(work / f"{name}.npz", made)
            lengths = [len(each.tokens_T) for each in made]
            say(f"{name}: {len(made):,} episodes won, {sum(lengths):,} tokens, the longest {max(lengths):,}")
    model = make_model(chat.tokenizer, settings)
    say(f"model of {model.num_parameters():,} parameters, tokenizer of {len(chat.tokenizer)} entries")
    training = warm_start(model, chat, settings, say)
    measured = []
    for temperature in (1.0, 0.0):
        measured.append(f"temperature {temperature}: {play(model, chat, held, temperature, settings)}")
        say(f"held-out games, {measured[-1]}")

    output = settings.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        chat.tokenizer.save_pretrained(temporary)
        model.to(torch.bfloat16).save_pretrained(temporary)
        text = card(settings, len(learned), model.num_parameters(), training.tokens, measured)
        (temporary / "README.md").write_text(text, encoding="utf-8")
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
    write_any_text()
    parser = argparse.ArgumentParser(
        description="Make the demo model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for setting in fields(Settings):
        kind_ = Path if isinstance(setting.default, Path) else type(setting.default)
        parser.add_argument(
            "--" + setting.name.replace("_", "-"), type=kind_, default=setting.default, **setting.metadata
        )
    try:
        make_folder(Settings(**vars(parser.parse_args(arguments))))
    except (SettingsError, DataError, GameError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
