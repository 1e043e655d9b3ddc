"""Fewer heads of key and value than TP ranks, in architectures without a plan: every number stays that of HF."""

from __future__ import annotations

import pytest

from megasched.definition.small_models.small_models import small_config, write_model
from megasched.verify.trainer_run import train
from tests.parity.cases import slow
from tests.parity.steps import assert_first_step_equals_hf

TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
SP, PP2 = "--sequence-parallel", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "tp2": (2, 2, TP2),
    "tp2-sp": (2, 2, f"{TP2} {SP}"),
    "tp4": (4, 4, TP4),
    "tp4-sp": (4, 4, f"{TP4} {SP}"),
    "tp2-pp2": (4, 2, f"{TP2} {PP2}"),
}
# One head packed with those of query; two heads; one by itself, with a norm of each head.
CASES = [
    ("gpt_bigcode", {}, "tp2"),
    ("gpt_bigcode", {}, "tp2-sp"),
    slow("gpt_bigcode", {}, "tp4"),
    slow("stablelm", {}, "tp4"),
    slow("stablelm", {}, "tp4-sp"),
    ("stablelm", {"num_key_value_heads": 1, "qk_layernorm": True}, "tp4-sp"),
    slow("stablelm", {"num_key_value_heads": 1, "qk_layernorm": True}, "tp2-pp2"),
]


@pytest.mark.parametrize(("model_type", "changes", "layout"), CASES)
def test_a_step_equals_hf(ranks, tmp_path, model_type, changes, layout):
    config = small_config(model_type)
    vars(config).update(changes)
    folder = str(tmp_path)
    ranks.run(1, write_model, config, folder)
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, train, folder, flags.split(), iterations=1, random_init=False)
    assert_first_step_equals_hf(ranks, folder, reports, tp)
