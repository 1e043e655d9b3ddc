"""Values that are 0 but for rounding, where the slope of a ReLU jumps: no mistake, and other data tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megasched.definition.small_models.small_models import small_config
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.batches import make_batches
from megasched.verify.locate.locate import Finding, Locator
from megasched.verify.numbers import Check
from megasched.verify.plain.watching import Sightings
from megasched.verify.recording import PlanFacts
from megasched.verify.reference import HfStep
from megasched.verify.verify import MOST_DATA, verify_schedule

TP2 = ParallelDims(tensor_model_parallel_size=2)
EVENT = ("act", "in")
FACTS = PlanFacts(("layer",), {}, {}, (), (), ())
VALUES = torch.linspace(-1, 1, 24).view(2, 3, 4)
VALUES.view(-1)[5] = 3e-8


def seen(values, slope):
    return Sightings([EVENT], {EVENT: values}, {EVENT: slope})


def found(values, gradients, cut):
    """The first difference of two ranks that took ``values``, and whose ReLU gave ``gradients``."""
    right = seen(VALUES, (VALUES > 0).float())
    parts = (
        list(zip(values.chunk(2, -1), gradients.chunk(2, -1), strict=True)) if cut else [(values, gradients)] * 2
    )
    reports = [
        SimpleNamespace(sightings=seen(*part), dp_rank=0, cp_rank=0, tp_rank=rank, gradients={}, copies={})
        for rank, part in enumerate(parts)
    ]
    expected = HfStep(0.0, [torch.zeros(2, 3, 9)], {}, 0.0, right)
    return Locator(reports, expected, 2, 1, 1, FACTS).first()


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_a_value_on_the_other_side_of_0_explains_its_gradient(cut):
    values = VALUES.clone()
    values.view(-1)[5] = -2e-8
    finding = found(values, (values > 0).float(), cut)
    assert (finding.where, finding.tipped) == ("act", 1)
    assert "rounding decides on which side of it 1 of its values lie" in finding.cause


def test_a_gradient_beside_it_is_a_mistake():
    values = VALUES.clone()
    values.view(-1)[5] = -2e-8
    gradients = (values > 0).float()
    gradients.view(-1)[20] = 0.5
    finding = found(values, gradients, cut=True)
    assert (finding.where, finding.tipped) == ("act", 0)


def test_a_value_that_is_wrong_is_a_mistake():
    values = VALUES.clone()
    values.view(-1)[5] = -0.1
    finding = found(values, (values > 0).float(), cut=True)
    assert (finding.direction, finding.tipped) == ("forward", 0)


def verified(tmp_path, monkeypatch, tipped):
    """A verification whose data of these seeds are tipped, and the seeds that it took."""
    seeds = []

    class Compared:
        facts = SimpleNamespace(records=())

        def __init__(self, steps, schedule):
            seeds.append(steps.seed)
            self.notes, self.steps = ["a note"], steps

        def judge(self):
            if seeds[-1] in tipped:
                finding = Finding("backward", "act", "its gradient", (0,), 0.5, "", "", tipped=2)
                return [Check("gradients", 0.5, 1e-5, equal=False)], "gradients: beyond", finding
            return [Check("gradients", 0.0, 1e-5)], "", None

    monkeypatch.setattr("megasched.verify.verify.StepComparison", Compared)
    small_config("opt").save_pretrained(tmp_path)
    return verify_schedule("auto", str(tmp_path), TP2, ranks=SimpleNamespace()), seeds


def test_other_data_tell(tmp_path, monkeypatch):
    found, seeds = verified(tmp_path, monkeypatch, {0})
    assert seeds == [0, 1]
    assert (found.verdict, found.finding, found.why) == ("equal", None, "")
    assert found.notes == [
        "with other data than the first: there 2 values are 0 but for rounding at act, whose slope jumps",
        "a note",
    ]


def test_what_no_data_tell_is_not_equal(tmp_path, monkeypatch):
    found, seeds = verified(tmp_path, monkeypatch, set(range(MOST_DATA)))
    assert seeds == [*range(MOST_DATA)]
    assert (found.verdict, found.finding.tipped) == ("wrong", 2)


def test_data_of_another_seed_are_others():
    config = small_config("opt")
    first, same, other = (make_batches(config, TP2, seed=seed).inputs["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert sorted(first.unique().tolist()) == sorted(other.unique().tolist())  # each holds every id
