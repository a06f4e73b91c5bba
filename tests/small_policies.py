"""Tiny random models of several architectures, policies on them, and trajectories to train on."""

import torch
from transformers import (
    AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig, Qwen3Config,
)

from advantages import make_datum
from train import Policy

VOCABULARY = 64
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256,
}
HYBRID_SHAPE = SHAPE | {
    "num_hidden_layers": 2, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "tie_word_embeddings": True,
}
VISION_SHAPE = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
BASES = ["qwen3", "qwen3_5_text", "qwen3_5_vision_language"]


def save_model(folder, config, model_class=AutoModelForCausalLM):
    torch.manual_seed(0)
    build = model_class if model_class is not AutoModelForCausalLM else AutoModelForCausalLM.from_config
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the default 0.02 gives logits that are all alike
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return str(folder)


def save_bases(root):
    """Folders of tiny random models, by architecture."""
    vision_language = Qwen3_5Config(
        text_config=HYBRID_SHAPE, vision_config=VISION_SHAPE, tie_word_embeddings=True, image_token_id=60,
        video_token_id=61, vision_start_token_id=58, vision_end_token_id=59,
    )
    dense = SHAPE | {"num_hidden_layers": 2}
    return {
        "qwen3": save_model(root / "qwen3", Qwen3Config(**dense, head_dim=8)),
        "qwen3_other": save_model(root / "other", Qwen3Config(**dense | {"intermediate_size": 20}, head_dim=8)),
        "qwen3_5_text": save_model(root / "text", Qwen3_5TextConfig(**HYBRID_SHAPE)),
        "qwen3_5_vision_language": save_model(
            root / "vision_language", vision_language, Qwen3_5ForConditionalGeneration
        ),
        "llama": save_model(root / "llama", LlamaConfig(**dense)),
        "granite": save_model(root / "granite", GraniteConfig(**dense, logits_scaling=4.0)),
    }


def make_policy(base, **changed):
    return Policy(base, **{"lora_rank": 4, "learning_rate": 1e-2, "head_chunk": 3, "device": "cpu"} | changed)


def randomise(policy, seed=1):
    """Give the adapter's B values: a fresh one is 0 and proves nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return policy


def random_datum(seed=0, advantage=0.7):
    """Three completions in 40 tokens; log-probabilities near a uniform guess."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (40,), generator=generator).tolist()
    spans = [(9, 14), (20, 27), (28, 34)]
    logprobs = [(-4 + torch.randn(end - start, generator=generator) * 0.3).tolist() for start, end in spans]
    return make_datum(tokens, spans, logprobs, [advantage] * 3, name=f"game {seed}")
