"""Every level in bf16 against plain HF in float64, by the measure of ``megasched/verify/bfloat16.py``."""

from __future__ import annotations

import pytest
import torch

from bench.rounded_step import rounded_step
from megasched.verify.bfloat16 import ONE_RANK, TENSOR_PARALLEL, UNIT
from megasched.verify.reference import hf_model
from megasched.verify.trainer_run import batches_of, gather, losses, train
from tests import tiny
from tests.parity.cases import spread

SCHEDULE = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    sch["{layers}.*"].level("{level}")
"""
LAYERS = {"gpt2": "transformer.h"}


LAYOUTS = {
    "one-rank": (1, "", ONE_RANK),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", TENSOR_PARALLEL),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Family -> folder, and batches -> (exact, plain), computed when first asked for."""
    folders, steps = {}, {}

    def folder(family):
        if family not in folders:
            folders[family] = tiny.save(family, tmp_path_factory.mktemp(family))
        return folders[family]

    def both(family, batches):
        if family not in steps:
            dtypes = (torch.float64, torch.bfloat16)
            steps[family] = batches, [rounded_step(folder(family), batches, dtype) for dtype in dtypes]
        known, found = steps[family]
        assert torch.equal(_tokens(known), _tokens(batches))  # every layout is fed the same
        return found

    return folder, both


def _tokens(batches):
    return torch.cat([torch.cat(pair) for pair in batches])


def _error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


def _together(gradients):
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


CASES = [(family, level) for family in ("llama", "qwen3") for level in ("leaf", "fused", "block")]
CASES += [(family, "fused") for family in ("gemma2", "phi3", "gpt2")]


@pytest.mark.parametrize(("case", "layout"), spread(CASES, LAYOUTS))
def test_error_in_bf16_is_that_of_plain_hf(ranks, references, tmp_path, case, layout):
    family, level = case
    folder_of, steps = references
    tp, flags, factors = LAYOUTS[layout]
    folder, schedule = folder_of(family), tmp_path / "sch.py"
    schedule.write_text(SCHEDULE.format(layers=LAYERS.get(family, "model.layers"), level=level))
    argv = [*flags.split(), "--bf16", "--lr", "0", "--min-lr", "0"]
    reports = ranks.run(tp, train, folder, argv, iterations=1, schedule=str(schedule))
    weights = gather(reports, "weights", tp)  # a rate of 0: those that the step was made with
    for name, parameter in hf_model(folder).named_parameters():
        assert torch.equal(weights[name].bfloat16(), parameter.detach().bfloat16()), name
    exact, plain = steps(family, batches_of(reports))
    logits = torch.cat([out for report in reports if report.tp_rank == 0 for out in report.logits.get(0, ())])
    gradients = gather(reports, "gradients", tp)

    assert (
        UNIT / 4 < _error(torch.cat(plain.logits), torch.cat(exact.logits)) < 4 * UNIT
    )  # the yardstick is rounding to bf16
    assert _error(logits, torch.cat(exact.logits)) <= factors.logits * _error(
        torch.cat(plain.logits), torch.cat(exact.logits)
    )
    assert abs(losses(reports)[0] / exact.loss - 1) <= max(UNIT / 16, abs(plain.loss / exact.loss - 1))
    assert gradients.keys() == exact.gradients.keys()
    whole = _together(exact.gradients)
    limit = factors.gradients * _error(_together(plain.gradients), whole)
    assert _error(_together(gradients), whole) <= limit
    far = {
        name: (_error(gradients[name], wanted), _error(plain.gradients[name], wanted))
        for name, wanted in exact.gradients.items()
    }
    assert {name: gap for name, gap in far.items() if not gap[0] <= factors.single * gap[1]} == {}
