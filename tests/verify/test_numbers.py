"""What is compared: a gradient is held to its own size, however small; each buffer is compared, or named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megasched
from megasched.plan.placement import Placement
from megasched.verify.numbers import Number, errors_of
from megasched.verify.recording import RankReport
from tests.lowering.models import randomize


class Faint(nn.Module):
    """Adds to a linear's output another's that hardly counts, and weights it by a softmax that a shift leaves."""

    def __init__(self):
        super().__init__()
        self.loud, self.faint = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scores, self.shift = nn.Linear(8, 8), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        weights = torch.softmax(self.weigh(self.scores(x)), -1)
        return weights * self.loud(x) + 1e-9 * self.faint(x)

    def weigh(self, scores):
        return scores + self.shift


def twice(module, args, output):
    return 2 * output - output.detach()


def detached(module, args, output):
    return output.detach()


def rounded_otherwise(module, args, output):
    return output * (1 + 2**-22)


def verified(**hooks):
    sch = megasched.create_schedule(randomize(Faint()))
    for path, hook in hooks.items():
        sch[path].hook("fw_post", hook)
    return megasched.verify(sch, inputs=torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("hook", [twice, detached])
def test_a_small_gradient_that_is_wrong_is_found(hook):
    report = verified(faint=hook)
    assert report.verdict == "wrong"
    assert report.finding.where in {"faint", "faint.weight", "faint.bias"}
    assert [call[1] for call in report.finding.guilty] == [f"faint: hook(mode='fw_post', fn={hook.__name__})"]


def test_a_gradient_that_is_zero_but_for_rounding_may_be_another():
    report = verified(loud=rounded_otherwise)
    assert report.verdict == "equal"
    assert report.why.startswith("shift differs by ")


def test_buffers_are_compared_by_their_parts_and_what_is_not_compared_is_named():
    wanted = {name: torch.arange(4.0) for name in ("whole", "cut", "wrong", "of_one_half", "longer", "absent")}
    reports = [RankReport(tp_rank, 0, 0) for tp_rank in (0, 1)]
    for report in reports:
        half = torch.arange(4.0).chunk(2)[report.tp_rank]
        report.buffers = {
            "whole": (torch.arange(4.0), None),
            "cut": (half, Placement("cut", (4,), axis=0)),
            "wrong": (2 * half, Placement("wrong", (4,), axis=0)),
            "of_one_half": (torch.arange(4.0) if report.tp_rank else half, None),
            "longer": (torch.arange(8.0), None),
            "new": (half, None),
        }
    plain = SimpleNamespace(losses=[], validation=None, gradients={}, weights={}, buffers=wanted)
    found = errors_of(reports, plain, tp=2)
    errors = {name: found.largest[Number("buffer", name=name)] for name in ("whole", "cut", "wrong")}
    assert errors == {"whole": 0, "cut": 0, "wrong": 1}
    assert found.passed_over == {"of_one_half", "longer", "absent", "new"}


class Table(nn.Module):
    def __init__(self, length=4):
        super().__init__()
        self.register_buffer("table", torch.ones(length), persistent=False)

    def forward(self, x):
        return x * self.table[0]


def test_the_report_of_a_module_names_a_buffer_of_another_shape():
    sch = megasched.create_schedule(nn.Sequential(randomize(nn.Linear(8, 8)), Table()))
    sch["1"].replace(Table(length=8))
    report = megasched.verify(sch, inputs=torch.ones(2, 8))
    assert (report.verdict, report.notes) == ("equal", ["buffers that are not compared: 1.table"])
