"""Has parameters gathered in time that code reads without calling the module that has them.

Under ``--overlap-param-gather`` Megatron has each module wait for its own parameters before it is called
(``core/distributed/distributed_data_parallel.py:432``). Definitions read those of some modules without a call: the
weight of a convolution for a kernel of a state space layer, or of a router. If no other module waits for the same
bucket, such code computes with the values of the step before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from megasched.layers.wrap import wait_for_parameters


def wait_for_uncalled(chunk: nn.Module, definition: nn.Module) -> None:
    """Has the module around each one that is not called wait for its parameters, too.

    The first forward of the chunk shows which are called. In it nothing is waited for: Megatron's trainer begins
    to overlap after the first iteration (``training/training.py:3884``).
    """
    called: set[nn.Module] = set()
    handles: list[RemovableHandle] = []

    def note(module: nn.Module, args: Any) -> None:
        called.add(module)

    def begin(module: nn.Module, args: Any) -> None:
        handles.append(register_module_forward_pre_hook(note))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        while handles:
            handles.pop().remove()
        if called:
            _wait(definition, called)

    handles += [chunk.register_forward_pre_hook(begin)]
    handles += [chunk.register_forward_hook(end, always_call=True)]


def _wait(definition: nn.Module, called: set[nn.Module]) -> None:
    modules = dict(definition.named_modules())
    for path, module in modules.items():
        if module in called or next(module.parameters(recurse=False), None) is None:
            continue
        around = path
        while around and modules[around] not in called:
            around = around.rpartition(".")[0]
        modules[around].register_forward_pre_hook(partial(_wait_first, module))


def _wait_first(uncalled: nn.Module, module: nn.Module, args: Any) -> None:
    wait_for_parameters(uncalled)
