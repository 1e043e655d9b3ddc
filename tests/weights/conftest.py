"""Tiny models of nine families and three with experts; ties and biases as the family has them."""

import pytest
import torch

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GATED = {"intermediate_size": 64, "num_key_value_heads": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "llama": GATED,
    "mistral": GATED | {"num_key_value_heads": 2},
    "qwen2": GATED | {"tie_word_embeddings": True},
    "qwen3": GATED | {"head_dim": 16},
    "gemma2": GATED | {"head_dim": 8},
    "phi3": GATED,
    "gpt2": {},
    # OPT holds two positions more than it is told.
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 62},
    "gpt_neox": {"intermediate_size": 64},
    "mixtral": GATED | {"num_local_experts": 16},
    "qwen3_moe": GATED | {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 16},
    "deepseek_v3": GATED
    | {
        "moe_intermediate_size": 16,
        "n_routed_experts": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    | LATENT,
}
# In half precision transformers casts a buffer of its router, which is float32 here in training and after it.
IN_FLOAT32 = {
    "longcat_flash": GATED
    | LATENT
    | {"head_dim": 8, "expert_ffn_hidden_size": 16, "n_routed_experts": 16, "zero_expert_num": 8, "moe_topk": 2},
}


def tiny_config(family, **overrides):
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**COMMON, **(FAMILIES | IN_FLOAT32)[family], **overrides})


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def config(family):
    return tiny_config(family)


@pytest.fixture
def tiny():
    """The function that makes a tiny config: family, then overrides."""
    return tiny_config


@pytest.fixture
def definition(config):
    from megasched.definition.build import build_definition

    return build_definition(config)


@pytest.fixture
def trained():
    """A function that makes a real model whose every parameter is random (norms and biases too)."""
    from transformers import AutoModelForCausalLM

    def make(config, dtype=torch.float32, seed=7):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        return model.to(dtype)

    return make
