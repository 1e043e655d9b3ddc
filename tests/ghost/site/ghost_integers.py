"""Computes whole numbers on the host: masks, positions, and how many tokens each expert of a mixture gets.

Without it they are zeros, as all that a ghost GPU would compute, and a mixture has no tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_GHOST = ctypes.CDLL(None)
# Operators that choose by scores -> which of their outputs are indices.
_CHOICES = {torch.ops.aten.topk.default: 1, torch.ops.aten.sort.default: 1, torch.ops.aten.argsort.default: 0}
# Operators that mark what was chosen, by which some definitions count it, in numbers of floating point.
_MARKS = {torch.ops.aten.scatter.value, torch.ops.aten.scatter_.value}
# Operators that neither read nor write a value.
_VALUELESS = ("aten::empty", "aten::record_stream")
# Of more bytes are the buffers by which Inductor clears a cache, again and again, before it times a kernel.
_MOST = 1 << 25
# The host's own counts numbers of floating point alone.
_ON_HOST = {torch.ops.aten.histc.default: lambda x, *args: torch.histc(x.double(), *args)}


class Integers(TorchDispatchMode):
    """Repeats on the host what takes and makes whole numbers alone, and marks. Choices by scores are made evenly.

    The operator runs on the device, too, so that it is counted; what is moved for the host's part is not.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch compile what it would; with a mode that wants to see each operation, it would not."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _concerns(func, args, kwargs):
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        marks = _of_marks(func, kwargs)
        alone = marks or not any(each.is_floating_point() or each.is_complex() for each in given)
        before = None
        if alone and func is not torch.ops.aten.copy_.default:  # the ghost copies for real
            with _unrecorded():
                before = tree_map(_on_host, (args, kwargs))
        made = func(*args, **kwargs)
        if before is not None and not _tensors(made):
            return func(*before[0], **before[1])
        with _unrecorded():
            if before is not None:
                again = tree_leaves(_ON_HOST.get(func, func)(*before[0], **before[1]))
                outputs, form = tree_flatten(made)
                valued = [_with_value(*each, marks) for each in zip(outputs, again, strict=True)]
                made = tree_unflatten(valued, form)
            elif func in _CHOICES:
                chosen = tree_leaves(made)[_CHOICES[func]]
                _write(chosen, _evenly(given[0].shape[-1], chosen.shape))
        return made


def _concerns(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator of torch's own is called on the device and gives new values."""
    if func.namespace != "aten" or func.is_view or func._schema.name.startswith(_VALUELESS):
        return False
    given = _tensors((args, kwargs))
    if any(each.nbytes > _MOST for each in given):
        return False
    placed = torch.device(kwargs.get("device") or "cpu").type == "cuda"
    return (placed or any(each.is_cuda for each in given)) and not any(each.is_meta for each in given)


def _of_marks(func: Any, kwargs: Any) -> bool:
    """Whether an operator makes marks, or whole numbers of them."""
    if func is torch.ops.aten._to_copy.default:
        dtype = kwargs.get("dtype")
        return dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    return func in _MARKS


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage: to copy a view of another layout, a kernel would make it contiguous."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch.device("cpu") if isinstance(value, torch.device) else value
    return _storage(value.detach()).cpu().as_strided(value.shape, value.stride(), value.storage_offset())


def _with_value(output: torch.Tensor, value: torch.Tensor, marks: bool) -> torch.Tensor:
    """The output with a value that the host has computed, which may tell how large it is, as of ``nonzero``."""
    if output.shape != value.shape:
        return value.to(output.device)
    _write(output, value, marks)
    return output


def _write(output: torch.Tensor, value: torch.Tensor, marks: bool = False) -> None:
    if not output.is_cuda or (not marks and (output.is_floating_point() or output.is_complex())):
        return
    held = _on_host(output)
    held.copy_(value)
    _storage(output).copy_(_storage(held))


def _evenly(among: int, shape: torch.Size) -> torch.Tensor:
    """As many of each as of the others: row ``r`` chooses ``r``, ``r + 1``, ... of them."""
    rows = prod(shape[:-1])
    return ((torch.arange(rows)[:, None] + torch.arange(shape[-1])) % among).view(shape)


@contextmanager
def _unrecorded() -> Iterator[None]:
    _GHOST.ghost_pause(1)
    try:
        yield
    finally:
        _GHOST.ghost_pause(0)
