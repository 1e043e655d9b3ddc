"""Counts the bytes that kernels beside products and attention read and write: those that memory bounds.

Each operation reads its inputs and writes its results once. What torch compiles is counted by Inductor's launches,
and Transformer Engine by the functions of its extension.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Products and attention, which are bound by arithmetic, and functions that only make or describe tensors.
_ARITHMETIC = re.compile(r"(^|_|::)(mm|addmm|bmm|baddbmm|gemm\w*|grouped_mm)$|attention|attn|flex")
_NO_KERNEL = re.compile(r"empty|detach|alias|set_|record_stream|_unsafe_view|_has_compatible|_local_scalar|resize")


class _Operations(TorchDispatchMode):
    def __init__(self, moved: Counter[str]) -> None:
        super().__init__()
        self.moved = moved

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch compile what it would."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and not _NO_KERNEL.search(name) and func.namespace == "aten":
            _count(self.moved, name, (args, kwargs), made)
        return made


def _count(moved: Counter[str], name: str, given: Any, made: Any) -> None:
    if not _ARITHMETIC.search(name):
        moved[name] += _bytes(given) + _bytes(made)


def _bytes(values: Any) -> int:
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.is_cuda]
    return sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in tensors)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the bytes of each operation of the block, by its name."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    moved: Counter[str] = Counter()
    launch = CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _count(moved, self.fn.__name__, args, ())
        return launch(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(CachingAutotuner, "run", run))
        for module, name, function in _extension():
            stack.enter_context(mock.patch.object(module, name, _counted(moved, name, function)))
        stack.enter_context(_Operations(moved))
        yield moved


def _extension() -> list[tuple[Any, str, Any]]:
    """The functions of Transformer Engine's extension, if it is there, with each module that holds them."""
    if "transformer_engine_torch" not in sys.modules:
        return []
    extension = sys.modules["transformer_engine_torch"]
    functions = {id(one): name for name, one in vars(extension).items() if isinstance(one, type(extension.gelu))}
    loaded = [module for name, module in sys.modules.items() if name.startswith("transformer_engine")]
    return [
        (module, name, one)
        for module in loaded
        for name, one in list(vars(module).items())
        if id(one) in functions
    ]


def _counted(moved: Counter[str], name: str, function: Any) -> Any:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        _count(moved, name, (args, kwargs), made)
        return made

    return counted
