"""What is done about parameters that have no part in the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasched.analysis.trials.reach import Reach
from megasched.errors import ConfigError, ScheduleError
from megasched.trainer.unreached import (
    folded,
    freeze_unreached,
    refuse_unsure_overlap,
    unreached_lines,
    watch_unreached,
)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.tower = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        self.scale = nn.Parameter(torch.ones(2))


NEVER = ("scale", "tower.0.weight", "tower.0.bias", "tower.1.weight", "tower.1.bias")
REACH = Reach(never=NEVER, uncalled=frozenset({"tower.0", "tower.1"}))


def test_names_are_folded_to_the_largest_modules():
    assert folded(Tower(), NEVER) == ["tower", "scale"]
    assert folded(Tower(), NEVER[:-1]) == ["tower.0", "scale", "tower.1.weight"]


def test_they_are_frozen_and_said():
    model = Tower()
    freeze_unreached(model, REACH)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["used.weight", "used.bias"]
    (line,) = unreached_lines(model, REACH)
    assert line.startswith("19 parameters have no part in the loss of these batches; ")
    assert line.endswith(": tower, scale")


def test_a_gradient_that_comes_back_is_refused_and_a_call_for_indices_is_not():
    model, x = Tower(), torch.randn(2, 2)
    freeze_unreached(model, REACH)
    watch_unreached(model, REACH.uncalled)
    with torch.no_grad():
        expected = nn.functional.linear(x, model.tower[0].weight, model.tower[0].bias)
    assert torch.equal(model.tower[0](x), expected)
    chosen = model.tower(x).argmax(-1)
    model.used(x)[chosen].sum().backward()
    assert model.used.weight.grad is not None
    with pytest.raises(ConfigError, match=r"^tower\.1: the loss of this batch depends on it"):
        model.used(model.tower(x)).sum().backward()


def test_overlap_waits_for_no_gradient_that_may_not_come():
    refuse_unsure_overlap(Reach(never=NEVER), None, overlap_grad_reduce=True)
    unsure = Reach(perhaps=("experts.1.weight",))
    refuse_unsure_overlap(unsure, None, overlap_grad_reduce=False)
    with pytest.raises(ScheduleError, match="not every batch reaches it"):
        refuse_unsure_overlap(unsure, None, overlap_grad_reduce=True)
