"""Sums the gradients of parameters that layers of several stages share, so that these keep one value.

The tie of the embedding and the head is Megatron's own affair. Of any other shared parameter each stage has a
copy. All copies start alike and get the same gradient before Megatron finalizes gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megasched.errors import Problem, ScheduleError
from megasched.plan.plan import Plan
from megasched.trainer.stages.stage import Stage


def shared_parameters(plan: Plan, stages: Sequence[Stage]) -> dict[str, int]:
    """Maps the canonical name of each parameter that several stages hold to the first of these stages.

    Args:
        stages: all stages, in the order in which the model runs.
    """
    return {name: min(found) for name, found in sorted(stages_of(plan, stages).items()) if len(found) > 1}


def stages_of(plan: Plan, stages: Sequence[Stage]) -> dict[str, set[int]]:
    """Maps the canonical name of each parameter to the stages that hold it; empty for a single stage."""
    homes: dict[str, set[int]] = {}
    if len(stages) < 2:
        return homes
    structure = plan.stack
    of_layer = {layer: number for number, stage in enumerate(stages) for layer in range(stage.start, stage.stop)}
    for name, canonical in plan.canonical.items():
        path = name.rpartition(".")[0]
        layer = structure.index_of(path)
        if layer is None:
            held = [number for number, stage in enumerate(stages) if stage.holds(structure, path)]
        else:
            held = [of_layer[layer]]
        homes.setdefault(canonical, set()).update(held)
    return homes


def refuse_overlap(plan: Plan, overlap_grad_reduce: bool) -> None:
    """Refuses ``--overlap-grad-reduce`` where layers share parameters and there are pipeline stages.

    Gradients that are reduced over DP during the backward pass can't be summed over the stages before.

    Raises:
        ScheduleError: layers share parameters, and ``--overlap-grad-reduce`` is on.
    """
    structure, layers = plan.structure, dict[str, set[int | None]]()
    if not overlap_grad_reduce or plan.layout.pp == 1 or structure is None:
        return
    for name, canonical in plan.canonical.items():
        layers.setdefault(canonical, set()).add(structure.index_of(name))
    shared = [name for name, indices in layers.items() if len(indices - {None}) > 1]
    if shared:
        what = "layers share it, and its gradients must be summed over pipeline stages before they are over DP"
        raise ScheduleError(Problem(what, shared[0], remedy="leave out --overlap-grad-reduce"))


def finalize_with_shared(group: torch.distributed.ProcessGroup) -> Callable[..., Any]:
    """Returns Megatron's ``finalize_model_grads``, with gradients of shared parameters summed over PP before.

    Args:
        group: Megatron's PP group.
    """

    def finalize(model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import unwrap_model
        from megatron.training import training

        sum_gradients([chunk.shared_copies() for chunk in unwrap_model(list(model))], group)
        return training.finalize_model_grads(model, *args, **kwargs)

    return finalize


def sum_gradients(
    chunks: Sequence[Mapping[str, torch.nn.Parameter | torch.Size]], group: torch.distributed.ProcessGroup
) -> None:
    """Sums the gradients of shared parameters over the chunks of all stages.

    Args:
        chunks: for each chunk of this rank, name -> its copy, or the shape of one that it lacks; the same names on
            all ranks.
        group: the ranks of the stages.
    """
    for name in chunks[0]:
        copies = [chunk[name] for chunk in chunks]
        held = [copy.main_grad for copy in copies if isinstance(copy, torch.nn.Parameter)]
        shape = next(copy.shape if isinstance(copy, torch.nn.Parameter) else copy for copy in copies)
        total = torch.zeros(shape, dtype=torch.float32, device=torch.cuda.current_device())
        for gradient in held:
            total += gradient
        torch.distributed.all_reduce(total, group=group)
        for gradient in held:
            gradient.copy_(total)
