"""Every family at every layout: Megatron's trainer under a schedule computes what HF computes."""

from __future__ import annotations

import pytest

from megasched.verify.trainer_run import train
from tests import tiny
from tests.parity.cases import slow, spread
from tests.parity.steps import assert_first_step_equals_hf, assert_same_losses, one_rank

PARITY_FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "opt")

LAYOUTS: dict[str, tuple[int, int, str]] = {
    "tp2": (2, 2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, 1, "--pipeline-model-parallel-size 2"),
    "pp2-vpp2": (2, 1, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pp4": (4, 1, "--pipeline-model-parallel-size 4"),
    "tp2-sp-pp2-vpp2": (
        4,
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "tp2-pp2-vpp2": (
        4,
        2,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "dp2-tp2": (4, 2, "--tensor-model-parallel-size 2"),
}


OTHERS = sorted(set(tiny.FAMILIES) - set(PARITY_FAMILIES))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_rank_equals_hf(ranks, tmp_path, family):
    folder = tiny.save(family, tmp_path)
    assert_first_step_equals_hf(ranks, folder, one_rank(ranks, folder), 1, random_init=True)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *spread(PARITY_FAMILIES, LAYOUTS),
        *(slow(family, layout) for family in OTHERS for layout in ("tp2-sp-pp2-vpp2", "dp2-tp2")),
    ],
)
def test_layout_equals_hf(ranks, tmp_path, family, layout):
    folder = tiny.save(family, tmp_path)
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, train, folder, flags.split(), iterations=2)
    assert_same_losses(reports, one_rank(ranks, folder))
    assert_first_step_equals_hf(ranks, folder, reports, tp, random_init=True)
