"""Runs a scheduled model beside the unscheduled one, on each rank, and says how far they are apart."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import megasched
from megasched.language.schedule import Schedule
from megasched.lowering.build import build_with_plan
from megasched.plan.plan import Plan

Fill = Callable[[Schedule], Any]


def scheduled_copy(
    model: nn.Module, fill: Fill, inputs: Mapping[str, Any] | None = None, *, sequence_parallel: bool = False
) -> tuple[Any, Plan, Schedule]:
    """A copy of the model, built under the schedule that ``fill`` makes."""
    sch = megasched.create_schedule(copy.deepcopy(model), sequence_parallel=sequence_parallel)
    fill(sch)
    plan = build_with_plan(sch, inputs)
    return sch.mod, plan, sch


def distance(got: torch.Tensor, want: torch.Tensor, least: float = 1e-12) -> float:
    """Largest difference, relative to the largest value wanted (or to ``least``, if that is more)."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got - want).abs().max() / max(float(want.abs().max()), least))


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
    """Canonical name -> distance of the gradients; the same names have none.

    A gradient that is zero in exact arithmetic (a key's bias) is noise: it is held against a small part of
    the largest one.
    """
    got = gathered_gradients(model, plan)
    want = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert set(got) == set(want)
    assert {n for n, g in got.items() if g is None} == {n for n, g in want.items() if g is None}
    least = 1e-2 * max(float(g.abs().max()) for g in want.values() if g is not None)
    return {name: distance(got[name], value, least) for name, value in want.items() if value is not None}


def compare(
    model: nn.Module, fill: Fill, calls: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Distances of the output (``output``), the loss (``loss``) and every gradient, in the model's own mode.

    An HF model's loss is its own; any other module's is the mean square of its output, weighted so that the
    gradient of each element differs.
    """
    built, plan, _ = scheduled_copy(model, fill, inputs)
    found: dict[str, float] = {}
    losses, outputs = [], []
    for each in (built, model):
        result = each(**calls)
        output = result if isinstance(result, torch.Tensor) else result.logits
        outputs.append(output)
        losses.append(weighted_loss(output) if result is output else result.loss)
        losses[-1].backward()
    found = compare_gradients(built, plan, model)
    return {**found, "output": distance(*outputs), "loss": distance(*losses)}


def weighted_loss(output: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    return (output * output * weights).mean()


def too_far(found: Mapping[str, float], tolerance: float = 1e-5) -> dict[str, float]:
    return {name: gap for name, gap in found.items() if not gap <= tolerance}
