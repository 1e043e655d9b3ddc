"""Tiny configs of every family that has an adapter: few layers, small sizes, everything switched on that can be.

Multipliers and windows are set so that they bite: a soft-cap near the logits, a window below the sequence.
"""

from __future__ import annotations

from typing import Any

_SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "num_key_value_heads": 2, "pad_token_id": None},
    "mistral": {**_SMALL, "num_key_value_heads": 2, "sliding_window": 5, "head_dim": 8},
    "qwen2": {**_SMALL, "num_key_value_heads": 2},
    "qwen3": {**_SMALL, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        **_SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 10,
    },
    "phi3": {
        **_SMALL,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "original_max_position_embeddings": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "gpt2": {
        "vocab_size": 99,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.1,
    },
    "opt": {
        "vocab_size": 99,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.1,
    },
    "gpt_neox": {**_SMALL},
}

# Further families that Megatron's own layer computes: windows in some layers, no positions in others.
BLOCKS: dict[str, dict[str, Any]] = {
    "ministral": {
        **_SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "cwm": {
        **_SMALL,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "internlm3": {**_SMALL, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None},
    "iquestcoder": {**_SMALL, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None},
    "seed_oss": {
        **_SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "smollm3": {
        **_SMALL,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "use_sliding_window": True,
        "sliding_window": 5,
        "no_rope_layers": [1, 0, 1, 0],
    },
}

# Those with experts.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "olmoe": {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        **_SMALL,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen2_moe": {
        **_SMALL,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "ernie4_5_moe": {**_SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    "gpt_oss": {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4},
    "deepseek_v2": {
        **_SMALL,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        **_SMALL,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 0,
    },
}


def config(family: str, **changes: Any) -> Any:
    """The tiny HF config of a family, some fields changed."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**(FAMILIES | BLOCKS | MIXTURES)[family], **changes})


def save(family: str, folder: Any, **changes: Any) -> str:
    """Writes ``config.json`` of a family into a folder and returns the folder."""
    config(family, **changes).save_pretrained(folder)
    return str(folder)
