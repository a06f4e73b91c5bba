"""Train the agent: a LoRA policy and its optimizer, memory plan, checkpoints and the training loop.

Owns what has state between a batch and the next weights: the policy with its optimizer, in one process or several,
how it shares a card with the sampler, what is saved, and the loop. What is learned is said in `advantages.py`, how new
weights reach the sampler in `rollout.py` (`WeightSync`).

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
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shutil
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

# Threads that spin while they wait for each other stand still beside a busy neighbour. It must be said before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from tqdm import tqdm, trange
from transformers import AutoConfig, Qwen3_5TextConfig
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from data import (
    ADAM, CHECKSUMS, HELD_OUT, SPLITS, VALUE_HEAD, CheckpointError, Game, Progress, RunLog, SettingsError,
    batch_of_games, check_same_base, check_swanlab, checkpoint_folder, complete_checkpoints, find_games, first_line,
    flag, hold_out, package_versions, point_to, read_checkpoint, read_progress, read_run_settings, remove_checkpoint,
    require, run_with_settings, sha256_of, shuffle_games, stored_base, stored_path, sync_to_disk, told_by_kind,
    uninterrupted, usable_path, visible,
)  # fmt: skip
from environment import EnvironmentSettings, WorldPool
from protocol import (
    SCALE_OPTIONS, ChatTokens, check_adapter, check_fit, is_hybrid, load_base, load_base_config, load_chat_tokens,
    load_model_config, merged_linears, model_shape, read_adapter_tensors, save_adapter_config, save_adapter_tensors,
    save_model,
)  # fmt: skip
from rollout import (
    DEMO_DATA, DEMO_MODEL, MAX_GROUP_SIZE, WAYS_OF_SYNC, RolloutSettings, Sampler, Trajectory, WeightSync,
    WeightsDidNotArrive, check_first_prompts, check_model, engine_dtype, first_prompt_of, games_of_update,
    gather_or_cancel, play_group, playable_games, resolve_sync, wilson_interval, write_records,
)  # fmt: skip
from advantages import (
    Batch, Episode, SignalSettings, TokenScores, TrainingDatum, credit, deal, discounted_returns, episode_of,
    join_scores, make_datum, mismatch_metrics, rollout_metrics, split_data, token_logprobs, token_losses,
    training_data, update_metrics, value_targets,
)  # fmt: skip


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
        self.width = self._head.weight.shape[1]  # of a hidden state
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

    def logprobs(
        self, datum: TrainingDatum, temperature: float | None = None, entropy_counts: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the datum's A sampled tokens under the present weights, float32 [A].

        temperature: the sampling temperature if None. entropy_counts: see token_logprobs.
        """
        positions_A = datum.mask_T.nonzero()[:, 0]
        hidden_AD = self._hidden(datum.tokens_T, positions_A).to(self._head.weight.dtype)
        return token_logprobs(hidden_AD, self._head.weight, self._head.bias, datum.targets_T[positions_A].to(self.device),
                              temperature or self.temperature, self.head_chunk, entropy_counts)

    def _hidden(self, tokens_T: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """The last hidden states [N, D] at some positions of a text."""
        autocast = not self.lora_rank and self._dtype != torch.float32
        # Each weight is used once, and a cache would hold the casts of all of them to the end of forward.
        with torch.autocast(self.device.type, self._dtype, enabled=autocast, cache_enabled=False):
            output = self._decoder(input_ids=tokens_T[None].to(self.device), use_cache=False)
        return output.last_hidden_state[0, positions_N.to(self.device)]

    @torch.no_grad()
    def hidden_before_turns(self, trajectory: Trajectory) -> torch.Tensor:
        """For each of N turns the last hidden state that its first token was sampled from, float32 [N, D] on the CPU."""
        positions_N = torch.tensor([turn.prompt_length - 1 for turn in trajectory.turns])
        return self._hidden(torch.tensor(trajectory.tokens), positions_N).float().cpu()

    @torch.no_grad()
    def measure(self, datum: TrainingDatum, temperature: float | None = None) -> torch.Tensor:
        """Log-probabilities as `logprobs` has them, without a gradient, on the CPU."""
        return self.logprobs(datum, temperature)[0].cpu()

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities (temperature 1) of tokens[1:], as `Sampler.score` gives the engine's."""
        datum = make_datum(tokens, [(1, len(tokens))], [[0.0] * (len(tokens) - 1)], [0.0], name="a text to score")
        return self.measure(datum, temperature=1.0).tolist()

    def accumulate(self, datum: TrainingDatum, signal: SignalSettings) -> TokenScores:
        """Add the gradient of one trajectory's summed loss; FloatingPointError before that if it is not finite.

        Returns the scores of its A sampled tokens, on the CPU, without a gradient.
        """
        base_A = self.base_logprobs(datum) if signal.kl_coefficient else None
        logprobs_A, entropies_A = self.logprobs(datum, entropy_counts=signal.entropy_coefficient > 0)
        parts_A = (part_T[datum.mask_T].to(self.device) for part_T in (datum.old_logprobs_T, datum.advantages_T, datum.weights_T))
        old_logprobs_A, advantages_A, weights_A = parts_A
        base_A = logprobs_A.detach() if base_A is None else base_A
        scores = TokenScores(logprobs_A, old_logprobs_A, advantages_A, entropies_A, weights_A, base_A)
        loss = token_losses(scores, signal).sum()
        if not loss.isfinite():
            if self.sharded:
                loss.backward()  # the others take part in it
            largest = (logprobs_A - old_logprobs_A).max().exp().item()
            raise FloatingPointError(f"{datum.name}: loss is {loss.item()}, largest ratio {largest:.3g}; no step was taken; "
                                     "what was saved before is intact. Lower --learning-rate if it comes again")
        loss.backward()
        return TokenScores(*(part.detach().cpu() for part in scores))

    @torch.no_grad()
    def base_logprobs(self, datum: TrainingDatum) -> torch.Tensor:
        """Log-probabilities [A] under the model without its adapter."""
        with self.model.disable_adapter():
            return self.logprobs(datum)[0]

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def step(self, grad_clip_norm: float) -> float:
        """Clip the accumulated gradient to `grad_clip_norm`, take one Adam step, clear it; returns the norm before.

        FloatingPointError, before any weight changes, if the norm is not finite.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, grad_clip_norm)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
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
            save_model(self.model, self.base_model, folder, dict(self.merged_tensors()) if self.sharded else None)

    def moments(self) -> dict[str, torch.Tensor]:
        """Adam's state in host memory: a weight's place in `parameters` and what it is (step, exp_avg, exp_avg_sq)."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return {f"{i}.{name}": value.cpu() for i, state in enumerate(states) for name, value in state.items()}

    def load_moments(self, path: Path) -> None:
        """Take over Adam's state as `moments` gave it; CheckpointError if it is not of these weights."""
        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                if {name.partition(".")[0] for name in names} not in (set(), set(map(str, range(len(self.parameters))))):
                    raise KeyError("another number of weights")
                for i, parameter in enumerate(self.parameters if names else []):
                    state = {name: file.get_tensor(f"{i}.{name}") for name in ("step", "exp_avg", "exp_avg_sq")}
                    if [value.shape for value in state.values()] != [(), parameter.shape, parameter.shape]:
                        raise KeyError(f"moments of another shape than weight {i}")
                    self.optimizer.state[parameter] = {
                        name: value if name == "step" else placed_like(parameter, value) for name, value in state.items()
                    }
        except (SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(f"{path} is no state of this run's optimizer: {first_line(error)}") from error

    def split(self) -> None:
        """Keep a part of the policy only, if it is sharded; Adam begins anew."""

    def gather(self, moments: bool) -> None:
        """Put together in process 0 what is sharded: the weights, and Adam's moments if asked, in host memory."""

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
        save_adapter_tensors(tensors, folder, engine_layout and self.vision_language)
        save_adapter_config(self.model.peft_config["default"], self.base_model, folder)

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

        SettingsError if there is none in `folder`, or if it belongs to another base, rank, scale or set of modules.
        """
        folder = Path(folder)
        saved, own = check_adapter(folder, self.base_model), self.model.peft_config["default"]
        for name in SCALE_OPTIONS:
            then, now = getattr(saved, name), getattr(own, name)
            if then != now:
                what = f"LoRA rank {then}, not {now}: pass --lora-rank {then}"
                if name != "r":
                    what = f"{name} {visible(then)}, not {now}: take a checkpoint that train.py saved"
                raise SettingsError(f"{folder} has {what}")
        tensors = read_adapter_tensors(folder)
        check_fit(tensors, self.model, folder)
        set_peft_model_state_dict(self.model, tensors)

    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor) of every linear of the layers: base + alpha / rank * B A, summed in fp32; and biases.

        With `lora_rank` 0: every weight. Names are those of the text model's own checkpoint (`model.layers.0....weight`),
        whatever the base's layout.
        Each tensor is new: the base stays as loaded, so nothing drifts over many updates.
        """
        return merged_linears(self.model) if self.lora_rank else self.model.named_parameters()


VALUE_STEPS = 20  # of the value head, an update


class ValueHead:
    """PPO's critic, for `--advantage gae`: V = w . h / |h| + b of the policy's last hidden state h where a turn begins.

    h is detached, so the policy's weights learn nothing from it; with length 1 it lets a learning rate mean the same for
    every model. V starts at 0. Weights and Adam's state are fp32 in host memory, in process 0 alone. As the states of an
    update are computed once, and the rest is small, each update takes VALUE_STEPS steps on all of its turns.
    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), arXiv 1707.06347, without shared layers.
    """

    def __init__(self, width: int, learning_rate: float) -> None:
        self._weights = {"weight": torch.zeros(width, requires_grad=True), "bias": torch.zeros((), requires_grad=True)}
        self._optimizer = torch.optim.Adam(self._weights.values(), lr=learning_rate)
        self._states_ND = torch.empty(0)

    def _values(self, states_ND: torch.Tensor) -> torch.Tensor:
        return F.normalize(states_ND, dim=1) @ self._weights["weight"] + self._weights["bias"]

    @torch.no_grad()
    def judge(self, policy: Policy, groups: list[list[Trajectory]]) -> list[list[Episode]]:
        """The trajectories as credit sees them, with the value of every turn under the present weights."""
        by_trajectory = [policy.hidden_before_turns(t) for group in groups for t in group if t.turns]
        self._states_ND = torch.cat(by_trajectory) if by_trajectory else torch.empty(0, policy.width)
        values = iter(self._values(self._states_ND).tolist())
        return [[episode_of(t)._replace(values_N=list(itertools.islice(values, len(t.turns)))) for t in group]
                for group in groups]  # fmt: skip

    def fit(self, groups: list[list[Episode]], signal: SignalSettings) -> dict[str, float]:
        """Learn from the update that was judged last; returns the metrics of the values that it was judged by."""
        if not len(self._states_ND):
            return {}
        episodes = [episode for group in groups for episode in group]
        targets_N = torch.tensor([target for episode in episodes for target in value_targets(episode, signal)])
        values_N = [value for episode in episodes for value in episode.values_N]
        returns_N = [g for episode in episodes for g in discounted_returns(episode.rewards_N, signal.discount)]
        errors_N = [g - value for g, value in zip(returns_N, values_N, strict=True)]
        explained = 1 - statistics.pvariance(errors_N) / max(statistics.pvariance(returns_N), 1e-12)
        losses = []
        for _ in range(VALUE_STEPS):
            loss = F.mse_loss(self._values(self._states_ND), targets_N)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            losses.append(loss.item())
        return {"train/value_loss": losses[0], "train/value_explained_variance": explained}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and Adam's state, by name."""
        found = {name: weight.detach() for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            found |= {f"{name}.{kind}": value for kind, value in self._optimizer.state.get(weight, {}).items()}
        return found

    def load(self, path: Path) -> None:
        """Take over what `tensors` gave; CheckpointError if it is not of such a head."""
        try:
            saved = load_file(path)
            for name, weight in self._weights.items():
                if saved[name].shape != weight.shape:
                    raise KeyError(f"{name} of another shape")
                weight.data.copy_(saved[name])
                state = {kind: saved.get(f"{name}.{kind}") for kind in ("step", "exp_avg", "exp_avg_sq")}
                if None not in state.values():
                    self._optimizer.state[weight] = state
        except (SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(f"{path} is no state of this run's value head: {first_line(error)}") from error


def placed_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor where a parameter is, or this process's part of it if the parameter is sharded."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


class ShardedPolicy(Policy):
    """A policy without adapter of which every trainer process holds a part: of weights, gradients and Adam's moments.

    torch's `fully_shard` (FSDP2; Zhao et al. 2023) puts a layer's weights together while it computes, in fp32 as they
    are, and sums gradients into the parts. Made whole, in host memory, until `split`; from then on all processes call
    its methods together. Files are those of a Policy, so a run may go on with another number of processes.
    """

    sharded = True

    def __init__(self, base_model: str, *, device: str | None = None, dtype: torch.dtype | None = None, **settings: Any):
        """As a Policy with `lora_rank` 0; `device` and `dtype` are those of the parts and of what they compute."""
        self._split_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.bfloat16 if self._split_device.type == "cuda" else torch.float32)
        super().__init__(base_model, lora_rank=0, device="cpu", dtype=dtype, **settings)
        self._weights: dict[str, torch.Tensor] = {}
        self._moments: dict[str, torch.Tensor] = {}

    def split(self) -> None:
        self.device, self._scorer = self._split_device, _Scorer(self.model, super().logprobs)
        self.parameters, self.optimizer = [], None  # which would keep what is whole
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for module in (*self._decoder.layers, self._scorer):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)  # a sum over trajectories
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self.parameters = list(self.model.parameters())
        self.optimizer = self._make_optimizer(self.parameters)

    def gather(self, moments: bool) -> None:
        options, names = StateDictOptions(full_state_dict=True, cpu_offload=True), dict(self.model.named_parameters())
        weights = get_model_state_dict(self.model, options=options)
        self._weights = {name: weights[name] for name in names if name in weights}  # a tied head once; in process 0
        self._moments = {}
        if moments and self.optimizer.state:  # without a step there are none, and torch would take one
            states = get_optimizer_state_dict(self.model, self.optimizer, options=options).get("state", {})
            for i, name in enumerate(names):
                self._moments |= {f"{i}.{kind}": value for kind, value in states.get(name, {}).items()}

    def logprobs(self, *how: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._scorer(*how, **more)

    def measure(self, datum: TrainingDatum, temperature: float | None = None) -> torch.Tensor:
        logprobs_A = super().measure(datum, temperature)
        self._scorer.reshard()  # which otherwise waits for a backward
        return logprobs_A

    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As they were gathered last."""
        yield from self._weights.items()

    def moments(self) -> dict[str, torch.Tensor]:
        return self._moments


class _Scorer(torch.nn.Module):
    """The model, entered where trajectories are scored: around that FSDP puts together what no layer has (embeddings, head)."""

    def __init__(self, model: torch.nn.Module, logprobs: Callable) -> None:
        super().__init__()
        self.model, self._logprobs = model, logprobs

    def forward(self, *how: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logprobs(*how, **more)


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
# Under torchrun every process holds the whole policy, or a part, and a share of an update's trajectories. All take the
# same updates; process 0 alone plays, writes and talks, and hands each batch to all (`share`). Loss and gradient are
# sums over tokens, so the number of processes changes rounding and nothing else.


class Ended(Exception):
    """Process 0 has come to its end, so the others have too."""


class OthersWait(RuntimeError):
    """An error in the midst of what all trainers do together: the others wait in it, until torchrun ends them."""


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
    # The others wait as long as a rollout takes. Batches go over gloo, gradients on GPUs over nccl.
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
        with contextlib.suppress(RuntimeError):  # another that failed listens no more
            dist.broadcast_object_list([Ended()], 0)
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


def share(value: Any = None) -> Any:
    """What process 0 has, in every process; all call this. Raises Ended in the others where process 0 has ended."""
    if dist.is_initialized():
        values = [value]
        dist.broadcast_object_list(values, 0)
        [value] = values
    if isinstance(value, Ended):
        raise value
    return value


def follow(make: Callable[[], Policy], settings: TrainSettings, signal: SignalSettings) -> None:
    """What every process but the first does: the same updates, on the batches that process 0 hands out, to its end."""
    with contextlib.suppress(Ended):
        checkpoint = share()  # comes when the engine has started, which measures what is free on its card
        policy = make()
        begin(policy, checkpoint)
        policy.score(share())
        while True:
            batch = share()
            with contextlib.suppress(FloatingPointError, MismatchTooLarge):  # process 0 raises it too, and decides
                learn(policy, batch, settings, signal)


def begin(policy: Policy, checkpoint: Path | None) -> None:
    """Bring a new policy to where the run stands; a sharded one keeps its part from here on."""
    if checkpoint:
        policy.load(checkpoint / "sampler")
    policy.split()
    if checkpoint:
        policy.load_moments(checkpoint / "state" / ADAM)
        policy.gather(moments=False)


def learn(policy: Policy, batch: Batch, settings: TrainSettings, signal: SignalSettings) -> dict[str, float]:
    """One update on a batch, by all trainer processes together; returns its metrics.

    Without advantages and other terms of the loss there is no gradient: the first datum is measured, no step is taken.
    """
    metrics: dict[str, float] = {}
    try:
        if any(datum.advantages_T.any() for datum in batch.data) or batch.data and signal.has_other_terms:
            metrics = take_steps(policy, batch, settings, signal)
        elif batch.data:
            datum = batch.data[0]
            metrics = mismatch_metrics(policy.measure(datum), datum.old_logprobs_T[datum.mask_T])
            check_mismatch(metrics, settings.max_mismatch_kl)
        policy.gather(batch.save)
    except Exception as error:
        if policy.sharded and not isinstance(error, (FloatingPointError, MismatchTooLarge)):
            policy.whole = False  # nor could it be saved without the others
            raise OthersWait(f"{type(error).__name__} in what all trainers do together: {first_line(error)}") from error
        raise
    if dist.is_initialized():  # all have given back memory that they don't keep, for engines that may be on their cards
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        dist.all_gather_object([None] * dist.get_world_size(), None)  # over gloo, unlike a barrier
    return metrics


def take_steps(policy: Policy, batch: Batch, settings: TrainSettings, signal: SignalSettings) -> dict[str, float]:
    """The optimizer steps of an update: `epochs` passes over its data, `minibatches` steps each.

    The ratio stays against the rollout's log-probabilities. Metrics are those of the first pass; a later one adds its own
    clip fraction and KL. Raises MismatchTooLarge, with no step taken, if trainer and engine disagree before the first.
    """
    policy.set_learning_rate(learning_rate_at(batch.update, settings))
    scored: dict[int, list[TokenScores]] = {}
    norms: list[float] = []
    for epoch in range(1, settings.epochs + 1):
        for part in split_data(batch.data, settings.minibatches, f"{batch.update} {epoch}"):
            scores = accumulate_all(policy, part, signal)
            mismatch = mismatch_metrics(scores.logprobs, scores.old_logprobs)
            if not norms:
                check_mismatch(mismatch, settings.max_mismatch_kl)
                before = mismatch
            elif settings.stop_kl and not mismatch["mismatch/k3"] <= settings.stop_kl:
                policy.optimizer.zero_grad(set_to_none=True)
                return pass_metrics(scored, norms, settings, signal) | before
            norms.append(policy.step(settings.grad_clip_norm))
            scored.setdefault(epoch, []).append(scores)
    return pass_metrics(scored, norms, settings, signal) | before


def pass_metrics(
    scored: dict[int, list[TokenScores]], norms: list[float], settings: TrainSettings, signal: SignalSettings
) -> dict[str, float]:
    """Metrics of an update's passes, from the scores that each step began with, by pass, and the gradients' norms."""
    first, *later = (update_metrics(join_scores(scores), signal) for scores in scored.values())
    metrics = first | {"train/grad_norm": statistics.fmean(norms)}
    if settings.epochs * settings.minibatches > 1:
        metrics["train/optimizer_steps"] = len(norms)
    for epoch, of_pass in enumerate(later, 2):
        metrics |= {f"train/clip_fraction_{epoch}": of_pass["train/clip_fraction"], f"train/kl_{epoch}": of_pass["mismatch/k3"]}
    return metrics


def accumulate_all(policy: Policy, data: Sequence[TrainingDatum], signal: SignalSettings) -> TokenScores:
    """`policy.accumulate` over all data, by all processes; the summed gradient and all scores end up in each.

    An error in any process is raised in all.
    """
    if not dist.is_initialized():
        return join_scores([policy.accumulate(datum, signal) for datum in data])
    hands = deal(data, dist.get_world_size(), in_step=policy.sharded)
    mine = [(index, data[index]) for index in hands[dist.get_rank()]]
    if policy.sharded:  # who has one less repeats another, without weight
        shortest = min(data, key=lambda datum: len(datum.tokens_T))
        idle = replace(shortest, weights_T=torch.zeros_like(shortest.weights_T))
        mine += [(-1, idle)] * (len(hands[0]) - len(mine))
    results, failure = {}, None
    for index, datum in mine:
        try:
            results[index] = policy.accumulate(datum, signal)
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
    return join_scores([joined[index] for index in sorted(joined)])


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
    value_learning_rate: float = flag(0.01, "gae: that of the value head")
    beta1: float = flag(0.9, "Adam's beta1")
    beta2: float = flag(0.95, "Adam's beta2")
    weight_decay: float = flag(0.0, "decoupled weight decay")
    grad_clip_norm: float = flag(1.0, "largest norm of an update's gradient")
    epochs: int = flag(1, "passes over an update's data; above 1 takes more from each rollout, at more distance from it")
    minibatches: int = flag(1, "optimizer steps a pass, each on its share of the update's trajectories")
    stop_kl: float = flag(0.0, "end an update's passes once KL(rollout || policy), estimator k3, exceeds this; 0 never")
    learning_rate_schedule: str = flag("constant", "constant, linear or cosine: towards 0 at --max-steps, after the warm-up")
    warmup_updates: int = flag(0, "updates over which the learning rate rises from 0")
    horizon: str = flag(
        "", "steps a trajectory by stage, such as 10,20,30 (short ones first teach faster); --max-episode-steps if empty",
    )  # fmt: skip
    horizon_every: int = flag(100, "updates a stage of --horizon; the last one stays")
    fill_groups: int = flag(
        1, "play up to N times --games-per-batch games an update, until as many groups as asked for have unequal rewards",
    )  # fmt: skip
    shard_trainers: bool = flag(
        False, "with --lora-rank 0, under torchrun: the trainers hold a part each of weights, gradients and Adam's moments "
        "(FSDP2) instead of all", fixed=False,
    )  # fmt: skip
    held_out_games: int = flag(0, "training games, the same in every run, that are kept out of training for --eval-every")
    eval_every: int = flag(0, "play --eval-split every N updates and at the end, and log its success; 0 never", fixed=False)
    eval_split: str = flag("held_out", "what it plays: held_out, or a validation split by name", fixed=False)
    eval_games: int = flag(0, "how many of its games; 0 plays all", fixed=False)
    eval_temperature: float = flag(0.01, "temperature of that", fixed=False)
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
    record_logprobs: bool = flag(
        False, "write the text and log-probability of every sampled token into the rollouts, for the replay page to shade "
        "(about 50 bytes a token)", fixed=False,
    )  # fmt: skip
    swanlab_project: str = flag("alfworld-grpo", "SwanLab project", fixed=False)
    swanlab_mode: str = flag("local", "online, local, offline or disabled", fixed=False)

    def __post_init__(self) -> None:
        for name in ("max_steps", "games_per_batch", "head_chunk", "epochs", "minibatches", "horizon_every", "fill_groups"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        # an advantage is against the group's mean: of one trajectory it is 0
        require(2 <= self.group_size <= MAX_GROUP_SIZE, "group_size", self.group_size, f"at least 2 and at most {MAX_GROUP_SIZE}")
        for name in ("max_train_games", "save_every", "keep_checkpoints", "weight_decay", "lora_rank", "warmup_updates", "stop_kl",
                     "held_out_games", "eval_every", "eval_games"):  # fmt: skip
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(self.max_staleness in (0, 1), "max_staleness", self.max_staleness, "0 or 1")
        for name in ("learning_rate", "value_learning_rate", "grad_clip_norm", "max_mismatch_kl"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a number above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        require(self.learning_rate_schedule in SCHEDULES, "learning_rate_schedule", self.learning_rate_schedule, " or ".join(SCHEDULES))
        require(self.eval_split in (HELD_OUT, *SPLITS[1:]), "eval_split", self.eval_split, " or ".join((HELD_OUT, *SPLITS[1:])))
        require(
            not self.eval_every or self.eval_split != HELD_OUT or self.held_out_games > 0, "held_out_games", 0,
            "above 0 with --eval-every, or name a validation split as --eval-split",
        )  # fmt: skip
        require(0.01 <= self.eval_temperature < math.inf, "eval_temperature", self.eval_temperature, "a number of 0.01 or more")
        stages = [int(stage) if re.fullmatch(r"[1-9]\d{0,5}", stage) else 0 for stage in self.horizon.split(",")]
        require(
            not self.horizon or 0 < min(stages) and stages == sorted(set(stages)), "horizon", self.horizon,
            "steps that rise from stage to stage, as in --horizon 10,20,30",
        )  # fmt: skip
        require(bool(re.fullmatch(r"|here|0*[1-9]\d*(\.\d+)?", self.plan)), "plan", self.plan, "a size in GiB, as in --plan 80, or nothing")
        require(self.weight_sync in WAYS_OF_SYNC, "weight_sync", self.weight_sync, " or ".join(WAYS_OF_SYNC))
        require(not self.shard_trainers or self.lora_rank == 0, "lora_rank", self.lora_rank, "0 with --shard-trainers")
        require(self.lora_rank > 0 or self.weight_sync != "adapter", "weight_sync", "adapter", "merged with --lora-rank 0")
        require(
            self.run_name in ("", Path(self.run_name).name) and self.run_name != "..", "run_name", self.run_name,
            "one folder name, not a path; --runs-dir says where",
        )  # fmt: skip


SCHEDULES = ("constant", "linear", "cosine")


def learning_rate_at(update: int, settings: TrainSettings) -> float:
    """The learning rate of an update (from 1): it rises over the warm-up, then stays or falls, to 0 after the last."""
    if update <= settings.warmup_updates:
        return settings.learning_rate * update / (settings.warmup_updates + 1)
    left = (settings.max_steps - update + 1) / max(1, settings.max_steps - settings.warmup_updates)
    factor = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
    return settings.learning_rate * factor[settings.learning_rate_schedule]


def horizon_at(update: int, settings: TrainSettings, max_episode_steps: int) -> int:
    """Steps a trajectory of an update (from 1) may take.

    By stages as in ScalingInter (Xi et al., "AgentGym-RL", 2025, arXiv 2509.08755, section 3.3).
    """
    if not settings.horizon:
        return max_episode_steps
    stages = [int(stage) for stage in settings.horizon.split(",")]
    return stages[min((update - 1) // settings.horizon_every, len(stages) - 1)]


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


# Of the model card of Qwen/Qwen3.5-4B, so that a plan for the recipe needs neither the model nor the hub: 8 x (3 Gated
# DeltaNet + 1 attention), 16 heads for q and 4 for k and v of 256, 32 heads for the linear v and 16 for q and k of 128.
RECIPE_SHAPE = {
    "vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "tie_word_embeddings": True, "mamba_ssm_dtype": "float32",
}  # fmt: skip


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
    model, targets = model_shape(config), LORA_TARGETS.get(config.model_type)
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


def planned_config(base_model: str):
    """The text config of the model to plan for. The recipe's is not looked for on the hub, as its shape is known."""
    if base_model == RolloutSettings.base_model and not os.path.isdir(base_model):
        how = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
        if not cached_file(base_model, "config.json", **how):
            print(f"{base_model} is not on this machine: this is the plan for its shape as published", flush=True)
            return Qwen3_5TextConfig(**RECIPE_SHAPE)
    return load_model_config(base_model)


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
        planned_config(play.base_model), card=card, tokens=play.max_trajectory_tokens,
        concurrent=min(
            play.max_concurrent_requests,
            math.ceil(settings.games_per_batch / play.engine_data_parallel) * settings.group_size,
        ),
        lora_rank=settings.lora_rank, head_chunk=settings.head_chunk, width=dtype.itemsize,
        fused=not torch.cuda.is_available() or has_fused_delta_rule(),  # the gpu extra has it
        merged=way == "merged", scored_tokens=PROBE_TOKENS, shards=processes if settings.shard_trainers else 1,
        tensor_parallel=play.engine_tensor_parallel, allowed=allowed,
    )  # fmt: skip


# --- engine and trainer together ------------------------------------------------------------------------------------


def parity(scores: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """`mismatch_metrics` of a text: the trainer's scores of it and the engine's."""
    return mismatch_metrics(torch.tensor(scores), torch.tensor(others))


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
    """Nats a token."""
    return statistics.fmean(abs(score - other) for score, other in zip(scores, others, strict=True))


# --- checkpoints --------------------------------------------------------------------------------------------------


def save_checkpoint(
    run_dir: Path, policy: Policy, progress: Progress, keep: int, critic: ValueHead | None = None
) -> Path:
    """Write what goes on (`state/`) and what plays (`sampler/`); whole or not at all, whatever ends the process.

    Written beside, synced to disk, renamed; then the link `latest` is replaced. `keep` > 0 drops all before but the
    newest `keep`.
    """
    folder = checkpoint_folder(run_dir, progress.update)
    root = folder.parent
    partial = root / f"{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    policy.save(partial / "sampler")
    (partial / "state").mkdir()
    save_file(policy.moments(), partial / "state" / ADAM)
    if critic:
        save_file(critic.tensors(), partial / "state" / VALUE_HEAD)
    about = json.dumps({"run": run_dir.name} | asdict(progress), indent=1) + "\n"
    for part in ("state", "sampler"):
        (partial / part / "training.json").write_text(about)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    (partial / CHECKSUMS).write_text("".join(f"{sha256_of(path)}  {path.relative_to(partial)}\n" for path in files))
    for path in [*partial.rglob("*"), partial]:
        sync_to_disk(path)
    remove_checkpoint(folder)  # of the same update, from before the run was resumed further back
    partial.rename(folder)
    sync_to_disk(root)
    point_to(folder)
    # Later ones, from before the run was resumed further back, are not counted.
    until_this = [path for path in complete_checkpoints(root) if path.name <= folder.name]
    best = (root / "best").resolve()
    for old in until_this[:-keep] if keep else []:
        if old.resolve() != best:
            remove_checkpoint(old)
    return folder


def try_saving(run_dir: Path, base_model: str, lora_rank: int) -> None:
    """Save all of a model but its weights and take that away again: a run that can't save ends before it learns."""
    scratch, config = run_dir / "checkpoints" / "trial.partial", load_base_config(base_model).get_text_config()
    shutil.rmtree(scratch, ignore_errors=True)
    disable_progress_bar()
    try:
        if lora_rank:
            adapted = Policy._with_adapter(model_shape(config), lora_rank, seed=0)
            save_adapter_config(adapted.peft_config["default"], base_model, scratch)
        else:
            save_model(model_shape(config), base_model, scratch, {})
    except OSError:  # of the disk
        raise
    except Exception as error:  # transformers and its tokenizers have many reasons not to write what they have read
        raise SettingsError(f"{base_model} could be trained, but not saved: {visible(first_line(error))}; mend that in "
                            f"it, and go on with --resume {run_dir}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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


def resumed_settings(args: argparse.Namespace) -> dict:
    """The settings of the run that `--resume` goes on with; empty without it, and where `auto` names a run that is yet to begin."""
    resume = getattr(args, "resume", "")
    runs_dir, run_name = getattr(args, "runs_dir", TrainSettings.runs_dir), getattr(args, "run_name", "")
    if resume == "auto" and run_name and not (Path(runs_dir) / run_name).exists():
        resume = args.resume = ""
    if not resume:
        return {}
    run_dir, folder = find_run(resume, runs_dir, run_name)
    if resume == "auto":
        args.resume = str(run_dir)  # whatever folder of runs its settings name
    if folder:
        saved, path = read_checkpoint(folder).settings, folder / "state" / "training.json"
    else:
        saved, path = read_run_settings(run_dir), run_dir / "settings.json"
    known = {f.name: f for cls in (TrainSettings, SignalSettings, RolloutSettings, EnvironmentSettings) for f in fields(cls)}
    for name, f in known.items():
        value = saved.setdefault(name, f.default)  # a setting may be newer than the run, which then was as by default
        if type(value) is not type(f.default) and not (type(value) is int and type(f.default) is float):
            raise CheckpointError(f"{path}: the setting {name} is {str(value)[:40]!r}; start a new run")
    return {name: usable_path(saved[name]) if name in STORED_NAMES else saved[name] for name in known}


STORED_NAMES = {"base_model": stored_base, "data_root": stored_path, "runs_dir": stored_path}


def stored_settings(*settings: TrainSettings | SignalSettings | RolloutSettings | EnvironmentSettings) -> dict:
    """All settings by name, as files hold them: paths that mean the same from any folder."""
    everything = {name: value for part in settings for name, value in asdict(part).items()}
    return everything | {name: store(everything[name]) for name, store in STORED_NAMES.items()}


def check_resumable(progress: Progress, settings: dict, games: str) -> None:
    """Refuse to go on with settings or games that would give another result; say what else is not as it was."""
    known = [f for cls in (TrainSettings, SignalSettings, RolloutSettings) for f in fields(cls) if f.metadata["fixed"]]
    for f in known:
        then, now = progress.settings.get(f.name, f.default), settings[f.name]
        refusal = (f"--{f.name.replace('_', '-')} was {visible(repr(then))} in the run that is resumed and is now "
                   f"{now!r}, which would alter its result: leave the flag out, or start a new run")  # fmt: skip
        if f.name == "base_model":
            check_same_base(then, now, refusal)
        elif then != now:
            raise CheckpointError(refusal)
    if progress.games != games:
        raise CheckpointError(f"the games in {settings['data_root']} are not those the run began with: --data-root must "
                              f"have the same (it was {visible(progress.settings['data_root'])})")
    if progress.update >= settings["max_steps"]:
        raise CheckpointError(f"the run has done {progress.update} updates, and --max-steps is {settings['max_steps']}: "
                              "give more to go on")
    for name, now in package_versions().items():
        if (then := progress.versions.get(name)) != now:
            print(f"{name} was {visible(then)} when the run was saved and is now {now}: last digits may differ")


# --- the loop -----------------------------------------------------------------------------------------------------

PROBE_TOKENS = 256


class MismatchTooLarge(RuntimeError):
    """Rollout and trainer log-probabilities of the same tokens are too far apart to train on."""


@dataclass
class Run:
    """A run under way, in the process that plays, writes and talks."""

    settings: TrainSettings
    signal: SignalSettings
    play: RolloutSettings
    everything: dict  # all settings, as they are saved
    folder: Path
    games: list[Game]
    meter: list[Game]  # not trained on, played by --eval-every
    chat: ChatTokens
    pool: WorldPool
    log: RunLog
    sampler: Sampler
    card: SharedCard
    policy: Policy
    critic: ValueHead | None  # of --advantage gae
    sync: WeightSync
    progress: Progress  # after the last update
    saved: int  # updates in the last checkpoint
    meanwhile: set[asyncio.Task]  # what a signal ends at once, while an update comes to its end
    ended: float  # when the last update did, in monotonic seconds


async def train(
    settings: TrainSettings, signal: SignalSettings, play: RolloutSettings, worlds: EnvironmentSettings
) -> None:
    """The whole run. Under torchrun process 0 leads and the others follow."""
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
            await uninterrupted(asyncio.to_thread(follow, functools.partial(make_policy, settings, play), settings, signal))
        else:
            await lead(settings, signal, play, worlds)


async def lead(
    settings: TrainSettings, signal: SignalSettings, play: RolloutSettings, worlds: EnvironmentSettings
) -> None:
    """Check everything that can be checked, start engine and policy, then one update after the other.

    Whatever ends it (a signal, a fault) ends it between two updates: a rollout is thrown away, an optimizer step is
    finished, and what was learned is saved.
    """
    with contextlib.ExitStack() as stack:
        run = await start_run(settings, signal, play, worlds, stack)
        rollouts = Rollouts(run)
        try:
            for update in trange(run.progress.update + 1, settings.max_steps + 1, desc="updates", unit="update"):
                groups, metrics = await rollouts.of(update)
                await uninterrupted(learn_from(run, update, groups, metrics, rollouts), run.meanwhile)
            lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            print(closing_lines([json.loads(line) for line in lines]), flush=True)
        except BaseException:
            await rollouts.cancel()
            save_on_the_way_out(run)
            print(f"To go on: uv run python train.py --resume {run.folder}", flush=True)
            raise


async def learn_from(
    run: Run, update: int, groups: list[list[Trajectory]], metrics: dict[str, float], rollouts: Rollouts
) -> None:
    """An update after its rollout, up to where the run could be resumed: credit, train, sync, log, save."""
    settings, policy = run.settings, run.policy
    with timed(metrics, "time/train"):
        await run.card.to_trainer()
        if run.critic:
            episodes = await asyncio.to_thread(run.critic.judge, policy, groups)
        else:
            episodes = [[episode_of(trajectory) for trajectory in group] for group in groups]
        advantages = credit(episodes, run.signal)
        write_records(run.folder / "rollouts" / f"update-{update:04d}.jsonl", rollout_records(run, groups, advantages))
        save_now = update == settings.max_steps or bool(settings.save_every) and update % settings.save_every == 0
        batch = Batch(training_data(groups, advantages, run.signal), update, save_now)
        learned = await asyncio.to_thread(lambda: learn(policy, share(batch), settings, run.signal))
        metrics |= rollout_metrics(groups, advantages) | {"tokens/trained": 0} | learned
        if run.critic:
            metrics |= run.critic.fit(episodes, run.signal)
    await rollouts.played()  # its trajectories keep the weights they began with
    stepped = "train/grad_norm" in metrics
    try:
        with timed(metrics, "time/sync"):
            await run.card.to_engine(policy)
            if stepped:
                await run.sync.push(update, batch.data[0].tokens_T[:PROBE_TOKENS].tolist())
        if run.meter and (update == settings.max_steps or update % settings.eval_every == 0):
            metrics |= await unless_stopped(play_meter(run, update), run.meanwhile)
    except FloatingPointError:
        policy.whole = False
        raise
    finally:  # the step is taken, whatever becomes of the engine
        log_update(run, update, metrics, stepped)
    tqdm.write(update_line(update, settings.max_steps, metrics))
    if save_now:
        await asyncio.to_thread(save, run)


def rollout_records(run: Run, groups: list[list[Trajectory]], advantages: list[list[list[float]]]) -> Iterator[dict]:
    """What is written of each trajectory; advantages where they are not the recipe's, which follow from the rewards."""
    token_texts = run.chat.token_texts if run.settings.record_logprobs else None
    for trajectory, by_turn in zip(sum(groups, []), sum(advantages, []), strict=True):
        yield trajectory.record(token_texts, by_turn if run.signal.advantage != "group-mean" else ())


class Rollouts:
    """The rollouts of a run, in order. With `--max-staleness 1` the next is played while the trainer works."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.ahead: asyncio.Task | None = None

    async def of(self, update: int) -> tuple[list[list[Trajectory]], dict[str, float]]:
        rollout = await (self.ahead or play_update(self._run, update))
        self.ahead = None
        if self._run.settings.max_staleness and update < self._run.settings.max_steps:
            self.ahead = asyncio.ensure_future(play_update(self._run, update + 1))
            self._run.meanwhile.add(self.ahead)
            self.ahead.add_done_callback(self._run.meanwhile.discard)
        return rollout

    async def played(self) -> None:
        """Wait for what is played ahead; `of` gives it, or raises its error."""
        if self.ahead:
            await asyncio.wait([self.ahead])

    async def cancel(self) -> None:
        if self.ahead:
            self.ahead.cancel()
        await self.played()


async def play_update(run: Run, update: int) -> tuple[list[list[Trajectory]], dict[str, float]]:
    """An update's trajectories, by game, and what sampling them took.

    With `--fill-groups` N an update has a window of N times as many games; those beyond the first --games-per-batch are
    played while groups with equal rewards, which teach nothing, leave room (dynamic sampling; Yu et al., "DAPO", 2025).
    """
    settings, metrics, groups = run.settings, {}, []
    counted, faults = run.sampler.counts, run.pool.faults
    play = replace(run.play, max_episode_steps=horizon_at(update, settings, run.play.max_episode_steps))
    size, wanted = settings.group_size, settings.games_per_batch
    with timed(metrics, "time/rollout"), tqdm(total=wanted * size, desc="trajectories", leave=False) as bar:
        window, left_out = await games_of_update(run.pool, run.games, update - 1, wanted * settings.fill_groups)
        for line in told_by_kind(left_out):
            tqdm.write(f"update {update} goes on without {line}", file=sys.stderr)
        if update < settings.max_steps:
            following = batch_of_games(run.games, update, wanted * settings.fill_groups, run.pool.unplayable)
            run.pool.prefetch(game.path for game in following[:wanted])
        games = iter(window)
        while chosen := list(itertools.islice(games, wanted)):
            bar.total = (len(groups) + len(chosen)) * size
            groups += await gather_or_cancel(
                play_group(run.sampler, run.chat, run.pool, game, size, update - 1, play, lambda _: bar.update())
                for game in chosen
            )
            wanted = settings.games_per_batch - sum(len({t.reward for t in group}) > 1 for group in groups)
    counts = run.sampler.counts.since(counted)
    if settings.horizon:
        metrics["rollout/horizon"] = play.max_episode_steps
    return groups, {
        "rollout/env_faults": run.pool.faults - faults,
        "rollout/games_left_out": len(left_out),
        "rollout/preempted": counts.preempted,
        "tokens/prompt_read": counts.prompt,
        "tokens/prompt_computed": counts.computed,
        "tokens/prompt_computed_share": counts.computed / max(1, counts.prompt),
        "tokens/sampled": counts.sampled,
    } | metrics


async def play_meter(run: Run, update: int) -> dict[str, float]:
    """Play the meter's games once with the present weights, as eval.py would; `eval/` metrics. Nothing else changes."""
    play = replace(run.play, temperature=run.settings.eval_temperature)
    metrics: dict[str, float] = {}
    with timed(metrics, "time/eval"):
        groups = await gather_or_cancel(play_group(run.sampler, run.chat, run.pool, game, 1, 0, play) for game in run.meter)
    trajectories = [replace(trajectory, update=update - 1) for [trajectory] in groups]
    folder = run.folder / "evals"
    folder.mkdir(exist_ok=True)
    write_records(folder / f"update-{update:04d}.jsonl", (trajectory.record() for trajectory in trajectories))
    n, won = len(trajectories), sum(trajectory.won for trajectory in trajectories)
    low, high = wilson_interval(won, n)
    return metrics | {
        "eval/success": won / n,
        "eval/success_low": low,
        "eval/success_high": high,
        "eval/reward": statistics.fmean(trajectory.reward for trajectory in trajectories),
        "eval/invalid_actions": statistics.fmean(trajectory.invalid_actions for trajectory in trajectories),
        "eval/steps": statistics.fmean(len(trajectory.turns) for trajectory in trajectories),
    }


@contextlib.contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Write down the seconds that something took, whether or not it came to a good end."""
    started = time.monotonic()
    try:
        yield
    finally:
        metrics[name] = time.monotonic() - started


async def unless_stopped(work: Coroutine, meanwhile: set[asyncio.Task]) -> dict[str, float]:
    """What `work` gives; nothing if a signal has ended it."""
    task = asyncio.ensure_future(work)
    meanwhile.add(task)
    await asyncio.wait([task])
    meanwhile.discard(task)
    return {} if task.cancelled() else task.result()


def log_update(run: Run, update: int, metrics: dict[str, float], stepped: bool) -> None:
    """Write the update's metrics; from here on the run stands after it."""
    ended = time.monotonic()
    metrics["time/update"], run.ended = ended - run.ended, ended
    run.log.log(metrics, update)
    run.progress = replace(
        run.progress, update=update, weights_version=update if stepped else run.progress.weights_version,
        metrics_bytes=run.log.bytes_written, settings=run.everything, versions=package_versions(),
    )  # fmt: skip


def save(run: Run) -> None:
    folder = save_checkpoint(run.folder, run.policy, run.progress, run.settings.keep_checkpoints, run.critic)
    run.saved = run.progress.update
    if best := best_checkpoint(run):
        point_to(best, "best")
    tqdm.write(f"Saved state: {folder}\nSaved sampler weights: {folder / 'sampler'}")


def best_checkpoint(run: Run) -> Path | None:
    """Of the saved updates that the meter has played, the one with the most success, the later one of equals."""
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    success = {line["update"]: line["eval/success"] for line in lines if "eval/success" in line}
    folders = {update: checkpoint_folder(run.folder, update) for update in success}
    there = [update for update, folder in folders.items() if folder.is_dir()]
    return folders[max(there, key=lambda update: (success[update], update))] if there else None


def save_on_the_way_out(run: Run) -> None:
    """Save what was learned since the last checkpoint, if the weights are worth it."""
    if run.progress.update == run.saved or not run.policy.whole:
        return
    try:
        if run.policy.sharded:
            learn(run.policy, share(Batch([], save=True)), run.settings, run.signal)
        save(run)
    except Exception as second:  # most likely of the cause of the first, which is raised
        print(f"update {run.progress.update} could not be saved: {first_line(second)}", flush=True)


def check_mismatch(metrics: dict[str, float], bound: float) -> None:
    """Raise MismatchTooLarge, before a step is taken, if trainer and engine disagree."""
    if not metrics["mismatch/k3"] <= bound:
        raise MismatchTooLarge(
            f"trainer and engine disagree: KL(rollout || trainer) is {metrics['mismatch/k3']:.4g} nats a token, above "
            f"--max-mismatch-kl {bound:g} (mean |difference| {metrics['mismatch/mean']:.4g}, largest "
            f"{metrics['mismatch/max']:.4g}); no step was taken. Usual causes: the engine plays with other weights, "
            "another temperature, or top-p below 1"
        )


# --- the start of a run -------------------------------------------------------------------------------------------


async def start_run(
    settings: TrainSettings, signal: SignalSettings, play: RolloutSettings, worlds: EnvironmentSettings,
    stack: contextlib.ExitStack,
) -> Run:  # fmt: skip
    """Check all that can be checked without a model; then start engine and policy, and prove that they agree."""
    if settings.resume:
        folder, checkpoint = find_run(settings.resume, settings.runs_dir, settings.run_name)
    else:
        folder, checkpoint = Path(settings.runs_dir) / (settings.run_name or time.strftime("%Y%m%d-%H%M%S")), None
    everything = stored_settings(settings, signal, play, worlds)
    games, meter = check_run(settings, signal, play)
    chat = load_chat_tokens(play.base_model)
    pool = stack.enter_context(WorldPool(worlds))
    games = (await playable_games(pool, games))[: settings.max_train_games or None]
    meter = await playable_games(pool, meter, ready=True) if meter else []
    require(
        settings.games_per_batch * settings.fill_groups <= len(games), "games_per_batch", settings.games_per_batch,
        f"at most the number of training games, {len(games)} (with --fill-groups {settings.fill_groups} that part of it): a "
        "game twice in one update would repeat its seeds",
    )  # fmt: skip
    digest = hashlib.sha256("\n".join(game.game_id for game in games).encode()).hexdigest()
    progress = Progress(0, 0, 0, digest, everything, package_versions())
    if settings.resume:
        if checkpoint:  # whose checksums were compared when its settings were read
            progress = read_progress(checkpoint / "state" / "training.json")
        else:
            progress = replace(progress, settings=read_run_settings(folder))
        check_resumable(progress, everything, digest)
    first_games, _ = await games_of_update(pool, games, 0, settings.games_per_batch)
    await check_first_prompts(chat, pool, first_games, play)
    if not settings.resume:
        make_run_dir(folder, everything)
    try_saving(folder, play.base_model, settings.lora_rank)
    log = stack.enter_context(
        RunLog(folder, folder.name, settings.swanlab_project, settings.swanlab_mode, everything, progress.metrics_bytes)
    )
    window = settings.games_per_batch * settings.fill_groups
    start, total = progress.update * window, settings.max_steps * window
    to_come = [games[place % len(games)].path for place in range(start, min(total, start + len(games)))]
    stack.callback(asyncio.ensure_future(pool.compile_ahead(to_come)).cancel)
    if checkpoint:
        point_to(checkpoint)
    dtype = engine_dtype(play)
    way = resolve_sync(settings.weight_sync, dtype, settings.lora_rank)
    print(f"Run: {folder}  ({len(games)} games, {play.base_model}, {dtype}, weight sync: {way})", flush=True)
    play, sampler, card = await start_engine(settings, play, chat, way)
    stack.callback(sampler.close)
    policy = await start_policy(settings, play, card, checkpoint)
    critic = ValueHead(policy.width, settings.value_learning_rate) if signal.advantage == "gae" else None
    if critic and checkpoint:
        critic.load(checkpoint / "state" / VALUE_HEAD)
    sync = WeightSync(policy, sampler, way, dtype, folder / "sampler-weights")
    stack.callback(sync.close)
    probe = (await first_prompt_of(chat, pool, first_games[0], play))[:PROBE_TOKENS]
    if way == "adapter":
        gap = await rehearse_adapter(policy, sampler, sync, card, probe)
        print(f"A random adapter reached the engine: {gap:.1%} of its effect is missing or noise", flush=True)
    if progress.update:
        print(f"Going on after update {progress.update} from {checkpoint}", flush=True)
    if progress.weights_version:
        await sync.push(progress.weights_version, probe if policy.differs_from_base() else None)
    await prove_agreement(policy, sampler, card, probe, settings.max_mismatch_kl)
    # Whatever checkpoints of later updates there are, the run stands where it goes on from.
    return Run(settings, signal, play, everything, folder, games, meter, chat, pool, log, sampler, card, policy, critic, sync, progress,
               saved=progress.update, meanwhile=set(), ended=time.monotonic())  # fmt: skip


def check_run(settings: TrainSettings, signal: SignalSettings, play: RolloutSettings) -> tuple[list[Game], list[Game]]:
    """Refuse what cannot be trained here; returns the games of the run in its order, and those of its meter."""
    require(bool(settings.lora_rank) or not signal.kl_coefficient, "kl_coefficient", signal.kl_coefficient,
            "0 with --lora-rank 0: the base is the model without its adapter, and there is none")  # fmt: skip
    require(signal.advantage != "gae" or not settings.shard_trainers, "advantage", "gae",
            "another with --shard-trainers: the value head reads the whole model in one process")  # fmt: skip
    require(signal.advantage == "gae" or settings.value_learning_rate == TrainSettings.value_learning_rate,
            "value_learning_rate", settings.value_learning_rate, f"left out with --advantage {signal.advantage}: only gae has values")  # fmt: skip
    longest = max(map(int, settings.horizon.split(","))) if settings.horizon else 0
    require(longest <= play.max_episode_steps, "horizon", settings.horizon, f"at most --max-episode-steps, {play.max_episode_steps}")
    check_swanlab(settings.swanlab_mode, settings.swanlab_project)
    require(play.top_p == 1, "top_p", play.top_p, "1.0 in training: with less, log-probabilities cannot be compared")
    games, meter = hold_out(find_games(settings.data_root, settings.train_split), settings.held_out_games)
    games = shuffle_games(games, play.seed)
    if settings.eval_split != HELD_OUT and settings.eval_every:
        meter = shuffle_games(find_games(settings.data_root, settings.eval_split), play.seed)
    meter = meter[: settings.eval_games or None] if settings.eval_every else []
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
    return games, meter


async def start_engine(
    settings: TrainSettings, play: RolloutSettings, chat: ChatTokens, way: str
) -> tuple[RolloutSettings, Sampler, SharedCard]:
    """The engine, beside the trainer on its card as the plan says; and the settings with the engine's share."""
    layout, options = "together", {}
    if torch.cuda.is_available():
        plan = plan_run(settings, play)
        if not play.engine_memory_share:
            if not plan.fits:
                raise SettingsError(f"the run does not fit on this GPU.\n{render_plan(plan)}")
            play = replace(play, engine_memory_share=plan.engine_memory_share)
        layout, options = plan.layout, {"enable_sleep_mode": plan.layout != "together"}
        print(f"Memory (--plan shows it): {LAYOUTS[layout]}; engine's share {play.engine_memory_share}", flush=True)
    print("Starting the engine, which takes about a minute", flush=True)
    sampler = await Sampler.start(play, chat.stop_token_ids, settings.lora_rank if way == "adapter" else 0, **options)
    return play, sampler, SharedCard(layout, sampler)


async def start_policy(
    settings: TrainSettings, play: RolloutSettings, card: SharedCard, checkpoint: Path | None
) -> Policy:
    """The policy where the run stands, in all trainer processes at once."""
    await card.to_trainer()
    share(checkpoint)

    def make() -> Policy:
        policy = make_policy(settings, play)
        begin(policy, checkpoint)
        return policy

    policy = await uninterrupted(asyncio.to_thread(make))
    await card.to_engine(policy)
    return policy


async def prove_agreement(policy: Policy, sampler: Sampler, card: SharedCard, probe: list[int], bound: float) -> None:
    """Compare the trainer's scores of a text with the engine's; MismatchTooLarge if they are not near."""
    scores = await sampler.score(probe)
    await card.to_trainer()
    agreement = parity(policy.score(share(probe)), scores)
    await card.to_engine(policy)
    print(f"Trainer and engine agree to {agreement['mismatch/mean']:.1e} nats a token (largest "
          f"{agreement['mismatch/max']:.1e}) over {len(probe) - 1} tokens", flush=True)  # fmt: skip
    check_mismatch(agreement, bound)


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
            parser, presets, train, TrainSettings, SignalSettings, RolloutSettings, EnvironmentSettings, saved=resumed_settings
        )


if __name__ == "__main__":
    main()
