"""HF's auxiliary loss of routers equals one process's, though its logits come of all layers, tokens and stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.parity import CheckedLayout
from megasched.verify.trainer_run import losses
from tests.parity.cases import case, slow, spread
from tests.parity.steps import assert_first_step_equals_hf, run

EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
CP2 = "--context-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "ep2": CheckedLayout(2, 1, EP2),
    "ep2-tp2": CheckedLayout(2, 2, f"{EP2} {TP2}"),
    "sp": CheckedLayout(2, 2, SP),
    "sp-recompute": CheckedLayout(2, 2, f"{SP} {FULL}"),
    "ep2-sp-dp2": CheckedLayout(4, 2, f"{EP2} {SP}"),
    "pp2": CheckedLayout(2, 1, PP2),
    "pp2-recompute": CheckedLayout(2, 1, f"{PP2} {FULL}"),
    "pp2-vpp2": CheckedLayout(2, 1, VPP2),
    "pp4": CheckedLayout(4, 1, "--pipeline-model-parallel-size 4"),
    "cp2": CheckedLayout(2, 1, CP2),
    "cp2-ep2": CheckedLayout(2, 1, f"{CP2} {EP2}"),
    "cp2-sp": CheckedLayout(4, 2, f"{CP2} {SP}"),
    "cp2-pp2": CheckedLayout(4, 1, f"{CP2} {PP2}"),
    "ep2-pp2-sp": CheckedLayout(4, 2, f"{EP2} {PP2} {SP}"),
}
SOME = ("ep2", "ep2-sp-dp2", "sp-recompute", "pp2-recompute", "pp2-vpp2", "cp2", "ep2-pp2-sp")


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory):
    """Folder of a small model, with HF's auxiliary loss or without, made when first asked for.

    The weight of that loss makes it a good part of the gradient.
    """
    made = {}

    def get(model_type: str, auxiliary: bool = True) -> str:
        key = model_type, auxiliary
        if key not in made:
            folder = str(tmp_path_factory.mktemp(model_type))
            made[key] = ranks.run(1, write_small_model, model_type, folder)[0]
            path = Path(folder) / "config.json"
            changed = {"output_router_logits": auxiliary, "router_aux_loss_coef": 0.5, "aux_loss_coef": 0.5}
            path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
        return made[key]

    return get


@pytest.mark.parametrize(
    ("model_type", "name"),
    [case("qwen3_moe", name, fast=name in SOME) for name in LAYOUTS]
    + [*spread(("mixtral", "gpt_oss"), ("sp", "pp2"))]
    + [("jetmoe", "sp"), slow("jetmoe", "pp2"), ("jamba", "pp2"), slow("qwen2_moe", "ep2-pp2-sp")],
)
def test_first_step_equals_hf(ranks, folders, model_type, name):
    """Loss, logits, every gradient and the norm. Jamba has routers in every other layer alone, JetMoE two."""
    layout, folder = LAYOUTS[name], folders(model_type)
    assert_first_step_equals_hf(ranks, folder, run(ranks, folder, layout), layout.tp)


@pytest.mark.parametrize(
    ("name", "flags"), [("cp2", ""), slow("cp2", "--calculate-per-token-loss"), slow("pp2", "")]
)
def test_it_is_added_once_where_some_labels_do_not_count(ranks, folders, name, flags):
    layout, folder = LAYOUTS[name], folders("qwen3_moe")
    reports = run(ranks, folder, layout, *flags.split(), mask=True)
    assert_first_step_equals_hf(ranks, folder, reports, layout.tp, per_token=bool(flags))


def test_it_is_a_part_of_the_loss_that_is_reported(ranks, folders):
    with_it, without = (run(ranks, folders("qwen3_moe", auxiliary), LAYOUTS["pp2"]) for auxiliary in (True, False))
    assert losses(with_it)[0] - losses(without)[0] > 0.5
