"""Playing trajectories: the sampler (vLLM) and its weights, the agent's state machine, the reward, the records.

Owns everything between a game and a finished `Trajectory`: train.py and eval.py both sample through `play_group`.
A trajectory holds each of its tokens once, in one append-only list; every prompt is a prefix of that list (the token
invariant, see protocol.py), so rollout log-probabilities line up with training tokens and the prefix cache hits.

Every trajectory is a coroutine of its own on the one event loop of the run: when its turn is sampled its world steps
and its next turn is submitted, and nobody waits for the slowest. Sampling seeds are a pure function of (run seed,
update, game, turn, branch).

Run by: `uv run python train.py` and `uv run python eval.py`
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import logging
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

from data import Game, SettingsError, batch_of_games, first_line, flag, require, told_by_kind
from environment import GameError, Group, WorldPool, WorldState
from protocol import (
    ChatTokens, Status, check_prefix_extension, first_messages, is_hybrid, load_model_config, parse_tool_call,
    tool_result,
)  # fmt: skip

if TYPE_CHECKING:
    import torch

INVALID_ACTION_PENALTY = 0.1
MAX_GROUP_SIZE = 256  # branches share the low 8 bits of a seed
DEMO_MODEL = "datasets/demo/model"
DEMO_DATA = "datasets/starter"

# Said when vLLM is imported, on every CPU where all is well. Its processes import this module before, with the script.
for _name in ("vllm.triton_utils.importing", "torch.utils.cpp_extension"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class RolloutError(RuntimeError):
    """The sampler died, or answered something no trajectory can be built from."""


# --- settings and flags ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutSettings:
    """How trajectories are sampled; shared by training and evaluation."""

    base_model: str = flag("Qwen/Qwen3.5-4B", "Hub id or folder of the model that plays and is trained")
    max_episode_steps: int = flag(50, "environment steps (assistant turns) a trajectory may take")
    include_admissible_actions: bool = flag(True, "list the admissible actions in every message to the model")
    max_trajectory_tokens: int = flag(12_000, "tokens of a trajectory: prompt, completions and observations together")
    max_assistant_tokens: int = flag(2_048, "tokens of one assistant turn")
    temperature: float = flag(1.0, "sampling temperature")
    top_p: float = flag(1.0, "nucleus sampling threshold; training needs 1.0")
    seed: int = flag(42, "seed of game order, sampling and adapter initialisation")
    dtype: str = flag("auto", "auto, float32 or bfloat16; auto is bfloat16 on CUDA and float32 on a CPU")
    engine_memory_share: float = flag(
        0.0, "share of the GPU that the sampling engine takes (CUDA only); 0 is what train.py --plan says, 0.9 in eval.py",
        fixed=False,
    )  # fmt: skip
    engine_cache_gb: float = flag(2.0, "key-value cache of the sampling engine in GiB (CPU only)", fixed=False)
    engine_tensor_parallel: int = flag(1, "GPUs over which a sampling engine splits the model", fixed=False)
    engine_data_parallel: int = flag(1, "sampling engines, on GPUs of their own; a game's branches share one", fixed=False)
    max_concurrent_requests: int = flag(64, "requests the sampling engine works on at the same time", fixed=False)

    def __post_init__(self) -> None:
        for name in ("max_episode_steps", "max_trajectory_tokens", "max_assistant_tokens", "max_concurrent_requests",
                     "engine_tensor_parallel", "engine_data_parallel"):  # fmt: skip
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        # vLLM takes less for 0.01, with a warning at most
        require(0.01 <= self.temperature < math.inf, "temperature", self.temperature, "a number of 0.01 or more")
        require(0 <= self.seed < 2**32, "seed", self.seed, "0 or more and below 2**32")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", self.dtype, "auto, float32 or bfloat16")
        require(0 <= self.engine_memory_share < 1, "engine_memory_share", self.engine_memory_share, "between 0 and 1")
        require(self.engine_cache_gb > 0, "engine_cache_gb", self.engine_cache_gb, "above 0")


# --- pure functions -------------------------------------------------------------------------------------------------


def request_seed(run_seed: int, update: int, game_id: str, turn: int, branch: int = 0) -> int:
    """Sampling seed of one turn: a hash of (run seed, update, game, turn) in the upper bits, the branch in the low 8.

    vLLM gives child i of a request with n > 1 the seed + i, so the first turn's one request of a whole group draws
    exactly the seeds that its branches would have drawn alone.
    """
    key = json.dumps([run_seed, update, game_id, turn]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest()) * MAX_GROUP_SIZE + branch


def trajectory_reward(won: bool, invalid_actions: int) -> float:
    """R = [won] - 0.1 * (malformed or inadmissible turns); nothing per step."""
    return float(won) - INVALID_ACTION_PENALTY * invalid_actions


def wilson_interval(successes: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion: (low, high) in [0, 1]. ValueError unless 0 <= successes <= trials >= 1.

    All p with |s/n - p| <= z sqrt(p (1 - p) / n), where z is the two-sided normal quantile of `confidence`:

        (s + z^2/2) / (n + z^2)  -+  z / (n + z^2) * sqrt(s (n - s) / n + z^2/4)

    Unlike mean -+ z standard errors it is sound near 0 and 1 and for small n.
    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927) 209-212.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials: no such proportion")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (successes + z * z / 2) / (trials + z * z)
    half = z / (trials + z * z) * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    # At the ends one bound is the proportion itself; rounding must not push it past.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)


def interval_over_games(wins: Sequence[int], tries: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the mean success of games that were played `tries` times each; `wins`: how often each was won.

    The tries of one game resemble each other, so games are what is counted: this is Wilson's interval for as many
    independent trials as would give the mean the variance that it has. With G games, shares p_g of mean p:

        n = p (1 - p) / (var(p_g) / G),    var(p_g) = sum_g (p_g - p)^2 / G,    n <= G * tries

    With one try n = G. Without any variance n = G too, the least it can be.
    Source: E. L. Korn and B. I. Graubard, Survey Methodology 24 (1998) 193-201, for clusters of equal size.
    """
    games, mean = len(wins), sum(wins) / (len(wins) * tries)
    variance = math.fsum((won / tries - mean) ** 2 for won in wins) / games
    trials = games if tries == 1 or not variance else min(games * tries, games * mean * (1 - mean) / variance)
    return wilson_interval(sum(wins) if tries == 1 else mean * trials, trials, confidence)


def pass_at(k: int, wins: Sequence[int], tries: int) -> float:
    """Estimated share of games that are won at least once in k of `tries` tries each; `wins`: as above.

    Mean over games of 1 - C(n - c, k) / C(n, k): the share of choices of k among a game's n tries that hold one of its
    c wins, which has no bias. Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    lost = math.fsum(math.comb(tries - won, k) / math.comb(tries, k) for won in wins)
    return 1 - lost / len(wins)


# --- records --------------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """One assistant message and what came of it."""

    prompt_length: int
    end: int  # the completion is tokens[prompt_length:end]
    logprobs: list[float]
    text: str
    finish_reason: str
    action: str | None
    error: str | None
    status: Status
    observation: str
    admissible: tuple[str, ...]
    state_id: str  # of the world's state in which the turn was taken

    @property
    def invalid(self) -> bool:
        return self.status in ("malformed", "not admissible")


@dataclass
class Trajectory:
    """All turns of one branch. `tokens` holds prompt, completions and observations, each token once."""

    game: Game
    update: int
    branch: int
    task: str
    messages: list[dict]
    tokens: list[int]
    turns: list[Turn] = field(default_factory=list)
    stop_reason: str = ""  # won, game_over, max_steps or max_tokens
    policy_version: str = ""

    @property
    def won(self) -> bool:
        return self.stop_reason == "won"

    @property
    def truncated(self) -> bool:
        return self.stop_reason in ("max_steps", "max_tokens")

    @property
    def invalid_actions(self) -> int:
        return sum(turn.invalid for turn in self.turns)

    @property
    def malformed(self) -> int:
        return sum(turn.status == "malformed" for turn in self.turns)

    @property
    def reward(self) -> float:
        return trajectory_reward(self.won, self.invalid_actions)

    @property
    def rewards(self) -> list[float]:
        """By turn: the penalty of an invalid action, 1 for the turn that won; they sum to the reward."""
        return [trajectory_reward(turn.status == "won", turn.invalid) for turn in self.turns]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[start, end) of each completion in `tokens`."""
        return [(turn.prompt_length, turn.end) for turn in self.turns]

    @property
    def logprobs(self) -> list[list[float]]:
        return [turn.logprobs for turn in self.turns]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens the engine was given over all turns (history counts again every turn)."""
        return sum(turn.prompt_length for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    def record(self, token_texts: Callable[[Sequence[int]], list[str]] | None = None, advantages: Sequence[float] = ()) -> dict:
        """Everything needed to read or replay the trajectory, as one JSON object.

        With `token_texts` also each token's text and log-probability, with `advantages` also each turn's and their mean.
        """
        logprobs = [logprob for turn in self.turns for logprob in turn.logprobs]
        more: list[dict] = [{"advantage": advantage} for advantage in advantages] or [{} for _ in self.turns]
        for turn, one in zip(self.turns, more, strict=True) if token_texts else ():
            one["tokens"] = token_texts(self.tokens[turn.prompt_length : turn.end])
            one["logprobs"] = [round(logprob, 6) for logprob in turn.logprobs]
        return {
            "type": "trajectory",
            **{name: getattr(self.game, name) for name in ("split", "game_id", "task_type")},
            "update": self.update + 1,
            **{name: getattr(self, name) for name in ("branch", "policy_version", "task", "won", "reward")},
            "steps": len(self.turns),
            "invalid_actions": self.invalid_actions,
            "valid_tool_calls": len(self.turns) - self.malformed,
            "admissible_actions": len(self.turns) - self.invalid_actions,
            **{name: getattr(self, name) for name in ("truncated", "stop_reason", "prompt_tokens", "sampled_tokens")},
            "trajectory_tokens": len(self.tokens),
            "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            **({"advantage": sum(advantages) / len(advantages)} if advantages else {}),
            "messages": self.messages,
            "turns": [
                {
                    "step": step,
                    **{name: getattr(turn, name) for name in ("action", "error", "status", "observation")},
                    "admissible": list(turn.admissible),
                    "prompt_tokens": turn.prompt_length,
                    "completion_tokens": turn.end - turn.prompt_length,
                    "finish_reason": turn.finish_reason,
                    "state_id": turn.state_id,
                    **one,
                }
                for step, (turn, one) in enumerate(zip(self.turns, more, strict=True), 1)
            ],
        }


def write_records(path: Path, records: Iterable[dict]) -> None:
    """Write trajectories' records as JSON lines, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    partial.replace(path)


# --- the sampler ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """Sampled tokens with their log-probabilities under the sampling distribution (temperature applied)."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass
class TokenCounts:
    """What the engine did since its start: prompt tokens read, those it had to compute, tokens sampled; requests it
    pushed out of a full cache and computed again (those tokens are not counted twice).
    """

    prompt: int = 0
    computed: int = 0
    sampled: int = 0
    preempted: int = 0

    def since(self, before: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*(now - then for now, then in zip(dataclasses.astuple(self), dataclasses.astuple(before))))


class Sampler:
    """One vLLM engine for the whole run; use it from one event loop only (its output task belongs to the first).

    `start` loads the base model. Weights reach it by `use_adapter` (a hot-loaded LoRA) or `reload` (merged weights).
    """

    def __init__(
        self, engine, settings: RolloutSettings, stop_token_ids: list[int], counts: TokenCounts, seeded: bool,
        guard: subprocess.Popen,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._guard = guard
        self._settings = settings
        self._seeded = seeded
        self._stop_token_ids = stop_token_ids
        self._counts = counts
        self._adapter = None
        self._requests = self._groups = 0
        self.ranks = settings.engine_data_parallel  # engines; weights go to all, a request to one
        self.policy_version = "base"

    @classmethod
    async def start(
        cls, settings: RolloutSettings, stop_token_ids: list[int], lora_rank: int = 0, **engine_options
    ) -> "Sampler":
        """Start the engine process. `lora_rank` above 0 prepares it for adapters of that rank.

        `engine_options` go to vLLM's engine arguments as they are, over the ones chosen here.
        """
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads and open sockets
        import torch
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        counts = TokenCounts()

        class CountTokens(StatLoggerBase):
            """vLLM's own per-iteration numbers: exact for requests with n > 1 too, where an output names one child."""

            def __init__(self, vllm_config, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
                if iteration_stats is not None:
                    counts.prompt += iteration_stats.prompt_token_stats.total
                    counts.computed += iteration_stats.prompt_token_stats.computed
                    counts.sampled += iteration_stats.num_generation_tokens
                    counts.preempted += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None: ...

        cuda, hybrid = torch.cuda.is_available(), is_hybrid(settings.base_model)
        options = {
            "model": settings.base_model,
            "dtype": engine_dtype(settings),
            "seed": settings.seed,
            "max_model_len": settings.max_trajectory_tokens,
            "max_num_seqs": settings.max_concurrent_requests,
            "tensor_parallel_size": settings.engine_tensor_parallel,
            "data_parallel_size": settings.engine_data_parallel,
            "enable_prefix_caching": True,
            # The log-probabilities of the distribution that was sampled from: temperature applied, as the trainer does.
            "logprobs_mode": "processed_logprobs",
            # Prompts go in and completions come out as token ids; sampling is what the flags say, not the checkpoint.
            "skip_tokenizer_init": True,
            "load_format": "safetensors",  # other formats may be unpickled
            "generation_config": "vllm",
            "language_model_only": True,
            "use_tqdm_on_load": False,
        }
        if hybrid:
            # Blocks of a recurrent model are large (528 tokens in Qwen3.5-4B): matching finer, and keeping the state at
            # the end of each prompt, halves the prompt tokens that are computed again. It must divide the block.
            options["prefix_match_unit"] = 16 if cuda else 32
        if lora_rank:
            from vllm.config.lora import MaxLoRARanks

            ranks = [rank for rank in typing.get_args(MaxLoRARanks) if rank >= lora_rank]
            if not ranks:
                largest = max(typing.get_args(MaxLoRARanks))
                raise SettingsError(f"the adapter's rank is {lora_rank}, and the engine takes at most {largest}: "
                                    "lower --lora-rank, or give --weight-sync merged")
            options |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": min(ranks),
                "lora_dtype": "auto",  # the model's own
            }
        if cuda:
            options["gpu_memory_utilization"] = settings.engine_memory_share or 0.9
            if settings.engine_tensor_parallel > torch.cuda.device_count():
                require(importlib.util.find_spec("ray") is not None, "engine_tensor_parallel", settings.engine_tensor_parallel,
                        f"at most the number of GPUs here, {torch.cuda.device_count()}; over several machines it takes Ray "
                        "(uv pip install ray)")  # fmt: skip
                options["distributed_executor_backend"] = "ray"  # over several machines
        else:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the engine: that its memory is bound to a NUMA node
            options |= {
                "enforce_eager": True,  # compiling costs half a minute a start and gains little on a CPU
                "kv_cache_memory_bytes": int(settings.engine_cache_gb * 2**30),
                # A seeded request whose prefill is split over steps crashes the CPU engine: never split one.
                "max_num_batched_tokens": max(32_768, settings.max_trajectory_tokens),
            }
            if not hybrid:
                options["enable_chunked_prefill"] = False
                options["block_size"] = 32  # the smallest the CPU kernels like: fewest prompt tokens computed twice
        arguments = AsyncEngineArgs(**(options | engine_options))
        folder = _engine_folder()
        # vLLM's processes outlive a killed parent. The guard ends when this process does, or lets go of its input.
        guard = subprocess.Popen([sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True)
        # In a thread, as the policy's work is: the loop stays free for the environment's workers.
        starting = asyncio.ensure_future(
            asyncio.to_thread(_start_in, folder, AsyncLLM.from_engine_args, arguments, stat_loggers=[CountTokens])
        )
        try:
            engine = await asyncio.shield(starting)
        except asyncio.CancelledError:
            while not starting.done():
                for process in multiprocessing.active_children():  # the engine, once it is there; the start then fails
                    process.kill()
                await asyncio.wait([starting], timeout=0.5)
            with contextlib.suppress(Exception):
                (await starting).shutdown()
            guard.communicate()
            raise
        except (RuntimeError, ValueError) as error:
            guard.communicate()
            # of its settings, before it begins: pydantic's, with the reason in the lines below the first
            reason = " ".join(str(error).split()) if isinstance(error, ValueError) else first_line(error)
            raise RolloutError(
                f"the engine did not start: {reason} Its own message is above. If it is out of memory: "
                "lower --engine-memory-share (GPU) or --engine-cache-gb (CPU), --max-trajectory-tokens, "
                "--max-concurrent-requests"
            ) from error
        # Caching a recurrent state splits prefills at block ends, and a seeded request with a split prefill crashes the
        # CPU engine: hybrids sample without request seeds there. On CUDA every request is seeded.
        seeded = cuda or not hybrid
        return cls(engine, settings, stop_token_ids, counts, seeded, guard)

    @property
    def counts(self) -> TokenCounts:
        return dataclasses.replace(self._counts)

    def next_rank(self) -> int:
        """The engine for the next group, in turn: its branches share a prefix cache."""
        self._groups += 1
        return self._groups % self.ranks

    async def sample(
        self, prompt: list[int], seed: int, max_tokens: int, n: int = 1, rank: int = 0, temperature: float | None = None
    ) -> list[Completion]:
        """`n` completions of `prompt` (token ids) by engine `rank`, child i seeded with seed + i.

        temperature: the engine's settings have it if None.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=n,
            seed=seed if self._seeded else None,
            temperature=self._settings.temperature if temperature is None else temperature,
            top_p=self._settings.top_p,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = await self._answer(prompt, params, rank)
        for o in final.outputs:
            if o.finish_reason == "stop" and o.token_ids[-1] not in self._stop_token_ids:
                raise RolloutError(
                    f"the engine ended a turn at token {o.token_ids[-1]}; known as end tokens, from the model's files, are "
                    f"{self._stop_token_ids}: add it to eos_token_id in its generation_config.json"
                )
        return [
            Completion(
                list(o.token_ids),
                [logprobs[token].logprob for logprobs, token in zip(o.logprobs, o.token_ids, strict=True)],
                o.finish_reason,
            )
            for o in sorted(final.outputs, key=lambda o: o.index)
        ]

    async def score(self, tokens: Sequence[int], rank: int = 0) -> list[float]:
        """Log-probabilities (temperature 1) of tokens[1:] under the weights in use, computed without the prefix cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._answer(list(tokens), params, rank)
        return [logprobs[token].logprob for logprobs, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]

    async def _answer(self, prompt: list[int], params, rank: int):
        """The engine's one final output for a prompt of token ids."""
        self._requests += 1
        final = None
        with _engine_alive():
            async for output in self._engine.generate(
                {"prompt_token_ids": prompt}, params, f"r{self._requests}", lora_request=self._adapter,
                data_parallel_rank=rank if self.ranks > 1 else None,
            ):  # fmt: skip
                final = output
        if final is None or len(final.outputs) != params.n or len(final.prompt_token_ids) != len(prompt):
            raise RolloutError(f"the engine gave no full answer to a prompt of {len(prompt)} tokens (n={params.n})")
        return final

    async def use_adapter(self, folder: Path, version: int) -> None:
        """Sample with the LoRA adapter in `folder` from now on; `version` must be new (it keys engine and cache)."""
        from vllm.lora.request import LoRARequest

        previous = self._adapter
        adapter = LoRARequest(f"update-{version}", version + 1, str(folder))
        with _engine_alive():
            if not await self._engine.add_lora(adapter):
                raise RolloutError(f"the engine did not take the adapter in {folder}")
        self._adapter = adapter
        self.policy_version = adapter.lora_name
        if previous is not None:
            await self._engine.remove_lora(previous.lora_int_id)

    async def reload(self, folder: Path, version: int) -> None:
        """Sample with the full weights in `folder` (safetensors) from now on, loaded over the old ones in place."""
        with _engine_alive():
            await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            # Key-value blocks of the old weights must not answer for the new ones.
            dropped = await self._engine.reset_prefix_cache()
        if not dropped:
            raise RolloutError("the engine could not drop its prefix cache: requests were still running during a reload")
        self.policy_version = f"update-{version}"

    async def drop_adapter(self) -> None:
        """Sample with the base again."""
        with _engine_alive():
            await self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter, self.policy_version = None, "base"

    async def adapters(self) -> list[int]:
        """Ids of the adapters that the engine holds."""
        with _engine_alive():
            return sorted(await self._engine.list_loras())

    async def sleep(self) -> None:
        """Give up the GPU's memory until `wake`: weights wait in host memory, the prefix cache is dropped."""
        with _engine_alive():
            await self._engine.sleep(level=1)  # level 2 would drop the weights

    async def wake(self) -> None:
        with _engine_alive():
            await self._engine.wake_up()

    def close(self) -> None:
        """End the engine and its processes."""
        self._engine.shutdown()
        self._guard.communicate()


@contextlib.contextmanager
def _engine_alive():
    """Say in our words that the engine's process is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise RolloutError(
            "the sampling engine died; its own message is above, if it left one. Usual cause: out of memory (lower "
            "--engine-memory-share or --engine-cache-gb, --max-concurrent-requests); what was learned is saved, go on with --resume"
        ) from error


def _engine_folder() -> Path:
    """A new folder for the sockets and files of an engine, outside TMPDIR if a socket's path would be too long there."""
    longest = 107 - len("/engine-12345678/") - 36  # Linux's limit (unix(7)), less the folder and a socket's name, a UUID
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(place)) <= longest:
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="engine-", dir=place))
    raise SettingsError(
        f"TMPDIR is {tempfile.gettempdir()!r}, and the engine's sockets need a folder that can be written and whose path "
        f"has at most {longest} bytes: neither TMPDIR nor /tmp is one"
    )


def _start_in(folder: Path, start: Callable, *arguments, **options):
    """Call `start` so that the processes it starts are the engine's: marked, settled, and deaf to Ctrl-C.

    VLLM_RPC_BASE_PATH, where vLLM puts its sockets, marks them for the guard. `settle_engine_process` reaches them as a
    general plug-in of vLLM, which is found as an installed package is, by a folder in Python's path. A signal that is
    blocked here is blocked in them: Ctrl-C goes to every process of a terminal, and is the run's to answer.
    """
    plugin = folder / "alfworld_engine-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: alfworld_engine\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nalfworld_engine = rollout:settle_engine_process\n")
    multiprocessing.resource_tracker.ensure_running()  # not one of them, and its start unblocks signals
    if "VLLM_PLUGINS" in os.environ:  # the only ones that are loaded
        os.environ["VLLM_PLUGINS"] += ",alfworld_engine"
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    sys.path.append(str(folder))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return start(*arguments, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        sys.path.remove(str(folder))
        del os.environ["VLLM_RPC_BASE_PATH"]


def settle_engine_process() -> None:
    """Called by vLLM in each process of the engine: leave the run's process group, use the engine's folder, and AMX.

    Signals to a group, as from `timeout`, are the run's to answer. bf16 kernels use a CPU's AMX tiles where it has them,
    but nobody asks the kernel for them, and the process dies with SIGILL.
    """
    import torch

    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)  # vLLM's own use of it
    if multiprocessing.parent_process() is not None:  # vLLM calls it in the run's own process too, given the chance
        os.setpgid(0, 0)
        tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"]
        torch.cpu._init_amx()


def guard_engine(folder: str) -> None:
    """A process of its own: when the run is over, however it ended, end what is left of its engine; remove `folder`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may be sent to every process of a job
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    mark, looks, deadline = f"VLLM_RPC_BASE_PATH={folder}".encode(), 2, time.monotonic() + 10
    while looks and time.monotonic() < deadline:  # once more after all are gone: one may have been starting another
        looks -= 1
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    looks = 2
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def engine_dtype(settings: RolloutSettings) -> str:
    """Number format of engine and trainer. Gated-DeltaNet kernels have no fp32 path on a CPU."""
    if settings.dtype != "auto":
        return settings.dtype
    import torch

    return "bfloat16" if torch.cuda.is_available() or is_hybrid(settings.base_model) else "float32"


def check_model(settings: RolloutSettings) -> None:
    """Refuse what can be refused without loading weights: no model, too short a context, no way to run it here."""
    config = load_model_config(settings.base_model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < settings.max_trajectory_tokens:
        raise SettingsError(
            f"--max-trajectory-tokens is {settings.max_trajectory_tokens}, but {settings.base_model!r} reads at most "
            f"{limit} tokens: lower it to {limit}"
        )
    if is_hybrid(settings.base_model) and engine_dtype(settings) != "bfloat16":
        raise SettingsError(f"--dtype is {settings.dtype!r}; {settings.base_model!r} runs in bfloat16 only")


# --- weight sync ----------------------------------------------------------------------------------------------------


class WeightsDidNotArrive(RuntimeError):
    """The engine samples with other weights than the trainer sent it."""


WAYS_OF_SYNC = ("auto", "adapter", "merged")


def resolve_sync(way: str, engine_dtype: str, lora_rank: int = 1) -> str:
    """The way of weight sync that `auto` stands for: merged without adapter and where sums are kept in fp32."""
    return way if way != "auto" else "merged" if engine_dtype == "float32" or not lora_rank else "adapter"


class Weights(typing.Protocol):
    """What can be sent to an engine."""

    def save_adapter(self, folder: Path, engine_layout: bool) -> None: ...
    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class WeightSync:
    """Brings weights to the engine, and proves that they arrived.

    Two ways. `adapter`: the LoRA adapter is written and hot-loaded under a new name, path and id each time (the engine
    takes a known id, and its prefix cache a known name, for the weights it already has). `merged`: base + LoRA of every
    adapted linear, summed in fp32, is written and loaded over the engine's weights in place; the prefix cache is dropped.
    `merged` is fast on a CPU, where LoRA requests are slow; but in bf16 it rounds small updates away, hence auto.
    """

    def __init__(
        self, policy: Weights, sampler: Sampler, way: str, engine_dtype: str, folder: Path | None = None
    ) -> None:
        """Weights pass through `folder`, which is emptied and goes away in the end; a temporary one if None."""
        self._policy = policy
        self._sampler = sampler
        self._way = way
        self._dtype = engine_dtype
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="sampler-weights-"))
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run has left
        folder.mkdir()
        self._root = folder
        self._adapter: Path | None = None

    async def push(self, version: int, probe: Sequence[int] | None = None, large: bool = False) -> None:
        """Sample with the policy's present weights from now on; `version` must not have been used before.

        With `probe` (token ids) the engine scores it before and after: new weights must change the scores. A large change
        must do so by more than a repetition does (nothing on a CPU); of a step of the recipe that can't be asked, as
        vLLM's LoRA kernels on a GPU add up in an order of their own each time, and in bf16 both may be as large.
        Raises WeightsDidNotArrive if they do not.
        """
        before = [await self._scores(probe) for _ in range(2 if large else 1)] if probe is not None else []
        folder = self._root / f"update-{version}"
        if self._way == "adapter":
            self._policy.save_adapter(folder, engine_layout=True)
            await self._sampler.use_adapter(folder, version)
            if self._adapter is not None:
                shutil.rmtree(self._adapter)
            self._adapter = folder
        else:
            import torch
            from safetensors.torch import save_file

            folder.mkdir()
            dtype = getattr(torch, self._dtype)
            tensors = {name: tensor.to(dtype).cpu() for name, tensor in self._policy.merged_tensors()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            await self._sampler.reload(folder, version)
            shutil.rmtree(folder)
        if before:
            after = await self._scores(probe)
            if not all(math.isfinite(score) for scores in after for score in scores):
                raise FloatingPointError(
                    f"the engine scores text as no number with weights {folder.name}, so they ran away: what was saved before "
                    "is intact; go on from there with a lower --learning-rate in a new run"
                )
            moved, noise = min(map(_largest_gap, after, before[0])), max(map(_largest_gap, before[0], before[-1]))
            if not moved > noise:
                raise WeightsDidNotArrive(
                    f"the engine scores text as before weights {folder.name} were sent to it (--weight-sync {self._way}, "
                    f"torch.{self._dtype}; change {moved:.3g}, repetition {noise:.3g}): they did not reach it. "
                    f"Try --weight-sync {'adapter' if self._way == 'merged' else 'merged'}"
                )

    async def _scores(self, probe: Sequence[int]) -> list[list[float]]:
        """By engine: each must have the weights."""
        return [await self._sampler.score(probe, rank) for rank in range(self._sampler.ranks)]

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _largest_gap(scores: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(score - other) for score, other in zip(scores, others, strict=True))


# --- playing --------------------------------------------------------------------------------------------------------


async def play_group(
    sampler: Sampler, chat: ChatTokens, pool: WorldPool, game: Game, size: int, update: int, settings: RolloutSettings,
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:  # fmt: skip
    """Play `size` branches of one game, each at its own pace; returns them in branch order."""
    group, rank = await pool.open_group(game.path, size), sampler.next_rank()
    try:
        shown = group.first.admissible if settings.include_admissible_actions else None
        messages = first_messages(group.task, group.first.observation, shown)
        prompt = chat.first_prompt(messages)
        trajectories = [
            Trajectory(game, update, branch, group.task, list(messages), list(prompt), policy_version=sampler.policy_version)
            for branch in range(size)
        ]
        room = settings.max_trajectory_tokens - len(prompt)
        if room < 1:
            for trajectory in trajectories:
                trajectory.stop_reason = "max_tokens"
                on_finished(trajectory)
            return trajectories
        first_turns = await sampler.sample(
            prompt,
            request_seed(settings.seed, update, game.game_id, turn=0),
            min(settings.max_assistant_tokens, room),
            n=size,
            rank=rank,
            temperature=settings.temperature,
        )

        async def play(trajectory: Trajectory, completion: Completion) -> Trajectory:
            await _play_branch(sampler, rank, chat, group, trajectory, completion, settings)
            group.finish(trajectory.branch)
            on_finished(trajectory)
            return trajectory

        return await gather_or_cancel(map(play, trajectories, first_turns))
    finally:
        group.close()


async def _play_branch(
    sampler: Sampler, rank: int, chat: ChatTokens, group: Group, trajectory: Trajectory, completion: Completion,
    settings: RolloutSettings,
) -> None:  # fmt: skip
    """One trajectory from its first completion to its end: record, act in the world, extend the prompt, sample."""
    tokens, limit = trajectory.tokens, settings.max_trajectory_tokens
    state = group.first
    while True:
        turn, state = await _take_turn(chat, group, trajectory, completion, state)
        trajectory.turns.append(turn)
        step = len(trajectory.turns)
        shown = state.admissible if settings.include_admissible_actions else None
        result = tool_result(step, settings.max_episode_steps, turn.status, turn.observation, shown)
        trajectory.messages += [{"role": "assistant", "content": turn.text}, {"role": "tool", "content": result}]
        if state.won or state.done:
            trajectory.stop_reason = "won" if state.won else "game_over"
        elif step == settings.max_episode_steps:
            trajectory.stop_reason = "max_steps"
        else:
            extension = chat.extension(completion.tokens, result)
            if len(tokens) + len(extension) >= limit:  # a prompt needs room for one sampled token at least
                trajectory.stop_reason = "max_tokens"
        if trajectory.stop_reason:
            break
        tokens += extension
        [completion] = await sampler.sample(
            list(tokens),
            request_seed(settings.seed, trajectory.update, trajectory.game.game_id, step, trajectory.branch),
            min(settings.max_assistant_tokens, limit - len(tokens)),
            rank=rank,
            temperature=settings.temperature,
        )
    check_prefix_extension(len(tokens), [turn.prompt_length for turn in trajectory.turns], trajectory.spans)


async def _take_turn(
    chat: ChatTokens, group: Group, trajectory: Trajectory, completion: Completion, state: WorldState
) -> tuple[Turn, WorldState]:
    """Append a completion to the trajectory, carry out its action, and return the turn and the world after it."""
    if not completion.tokens or any(map(math.isnan, completion.logprobs)):
        what = "a log-probability that is no number" if completion.tokens else "no tokens"
        raise RolloutError(
            f"the engine sampled {what} in turn {len(trajectory.turns) + 1} of branch {trajectory.branch} of "
            f"{trajectory.game.game_id} (weights: {trajectory.policy_version}): check the weights for NaN"
        )
    prompt_length = len(trajectory.tokens)
    trajectory.tokens += completion.tokens
    text, before = chat.completion_text(completion.tokens), state.state_id
    call = parse_tool_call(text)
    if call.action is None:
        status: Status = "malformed"
        observation = f"No action was taken: {call.error}. Call alfworld_step exactly once, at the end of your turn."
    else:
        status = "executed" if call.action in state.admissible else "not admissible"
        state = await group.step(trajectory.branch, call.action)
        observation = state.observation
        if state.won or state.done:
            status = "won" if state.won else "over"
    turn = Turn(
        prompt_length, len(trajectory.tokens), completion.logprobs, text, completion.finish_reason,
        call.action, call.error, status, observation, state.admissible, before,
    )  # fmt: skip
    return turn, state


async def gather_or_cancel(coroutines: Iterable[Awaitable]) -> list:
    """asyncio.gather, but the first failure cancels the rest and is raised only when all have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def playable_games(pool: WorldPool, games: Sequence[Game], ready: bool = False) -> list[Game]:
    """The games without those that cannot be played; tells of these by kind. Raises GameError if none is left.

    Only if all are made `ready`, at 0.1 s a game, what grounding shows (a goal out of reach) is known as well.
    """
    reasons = await (pool.ready if ready else pool.check)([game.path for game in games])
    for line in told_by_kind(reasons):
        print(f"left out: {line}", file=sys.stderr, flush=True)
    playable = [game for game in games if game.path not in reasons]
    if not playable:
        raise GameError(f"none of {len(games)} games can be played; the first: {next(iter(reasons.values()))}")
    return playable


async def games_of_update(
    pool: WorldPool, games: Sequence[Game], update: int, games_per_batch: int
) -> tuple[list[Game], dict[Path, str]]:
    """The games of one update, ready to be played, and those of its window that cannot be, with the reason.

    This is `batch_of_games` without all games that are unplayable: what is not known of them yet is found out for as
    many as the batch needs. So it depends on the files, the order and the update alone, in a resumed run too. Raises
    GameError if no game is left.
    """
    while True:
        batch = batch_of_games(games, update, games_per_batch, pool.unplayable)
        if not batch:
            raise GameError(f"none of {len(games)} games can be played; the first: {pool.unplayable[games[0].path]}")
        if not await pool.ready(game.path for game in batch):
            break
    window = [game.path for game in batch_of_games(games, update, games_per_batch)]
    return batch, {path: pool.unplayable[path] for path in window if path in pool.unplayable}


async def first_prompt_of(chat: ChatTokens, pool: WorldPool, game: Game, settings: RolloutSettings) -> list[int]:
    """The tokens of a game's first prompt."""
    group = await pool.open_group(game.path, 1)
    group.close()
    shown = group.first.admissible if settings.include_admissible_actions else None
    return chat.first_prompt(first_messages(group.task, group.first.observation, shown))


async def check_first_prompts(
    chat: ChatTokens, pool: WorldPool, games: Sequence[Game], settings: RolloutSettings
) -> None:
    """Raise SettingsError if a game's first prompt leaves no room for a completion (before a model is loaded)."""
    prompts = await gather_or_cancel(first_prompt_of(chat, pool, game, settings) for game in games)
    for game, length in zip(games, map(len, prompts)):
        if length >= settings.max_trajectory_tokens:
            raise SettingsError(
                f"--max-trajectory-tokens is {settings.max_trajectory_tokens}, but the first prompt of {game.path} "
                f"has {length} tokens: give at least {length + settings.max_assistant_tokens}"
            )


if __name__ == "__main__":
    guard_engine(sys.argv[1])
