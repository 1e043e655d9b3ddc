"""Runs a scheduled model beside the unscheduled one, on each rank, and says how far they are apart."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import megasched
from megasched.lowering.build import _own_inputs
from megasched.lowering.plan import Plan, make_plan
from megasched.schedule import Schedule

Fill = Callable[[Schedule], Any]


def scheduled_copy(
    model: nn.Module, fill: Fill, inputs: Mapping[str, Any] | None
) -> tuple[nn.Module, Plan, Schedule]:
    """A copy of the model, built under the schedule that ``fill`` makes."""
    mine = copy.deepcopy(model)
    sch = megasched.create_schedule(mine)
    fill(sch)
    plan = make_plan(sch, inputs=inputs if inputs is not None else _own_inputs(mine))
    return megasched.build(sch, inputs=inputs), plan, sch


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest value wanted."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))


def gathered_gradients(model: nn.Module, plan: Plan) -> dict[str, torch.Tensor | None]:
    """Canonical name -> gradient of the whole HF tensor; also checks that replicas of one agree bit for bit."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group()
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        placement = plan.placements[name]
        every: list[Any] = [None] * size
        torch.distributed.all_gather_object(every, parameter.grad, group=group)
        assert len({piece is None for piece in every}) == 1, name
        if every[0] is None:
            found[name] = None
            continue
        if not placement.sharded:
            assert all(torch.equal(piece, every[0]) for piece in every), f"{name} differs between ranks"
        found[name] = placement.unshard(every)
    return found


def compare_gradients(model: nn.Module, plan: Plan, reference: nn.Module) -> dict[str, float]:
    """Canonical name -> distance of the gradients; the same names have none."""
    got = gathered_gradients(model, plan)
    want = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert set(got) == set(want)
    assert {n for n, g in got.items() if g is None} == {n for n, g in want.items() if g is None}
    return {name: distance(got[name], value) for name, value in want.items() if value is not None}


def compare_causal_lm(
    model: nn.Module, fill: Fill, calls: Mapping[str, Any], labels: torch.Tensor
) -> dict[str, float]:
    """Distances of logits (``logits``), loss (``loss``) and every gradient, in training mode."""
    built, plan, _ = scheduled_copy(model, fill, None)
    outputs = [m(**calls, labels=labels) for m in (built, model)]
    for output in outputs:
        output.loss.backward()
    found = compare_gradients(built, plan, model)
    found["logits"] = distance(outputs[0].logits, outputs[1].logits)
    found["loss"] = distance(outputs[0].loss, outputs[1].loss)
    return found
