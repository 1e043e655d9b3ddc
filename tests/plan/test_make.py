"""A plan is made by a line of phases, is complete, and is changed by nobody."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from megasched import ParallelDims, ScheduleError, create_schedule
from megasched.plan import make
from megasched.plan.make import make_plan
from megasched.plan.record_checks import check_complete

INPUTS = {"input": torch.zeros(2, 8)}


def scheduled():
    sch = create_schedule(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), ParallelDims(tensor_model_parallel_size=2)
    )
    sch["0"].shard("weight", axis=0)
    sch["2"].shard("weight", axis=1)
    return sch


def test_nobody_writes_to_a_plan():
    plan = make_plan(scheduled(), inputs=INPUTS)
    with pytest.raises(FrozenInstanceError):
        plan.cuts = {}


def test_every_parameter_has_a_placement_and_a_way_of_its_gradient():
    sch = scheduled()
    plan = make_plan(sch, inputs=INPUTS)
    assert plan.placements.keys() == dict(sch.mod.named_parameters()).keys()
    assert check_complete(plan, sch.mod) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda placements: placements.pop("2.bias"), "2.bias has no placement"),
        (
            lambda placements: placements.update({"0.weight": replace(placements["0.weight"], shape=(8, 4))}),
            r"0.weight is \[8, 8\], and its placement is of \[8, 4\]",
        ),
        (
            lambda placements: placements.update(
                {"0.weight": replace(placements["0.weight"], tp_gradient="partial")}
            ),
            "0.weight is cut, and its gradient would be summed",
        ),
    ],
)
def test_what_a_phase_leaves_open_is_refused_by_name(monkeypatch, change, told):
    """Of the last phase that decides on placements, here one with a fault."""
    real = make.choose_fp8

    def faulty(plan):
        plan, problems = real(plan)
        placements = dict(plan.placements)
        change(placements)
        return replace(plan, placements=placements), problems

    monkeypatch.setattr(make, "choose_fp8", faulty)
    with pytest.raises(ScheduleError, match=f"the plan is not complete: {told}") as raised:
        make_plan(scheduled(), inputs=INPUTS)
    assert raised.value.problems[0].module in ("0", "2")


class Gated(nn.Module):
    """The output of ``up`` is needed whole, that of ``gate`` is not."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input):
        return self.down(torch.softmax(self.up(input), -1) * torch.relu(self.gate(input)))


@pytest.mark.parametrize("cut", ["gate", "up"])
def test_a_linear_that_is_gathered_is_not_decomposed(cut):
    sch = create_schedule(nn.Sequential(Gated()), ParallelDims(tensor_model_parallel_size=2))
    sch[f"0.{cut}"].shard("weight", axis=0)
    sch[f"0.{cut}"].decompose()
    sch["0"].trace(inputs=INPUTS)
    with pytest.raises(ScheduleError, match="can't be decomposed as it is cut: its bias") as raised:
        make_plan(sch, inputs=INPUTS)
    assert raised.value.problems[0].module == f"0.{cut}"
    assert "test_make.py" in str(raised.value.problems[0].source)
