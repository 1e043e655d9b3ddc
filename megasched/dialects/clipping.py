"""Clips the gradients of a model that is cut over TP, and maybe over FSDP2, by the norm of the whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megasched.dialects.stages import StageModule
from megasched.lowering.build import placements_of
from megasched.lowering.groups import group_of
from megasched.plan.placement import Placement


def clip_grad_norm_(model: nn.Module | Sequence[nn.Module], max_norm: float) -> torch.Tensor:
    """Scales the gradients of a built model so that their norm is at most ``max_norm``, as torch's function does.

    Every rank calls it, when gradients are those of the whole batch. Each number counts once: what is cut over TP,
    sharded by FSDP2 or spread over pipeline stages is summed over the ranks that share it.

    Args:
        model: what ``build`` or ``build_stage`` returned, or all stages of this rank; under DDP the one inside.
            ``fully_shard`` may have sharded it.

    Returns:
        The 2-norm before, a float32 scalar.

    Raises:
        KeyError: the model was not built, or is a copy of one that was.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    squares: dict[tuple[ProcessGroup, ...], torch.Tensor] = defaultdict(lambda: torch.zeros(()))
    for chunk in chunks:
        placements = placements_of(chunk)
        copies = chunk.copies if isinstance(chunk, StageModule) else frozenset()
        for name, parameter in chunk.named_parameters():
            if name not in copies:
                key = _groups(parameter, placements[name])
                squares[key] = squares[key] + _square(parameter)
    norm = _total(squares, staged=isinstance(chunks[0], StageModule)).sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if parameter.grad is not None:
            _local(parameter.grad).mul_(scale.to(parameter.device))
    return norm


def _total(squares: dict[tuple[ProcessGroup, ...], torch.Tensor], *, staged: bool) -> torch.Tensor:
    """Returns the sum of squares over all ranks that have another part of the model."""
    from megatron.core import parallel_state

    total = torch.zeros(())
    for groups, square in squares.items():
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        total = total.to(square.device) + square
    if staged:
        torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return total


def _groups(parameter: torch.Tensor, placement: Placement) -> tuple[ProcessGroup, ...]:
    """Returns the groups over which a parameter is spread, so that each rank has another part of it."""
    groups = [group_of(placement.group)] if placement.sharded else []
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        groups += [mesh.get_group(dim) for dim, laid in enumerate(parameter.placements) if laid.is_shard()]
    return tuple(groups)


def _square(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the squares of a rank's part of a gradient, 0 where there is none."""
    if parameter.grad is None:
        return torch.zeros((), device=_local(parameter).device)
    return _local(parameter.grad).detach().float().pow(2).sum()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
