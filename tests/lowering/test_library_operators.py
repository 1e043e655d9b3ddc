"""Operators of somebody's own library: what their backward does to gradients is tried as a function's is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasched.analysis.recording.operators import library_operator
from megasched.analysis.recording.recorder import record_tape
from megasched.analysis.rules.function_trials import FunctionTrials
from megasched.analysis.trials.gradient_scale import why_by_scale
from megasched.verify.parity import LAYOUTS, failure
from megasched.verify.ranks.pool import RankError
from tests import remote
from tests.parity.steps import assert_equal, step_of_own_code
from tests.ways import mlp

OPERATORS = """
import torch


def _operator(name, backward):
    @torch.library.custom_op(f"{LIBRARY}::{name}", mutates_args=())
    def operator(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * by

    operator.register_fake(lambda x, by=2.0: torch.empty_like(x))
    operator.register_autograd(lambda ctx, grad: (backward(grad), None))


_operator("doubled", lambda grad: 2 * grad)
_operator("normed", lambda grad: 2 * grad / (grad.norm() + 1e-6))
"""
exec(OPERATORS.replace("{LIBRARY}", "megasched_tests"))


def own(name):
    return library_operator(getattr(torch.ops.megasched_tests, name).default)


def test_torchs_own_are_none():
    assert library_operator(torch.ops.aten.add.Tensor) is None
    assert library_operator(torch.ops.higher_order.cond) is None
    assert own("doubled") is own("doubled")
    assert own("doubled").__name__ == "megasched_tests.doubled.default"


@pytest.mark.parametrize(("name", "works"), [("doubled", True), ("normed", False)])
def test_gradients_add_up_where_its_backward_is_linear(name, works):
    x, output = (torch.empty(2, 4, 8, device="meta") for _ in range(2))
    args = (x,), {"by": 2.0}
    assert FunctionTrials().works_on_shards(own(name), args, output, lambda tensor: None) is works


class Model(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.inner, self.operator = nn.Linear(4, 4), operator

    def forward(self, x):
        return self.operator(self.inner(x))


def test_one_that_goes_by_how_large_a_gradient_is_is_found_inside_of_a_run():
    inputs = {"x": torch.empty(1, 2, 4, device="meta")}
    operators = torch.ops.megasched_tests
    assert why_by_scale(record_tape(Model(operators.doubled).to("meta"), inputs)) is None
    problem = why_by_scale(record_tape(Model(operators.normed).to("meta"), inputs))
    why = "the backward of megasched_tests.normed.default goes by how large a gradient is"
    assert problem.what.startswith(why)


@pytest.mark.parametrize("layout", ["tp2-sp", "cp2"])
def test_in_a_trainers_step(ranks, tmp_path, layout):
    """A rank of these has a term of the gradient there."""

    def definition(name):
        library = f"megasched_tests_{name}"
        code = OPERATORS.replace("{LIBRARY}", library) + mlp(f"h = torch.ops.{library}.{name}(h)")
        return remote.write(tmp_path / name, code)

    assert_equal(step_of_own_code(ranks, definition("doubled"), LAYOUTS[layout]))
    with pytest.raises(RankError) as raised:
        step_of_own_code(ranks, definition("normed"), LAYOUTS[layout])
    outcome = failure(str(raised.value))
    assert outcome.verdict == "refused"
    assert "the backward of megasched_tests_normed.normed.default" in outcome.why
