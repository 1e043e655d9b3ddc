"""Sums partial gradients over ranks, whichever object holds a parameter at the time.

A hook stays with the object that it was registered on, and trainers replace those: FSDP2 computes with parameters
of its own, and weights deferred by ``init_empty_weights`` get their values in new ones. So the code that reads
such a parameter sees to it that the object has its hook.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from megasched.layers.build_context import BuildContext
from megasched.layers.regions import sum_gradient
from megasched.layers.wrap import Forward, wrap_forward
from megasched.plan.placement import Placement

# The module that holds a parameter, the parameter's name there, the ranks to sum over, and a factor.
type Held = tuple[nn.Module, str, ProcessGroup, float | None]


def sum_partial_gradients(
    model: nn.Module, context: BuildContext, here: Callable[[str], bool], graphs: Collection[str]
) -> None:
    """Has the partial gradients of a model summed, for a trainer that knows nothing of them.

    Those of replicated parameters are summed over TP, and under context parallelism all are over the ranks that
    share a sequence. Those of experts, which tokens of several replicas reach, are summed over the ranks with the
    same experts, and made the mean over replicas, as DDP makes all others.

    Args:
        here: whether a module is lowered.
        graphs: modules whose forward is a graph, in which the code of modules inside of them stands.
    """
    if context.size == 1 and context.context_parallel is None and not context.plan.experts:
        return
    modules = dict(model.named_modules())
    read: dict[str, dict[str, Held]] = defaultdict(dict)
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, _, local = name.rpartition(".")
        placement = context.placement_of(name)
        over = None if placement is None or not here(path) else _summed_over(placement, context)
        if placement is None or over is None:
            continue
        readers = {path, *context.plan.tp_facts.readers.get(placement.name, ())}
        for reader in modules.keys() & readers:
            around = [graph for graph in graphs if not graph or f"{reader}.".startswith(f"{graph}.")]
            read[min(around, key=len, default=reader)][name] = modules[path], local, *over
    for reader, held in read.items():
        _hook_when_called(modules[reader], held.values())


def _summed_over(placement: Placement, context: BuildContext) -> tuple[ProcessGroup, float | None] | None:
    """Returns the ranks that have parts of a gradient, and the factor of each part; None where it is complete."""
    from megatron.core import parallel_state

    if placement.group == "ep":
        replicas = parallel_state.get_data_parallel_world_size()
        return parallel_state.get_expert_data_parallel_group(), 1 / replicas
    partial = placement.tp_gradient != "complete" and context.size > 1
    if context.context_parallel is not None:
        both = parallel_state.get_tensor_and_context_parallel_group
        return (both() if partial else context.context_parallel.group), None
    return (context.group, None) if partial else None


def _hook_when_called(module: nn.Module, held: Iterable[Held]) -> None:
    parameters = tuple(held)

    def hooked(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        for owner, name, group, scale in parameters:
            sum_gradient(getattr(owner, name), group, scale)
        return forward(*args, **kwargs)

    wrap_forward(module, hooked)
