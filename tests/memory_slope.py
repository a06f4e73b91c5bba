"""Peak memory of one update as the trajectory grows, as trained and otherwise, with the plan's figure; a table and a plot.

    uv run python tests/memory_slope.py --output images/memory.png

The model is Qwen3.5-4B at a tenth of its width and a quarter of its depth, with random weights: hidden states and
vocabulary keep their proportion, which decides what full logits cost. Bytes are counted as in gpu_check.py.
"""

import argparse
import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path

import torch
from gpu_check import SIZES, peak_bytes, random_datum, save_random_model, torch_delta_rule, updates, variants
from transformers.utils import logging

from train import Policy, count_weights, trainer_memory

TOKENS = (250, 500, 1_000, 2_000)
SIZE = dataclasses.replace(
    SIZES["toy"],
    shape={
        "vocab_size": 24_832, "hidden_size": 256, "intermediate_size": 920, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    tokens=max(TOKENS), head_chunk=32,
)  # fmt: skip
MIB = 2**20


def measure(policy: Policy) -> dict[str, list[int]]:
    """Peak bytes at each number of tokens, by variant, and the plan's."""
    config = policy.model.config.get_text_config()
    peaks: dict[str, list[int]] = {}
    for tokens in TOKENS:
        datum = random_datum(dataclasses.replace(SIZE, tokens=tokens, sampled=tokens * 28 // 120))
        steps = updates(policy, datum)
        if tokens == TOKENS[0]:
            steps["ours"]()  # Adam's state exists from here on
        for name, (update, context) in variants(cuda=False).items():
            with context(policy) if context else contextlib.nullcontext():
                peaks.setdefault(name, []).append(peak_bytes(policy, steps[update]))
        planned = trainer_memory(config, count_weights(config), tokens=len(datum.tokens_T), head_chunk=SIZE.head_chunk,
                                 lora_rank=SIZE.lora_rank, width=4)[2]  # fmt: skip
        peaks.setdefault("the plan, as trained", []).append(planned)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("memory.png"), help="the plot")
    output = parser.parse_args().output
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(save_random_model(Path(folder), SIZE, torch.float32, "cpu"), lora_rank=SIZE.lora_rank,
                        learning_rate=0.0, head_chunk=SIZE.head_chunk, device="cpu", dtype=torch.float32)  # fmt: skip
    with torch_delta_rule(policy):  # installed kernels take no tensors of a CPU
        peaks = measure(policy)

    print(f"{'peak, MiB, at tokens':36}" + "".join(f"{tokens:>9,}" for tokens in TOKENS) + "   KiB a token")
    for name, row in peaks.items():
        slope = (row[-1] - row[-2]) / (TOKENS[-1] - TOKENS[-2]) / 1024
        print(f"{name:36}" + "".join(f"{peak / MIB:9.1f}" for peak in row) + f"{slope:14.1f}")

    os.environ["MPLBACKEND"] = "Agg"  # a notebook's need not be installed here
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, row in peaks.items():
        axes.plot(TOKENS, [peak / MIB for peak in row], "k--" if "plan" in name else "o-", label=name)
    axes.set(xlabel="tokens of the trajectory", ylabel="peak of one update, MiB", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
