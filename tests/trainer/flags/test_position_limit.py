"""What is said of a sequence longer than the model's positions keeps the frequencies, or says that it can't."""

from __future__ import annotations

import shlex

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megasched.definition.build import load_config
from megasched.trainer.flags.position_limit import remedy

SIZES = {"hidden_size": 512, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
BASE = {"rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn of a given length": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {**LONG, "original_max_position_embeddings": 32},
    "longrope with a factor": {**LONG, "factor": 4.0},
}
LIMIT = "max_position_embeddings=128"


def frequencies(config):
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return config.rope_parameters, 1.0
    values, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=64)
    return values.tolist(), scale


def overrides_in(text):
    words = shlex.split(text.partition("--hf-override ")[2])
    return [word for word in words if "=" in word]


@pytest.fixture
def saved(tmp_path):
    def save(model_type, **fields):
        AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
        return load_config(tmp_path)

    return save


@pytest.mark.parametrize("kind", ROPES)
def test_the_advice_keeps_the_frequencies(saved, tmp_path, kind):
    config = saved("llama", **SIZES, rope_parameters={**BASE, **ROPES[kind]})
    said = overrides_in(remedy(config, "max_position_embeddings", 128))
    changed = load_config(tmp_path, said)
    assert changed.max_position_embeddings == 128
    assert frequencies(changed) == frequencies(config)
    alone = frequencies(load_config(tmp_path, [LIMIT]))
    assert (alone == frequencies(config)) == (said == [LIMIT])


def test_most_need_no_more_than_the_limit(saved):
    needed = {
        kind: len(overrides_in(remedy(saved("llama", **SIZES, rope_parameters={**BASE, **rope}), *at)))
        for kind, rope in ROPES.items()
        for at in [("max_position_embeddings", 128)]
    }
    assert needed == {
        **dict.fromkeys(("default", "linear", "yarn of a given length"), 1),
        **dict.fromkeys(("llama3", "yarn", "longrope", "longrope with a factor"), 2),
    }


def test_a_dynamic_one_has_none_that_keeps_them(saved, tmp_path):
    config = saved("llama", **SIZES, rope_parameters={**BASE, "rope_type": "dynamic", "factor": 2.0})
    text = remedy(config, "max_position_embeddings", 100)
    assert "so that another max_position_embeddings makes another model; take shorter sequences" in text
    changed = load_config(tmp_path, overrides_in(text))
    wanted = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    assert changed.rope_parameters == {**BASE, **wanted}
    long = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=100)[0]
    raised = ROPE_INIT_FUNCTIONS["dynamic"](load_config(tmp_path, [LIMIT]), "cpu", seq_len=100)[0]
    assert not torch.equal(long, raised)


def test_a_part_of_a_config_is_named(saved, tmp_path):
    config = saved("gemma3", text_config={"max_position_embeddings": 64})
    (said,) = overrides_in(remedy(config, "max_position_embeddings", 128))
    assert said == f"text_config.{LIMIT}"
    assert load_config(tmp_path, [said]).text_config.max_position_embeddings == 128
