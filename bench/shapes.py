"""Shapes of the models that are measured, as HF configs; nothing is downloaded."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
# The width and heads of Llama-3.2-1B, with experts.
_MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}

# Name -> fields of the HF config; max_position_embeddings is also the sequence length that is trained.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 16,
    },
    "tune": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 512,
    },
    "cpu": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
        "max_position_embeddings": 512,
    },
    "mini": {  # so small that a step of four ranks on two cores takes a second
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
    },
    "moe-tiny": {
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
        "max_position_embeddings": 16,
    },
    "qwen3-tiny": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 256,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    },
    "moe": {  # about as many weights per token as "cpu"
        "model_type": "mixtral",
        "hidden_size": 768,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 16384,
        "max_position_embeddings": 512,
    },
    "1b": {  # Llama-3.2-1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "gemma2-2b": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 4096,
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "hidden_size": 1600,
        "num_hidden_layers": 48,
        "num_attention_heads": 25,
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "mixtral": _MIXTRAL,
    "mixtral-1b": {**_MIXTRAL, "num_hidden_layers": 4},
    "8b": {  # Llama-3-8B
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": _ROPE,
    },
    "70b": {  # Llama-3-70B
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": _ROPE,
    },
    "405b": {  # Llama-3.1-405B
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": _ROPE,
    },
}


def hf_config(shape: str, **changes: Any) -> Any:
    """The HF config of a shape, some fields changed; Llama's where the shape names no other architecture."""
    from transformers import AutoConfig

    fields = {**SHAPES[shape], **changes}
    return AutoConfig.for_model(fields.pop("model_type", "llama"), **fields)


def model_folder(shape: str, **changes: Any) -> str:
    """A new folder with the shape's ``config.json``, for ``--hf-model``; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="bench")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    hf_config(shape, **changes).save_pretrained(folder)
    return folder
