"""Instances of transformers' classes that a model's own code changed: whatever is Megatron's, numbers are HF's."""

from __future__ import annotations

import json

import pytest

from megasched.verify.parity import LAYOUTS
from tests import tiny
from tests.parity.cases import slow
from tests.parity.steps import assert_equal, step_of_own_code

# A class of the model's own, of transformers' own modules.
CODE = """
import copy

import torch
from torch import nn
from transformers import {base}


class Mine({base}):
    def __init__(self, config):
        super().__init__(config)
        layers = self.model.layers
{body}
        self.post_init()
"""
# After default_schedule: layers are Megatron's where they can be, else attention, mixtures and MLPs.
SCHEDULE = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    sch["model.layers.*"].level("block", required=False)
"""
LLAMA, MIXTURE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
CASES = {
    "attention scaled": (LLAMA, "layers[1].self_attn.scaling *= 1.7"),
    "rotary positions": (LLAMA, "self.model.rotary_emb.inv_freq.mul_(0.5)"),
    "a multiplier of a layer": (LLAMA, "layers[2].mlp.register_forward_hook(lambda m, args, y: 0.5 * y)"),
    "epsilon": (LLAMA, "layers[1].input_layernorm.variance_epsilon = 0.1"),
    "activation": (LLAMA, "layers[1].mlp.act_fn = nn.GELU()"),
    "a window": (
        "MistralForCausalLM",
        "own = copy.copy(config)\n        own.sliding_window = 3\n        layers[1].self_attn.config = own",
    ),
    "a mixture scaled": (MIXTURE, "layers[1].mlp.register_forward_hook(lambda m, args, y: 0.7 * y)"),
    "experts chosen": (MIXTURE, "layers[1].mlp.gate.top_k = 1"),
    "weights of experts": (MIXTURE, "layers[1].mlp.gate.norm_topk_prob = not config.norm_topk_prob"),
}
FAST = ("attention scaled", "a mixture scaled")
FAMILIES = {LLAMA: "llama", MIXTURE: "qwen3_moe", "MistralForCausalLM": "mistral"}


def write(folder, base, body):
    folder.mkdir()
    (folder / "modeling_mine.py").write_text(CODE.format(base=base, body="        " + body))
    config = tiny.config(FAMILIES[base]).to_dict()
    config |= {"architectures": ["Mine"], "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES])
def test_a_step_equals_hf(ranks, tmp_path, name):
    folder = write(tmp_path / "model", *CASES[name])
    schedule = tmp_path / "schedule.py"
    schedule.write_text(SCHEDULE)
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS["tp2-sp"], schedule=str(schedule)))
