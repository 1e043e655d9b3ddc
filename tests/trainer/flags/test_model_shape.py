"""Megatron's arguments from HF configs of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig, SwinConfig

from megasched.definition.build import load_config
from megasched.definition.objectives import IMAGE_CLASSIFICATION
from megasched.errors import ConfigError
from megasched.trainer.flags.model_shape import derive, heads_for_tp
from megasched.trainer.flags.model_sizes import SourcedValue
from tests import remote
from tests.trainer.flags.models import GPT2, SMALL, config

# What all of the Llama kind made from SMALL share.
LLAMA_LIKE = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 112,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "init_method_std": 0.03,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}

FAMILIES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "llama": (
        config(
            "llama",
            **SMALL,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        ),
        LLAMA_LIKE
        | {
            "group_query_attention": True,
            "num_query_groups": 2,
            "kv_channels": 8,
            "layernorm_epsilon": 1e-5,
            "rotary_base": 500000,
            "rotary_percent": 1.0,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": True,
            "use_rope_scaling": False,
        },
    ),
    "mistral": (
        config("mistral", **SMALL, num_key_value_heads=3, head_dim=16),
        LLAMA_LIKE | {"num_query_groups": 3, "kv_channels": 16, "layernorm_epsilon": 1e-6},
    ),
    "qwen2": (
        config("qwen2", **SMALL, num_key_value_heads=6, tie_word_embeddings=True, attention_dropout=0.2),
        LLAMA_LIKE
        | {
            "group_query_attention": False,
            "num_query_groups": 6,
            "kv_channels": 8,
            "add_qkv_bias": True,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": False,
            "attention_dropout": 0.2,
        },
    ),
    "qwen3": (
        config("qwen3", **SMALL, num_key_value_heads=2, head_dim=32),
        LLAMA_LIKE | {"num_query_groups": 2, "kv_channels": 32, "qk_layernorm": True, "add_qkv_bias": False},
    ),
    "gemma2": (
        config("gemma2", **SMALL, num_key_value_heads=3, head_dim=24),
        LLAMA_LIKE | {"num_query_groups": 3, "kv_channels": 24, "untie_embeddings_and_output_weights": False},
    ),
    "phi3": (
        config(
            "phi3",
            **SMALL,
            num_key_value_heads=3,
            resid_pdrop=0.15,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        LLAMA_LIKE
        | {
            "num_query_groups": 3,
            "kv_channels": 8,
            "hidden_dropout": 0.15,
            "layernorm_epsilon": 1e-5,
            "rotary_percent": 0.5,
        },
    ),
    "gpt2": (
        config("gpt2", **GPT2, attn_pdrop=0.05, resid_pdrop=0.25, layer_norm_epsilon=1e-4),
        {
            "num_layers": 3,
            "hidden_size": 48,
            "ffn_hidden_size": 192,
            "num_attention_heads": 4,
            "kv_channels": 12,
            "group_query_attention": False,
            "num_query_groups": 4,
            "max_position_embeddings": 32,
            "vocab_size": 301,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-4,
            "swiglu": False,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": False,
            "attention_dropout": 0.05,
            "hidden_dropout": 0.25,
            "init_method_std": 0.02,
        },
    ),
    "opt": (
        config(
            "opt",
            num_hidden_layers=2,
            hidden_size=48,
            word_embed_proj_dim=48,
            ffn_dim=80,
            num_attention_heads=4,
            max_position_embeddings=40,
            vocab_size=303,
            dropout=0.3,
            attention_dropout=0.4,
            init_std=0.05,
        ),
        {
            "num_layers": 2,
            "ffn_hidden_size": 80,
            "kv_channels": 12,
            "max_position_embeddings": 40,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-5,
            "swiglu": False,
            "add_bias_linear": True,
            "hidden_dropout": 0.3,
            "attention_dropout": 0.4,
            "init_method_std": 0.05,
        },
    ),
    "gpt_neox": (
        config(
            "gpt_neox",
            **SMALL,
            layer_norm_eps=1e-3,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        {
            "num_layers": 2,
            "ffn_hidden_size": 112,
            "num_query_groups": 6,
            "position_embedding_type": "rope",
            "rotary_percent": 0.25,
            "rotary_base": 10000,
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-3,
            "swiglu": False,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "untie_embeddings_and_output_weights": True,
        },
    ),
    # No field of the config says how wide the MLP is, and positions are a bias on the scores.
    "bloom": (
        config("bloom", n_layer=2, hidden_size=48, n_head=4, vocab_size=300),
        {"ffn_hidden_size": 192, "position_embedding_type": "none", "swiglu": False, "add_qkv_bias": True},
    ),
    "gptj": (
        config("gptj", n_layer=2, n_embd=48, n_head=4, rotary_dim=6, n_positions=32, vocab_size=300),
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "ffn_hidden_size": 192},
    ),
    "falcon": (
        config("falcon", num_hidden_layers=2, hidden_size=48, num_attention_heads=4, vocab_size=300),
        {"num_query_groups": 1, "group_query_attention": True},
    ),
    # One token goes through two experts of width 112.
    "mixtral": (
        config("mixtral", **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
        {"ffn_hidden_size": 224, "swiglu": True},
    ),
    # ... or through two of width 20 and a shared one of width 56.
    "qwen2_moe": (
        config(
            "qwen2_moe",
            **SMALL,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=56,
        ),
        {"ffn_hidden_size": 96, "swiglu": True},
    ),
    # Two sets of RoPE parameters; that of full attention counts.
    "gemma3_text": (
        config("gemma3_text", **SMALL, num_key_value_heads=3, head_dim=8),
        {"rotary_base": 1000000, "qk_layernorm": True},
    ),
    # The recurrence has parameters of three dimensions, which are no experts; the MLP is gated.
    "recurrent_gemma": (
        config("recurrent_gemma", **SMALL, num_key_value_heads=1, lru_width=48, head_dim=8),
        {"swiglu": True},
    ),
    # No attention at all: one head, so that Megatron has its number.
    "mamba": (
        config("mamba", num_hidden_layers=2, hidden_size=48, vocab_size=300),
        {"num_attention_heads": 1, "position_embedding_type": "none"},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_derived_values(family: str) -> None:
    hf_config, expected = FAMILIES[family]
    found = derive(hf_config)
    assert {dest: found[dest].value if dest in found else None for dest in expected} == expected


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "expected"),
    [
        (8, 2, 4, (8, 2)),
        (1, 1, 4, (4, 1)),
        (5, 5, 2, (6, 6)),
        (5, 1, 2, (6, 1)),
        (6, 3, 2, (6, 6)),
        (9, 3, 3, (9, 3)),
    ],
)
def test_megatron_gets_a_number_of_heads_that_it_takes(
    heads: int, groups: int, tp: int, expected: tuple[int, int]
):
    names = ("num_attention_heads", "num_query_groups")
    sizes = {name: SourcedValue(value, "") for name, value in zip(names, (heads, groups), strict=True)}
    found = tuple(heads_for_tp(sizes, tp)[name].value for name in names)
    assert found == expected
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        kv_channels=8,
        num_attention_heads=found[0],
        num_query_groups=found[1],
        tensor_model_parallel_size=tp,
    )
    assert config.num_attention_heads % tp == 0


def test_rope_scaling_of_llama3_is_told_to_megatron() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    found = derive(config("llama", **SMALL, rope_parameters=rope))
    assert found["use_rope_scaling"].value is True
    assert found["rope_scaling_factor"].value == 4.0


def test_deriving_leaves_the_config_alone() -> None:
    hf_config = config("gpt2", **GPT2)
    before = hf_config.to_dict()
    derive(hf_config)
    assert hf_config.to_dict() == before


def test_sources_name_the_field_as_config_json_spells_it() -> None:
    tp_facts = derive(config("gpt2", **GPT2))
    assert tp_facts["hidden_size"].source == "n_embd = 48"
    assert tp_facts["position_embedding_type"].source == "transformer.wpe is a table of positions"


def test_layers_of_several_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_heads = \(3, 6, 12, 24\): layers of several sizes"):
        derive(SwinConfig(num_labels=5), IMAGE_CLASSIFICATION)


def test_a_model_that_transformers_can_not_build_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="can't build a causal language model from this T5Config"):
        derive(config("t5"))


RATES = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.rates = [rate.item() for rate in torch.linspace(0.5, 1.0, config.num_hidden_layers)]
        self.register_buffer("basis", torch.linalg.qr(torch.ones(3, 3))[0], persistent=False)
        self.post_init()
"""


def test_a_constructor_that_asks_for_values(tmp_path: Path) -> None:
    folder = remote.write_whole(tmp_path / "model", RATES)
    config = load_config(folder, trust_remote_code=True)
    assert derive(config, trust_remote_code=True)["num_layers"].value == config.num_hidden_layers
