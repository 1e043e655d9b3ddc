"""Sums partial gradients of replicated parameters over TP, whichever object holds a parameter at the time.

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

type Held = tuple[nn.Module, str]


def sum_partial_gradients(
    model: nn.Module, context: BuildContext, here: Callable[[str], bool], graphs: Collection[str]
) -> None:
    """Has the partial gradients of a model summed over TP, for a trainer that knows nothing of them.

    Args:
        here: whether a module is lowered.
        graphs: modules whose forward is a graph, in which the code of modules inside of them stands.
    """
    if context.size == 1:
        return
    modules = dict(model.named_modules())
    read: dict[str, dict[str, Held]] = defaultdict(dict)
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, _, local = name.rpartition(".")
        placement = context.placement_of(name)
        if not here(path) or placement is None or placement.tp_gradient == "complete":
            continue
        readers = {path, *context.plan.tp_facts.readers.get(placement.name, ())}
        for reader in modules.keys() & readers:
            around = [graph for graph in graphs if not graph or f"{reader}.".startswith(f"{graph}.")]
            read[min(around, key=len, default=reader)][name] = modules[path], local
    for reader, held in read.items():
        _hook_when_called(modules[reader], held.values(), context.group)


def _hook_when_called(module: nn.Module, held: Iterable[Held], group: ProcessGroup) -> None:
    parameters = tuple(held)

    def wrapper(forward: Forward) -> Forward:
        def hooked(*args: Any, **kwargs: Any) -> Any:
            for owner, name in parameters:
                sum_gradient(getattr(owner, name), group)
            return forward(*args, **kwargs)

        return hooked

    wrap_forward(module, wrapper)
