"""Defines fields that small configs of some architectures need besides sizes, because they must be consistent."""

from __future__ import annotations

from typing import Any

_SWA = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SHARED_KV: dict[str, Any] = {"num_kv_shared_layers": 2, "layer_types": _SWA, "global_head_dim": 32}
_ASSISTANT: dict[str, Any] = {
    "text_config": {
        **_SHARED_KV,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "vocab_size": 503,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_kv_shared_layers": 4,
        "vocab_size_per_layer_input": 0,
        "hidden_size_per_layer_input": 0,
    }
}
_INDEXED: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 512,
    "heads_per_ngram": 2,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "eos_token_id": 2,
}
_SLIDING_LATENT: dict[str, Any] = {
    "sliding_window": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}

# Model type -> fields (those of a part of a composite config under the part's name).
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "num_key_value_heads": 2,
        "layer_types": _SWA,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    # Of a picture of 224 pixels it leaves out 197 positions of a text.
    "git": {"vision_config": {"image_size": 32}},
    # Its default of 1 makes rounding of float32 grow to 3e-4 in the gradients of the definition itself.
    "cpmant": {"init_std": 0.02},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        "norm_topk_prob": True,  # as the released weights have it
    },
    "dots3_note": _SLIDING_LATENT,
    "dots3_note_text": _SLIDING_LATENT,
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _SWA,
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
    },
    "gemma4": {"text_config": _SHARED_KV},
    "gemma4_assistant": _ASSISTANT,
    "gemma4_text": _SHARED_KV,
    "gemma4_unified": {"text_config": _SHARED_KV},
    "gemma4_unified_assistant": _ASSISTANT,
    "gemma4_unified_text": _SHARED_KV,
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared", "full"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "inkling2_loop_text": {
        **{"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3},
        "loop_num_passes": 2,
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4] * 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    # As the released weights have it.
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "ministral": {"head_dim": 16, "layer_types": _SWA},
    "moshi": {"audio_encoder_config": {"codebook_size": 512}},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {"audio_config": {"depthwise_multiplier": 1}},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        # Without it each run hashes by numbers of its own.
        "hash_seed": 0,
        "num_buckets": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Model types whose causal language model is built from a part of their config.
PART: dict[str, str] = {"dots3_note": "text_config", "musicgen": "decoder", "musicgen_melody": "decoder"}
