"""Modules of experts are known by their form, whatever the architecture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasched.experts import find_experts
from megasched.verify.small_models import small_config


def on_meta(model_type: str):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(small_config(model_type))


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [("mixtral", 4), ("qwen3_moe", 4), ("olmoe", 4), ("deepseek_v3", 3), ("gpt_oss", 4), ("qwen2_moe", 4)],
)
def test_found_in_every_layer_that_has_them(model_type, layers):
    found = find_experts(on_meta(model_type))
    assert list(found.values()) == [4] * layers
    assert all(path.endswith(".mlp.experts") for path in found)


@pytest.mark.parametrize("model_type", ["llama", "llama4_text", "jetmoe"])
def test_not_found_where_there_are_none_of_that_form(model_type):
    """Llama 4's and JetMoE's experts are called otherwise."""
    assert find_experts(on_meta(model_type)) == {}


def test_a_parameter_that_all_experts_share_excludes_a_module():
    model = on_meta("mixtral")
    model.model.layers[1].mlp.experts.norm = nn.LayerNorm(4, device="meta")
    model.model.layers[2].mlp.experts.scale = nn.Parameter(torch.empty(3, device="meta"))
    assert list(find_experts(model)) == ["model.layers.0.mlp.experts", "model.layers.3.mlp.experts"]
