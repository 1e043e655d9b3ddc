"""Every family at every layout: Megatron's trainer under a schedule computes what HF computes."""

from __future__ import annotations

import pytest
import torch

from megasched.verify.reference import hf_step, relative
from megasched.verify.trainer_run import batches_of, gather, logits_of, losses, train
from tests import tiny

ITERATIONS = 5
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


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """Folder and one-rank run of each family, made when first asked for."""
    made = {}

    def get(family: str):
        if family not in made:
            folder = tiny.save(family, tmp_path_factory.mktemp(family))
            made[family] = folder, ranks.run(1, train, folder, [], iterations=ITERATIONS)
        return made[family]

    return get


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_rank_equals_hf(runs, family):
    folder, reports = runs(family)
    assert_first_step_equals_hf(folder, reports, tp=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", PARITY_FAMILIES)
def test_layout_equals_hf(ranks, runs, family, layout):
    folder, baseline = runs(family)
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, train, folder, flags.split(), iterations=ITERATIONS)
    torch.testing.assert_close(losses(reports), losses(baseline), rtol=2e-6, atol=0)
    for report in reports:
        torch.testing.assert_close(report.grad_norms, baseline[0].grad_norms, rtol=1e-5, atol=0)
    assert_first_step_equals_hf(folder, reports, tp=tp)


@pytest.mark.parametrize("layout", ["tp2-sp-pp2-vpp2", "dp2-tp2"])
@pytest.mark.parametrize("family", sorted(set(tiny.FAMILIES) - set(PARITY_FAMILIES)))
def test_other_families_at_two_layouts(ranks, runs, family, layout):
    test_layout_equals_hf(ranks, runs, family, layout)


def assert_first_step_equals_hf(folder, reports, tp, random_init=True):
    batches = batches_of(reports)
    expected = hf_step(folder, batches, random_init=random_init)
    assert losses(reports)[0] == pytest.approx(expected.loss, rel=1e-5)
    assert reports[0].grad_norms[0] == pytest.approx(expected.grad_norm, rel=1e-5)
    logits = logits_of(reports)
    assert len(logits) == len(expected.logits)
    for got, wanted in zip(logits, expected.logits, strict=True):
        assert relative(got, wanted) < 1e-5
    gradients = gather(reports, "gradients", tp)
    assert gradients.keys() == expected.gradients.keys()
    # A key bias has no gradient (softmax does not see it): what is there is rounding, measured against the rest.
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, wanted in expected.gradients.items():
        assert relative(gradients[name], wanted, floor) < 1e-5, name
