"""Tiny models for tests in library mode: every parameter random, the same on every rank."""

from typing import Any

import torch
from torch import nn

COMMON = {
    "vocab_size": 97,  # divides by no TP: the padded rows are always there
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GATED = {"intermediate_size": 64, "num_key_value_heads": 4}
FAMILIES = {
    "llama": GATED | {"attention_bias": True, "mlp_bias": True},
    "mistral": GATED | {"num_key_value_heads": 2, "sliding_window": 4},
    "qwen2": GATED | {"tie_word_embeddings": True},
    "qwen3": GATED | {"head_dim": 16, "num_key_value_heads": 2},
    "gemma2": GATED | {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "phi3": GATED | {"num_key_value_heads": 2},
    "gpt2": {"tie_word_embeddings": True},
    # OPT holds two positions more than it is told.
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 62},
    "gpt_neox": {"intermediate_size": 64},
}
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
}


def randomize(model: nn.Module, seed: int = 7) -> None:
    """Fills every parameter, norms and biases too, so that no term of a gradient is zero by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def tiny_config(family: str, **overrides: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family, **{**COMMON, **FAMILIES[family], **NO_DROPOUT.get(family, {}), **overrides}
    )


def tiny_model(family: str, **overrides: Any) -> nn.Module:
    """A real HF causal language model in training mode, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    randomize(model)
    return model.train()


def token_ids(vocabulary: int = 97, batch: int = 2, length: int = 12) -> torch.Tensor:
    """[batch, length] int64, without the padding id."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(4, vocabulary, (batch, length), generator=generator)
