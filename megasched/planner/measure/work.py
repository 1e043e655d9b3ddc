"""Counts what a stage computes, moves and sends, operation by operation as it runs on fake tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasched.analysis.attention_flops import attended, attention_flops

_aten = torch.ops.aten


class Product(NamedTuple):
    """Describes a batch of matrix products of [m, k] by [k, n].

    Attributes:
        itemsize: bytes of an element of the factors.
        result_itemsize: bytes that are written for each element of the result, or read and written.
    """

    batch: int
    m: int
    n: int
    k: int
    itemsize: int
    result_itemsize: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def read(self) -> int:
        """Returns the bytes that are read."""
        return self.batch * (self.m + self.n) * self.k * self.itemsize

    @property
    def written(self) -> int:
        """Returns the bytes that are written, and those that are read to be added to."""
        return self.batch * self.m * self.n * self.result_itemsize


class Sent(NamedTuple):
    """Describes a collective operation.

    Attributes:
        operation: its name in ``torch.ops.c10d``, e.g. ``allgather_base``.
        group: what its ranks are for, as Megatron names it.
        behind: whether it overlaps with matrix products.
        values: number of values in the whole tensor, gathered or before it is reduced.
        itemsize: bytes of a value.
    """

    operation: str
    group: str
    behind: bool
    values: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.values * self.itemsize


@dataclass
class Work:
    """Holds the work of one pass through some modules on one rank.

    Attributes:
        products: matrix products -> how many there are.
        attention: FLOPs of fused attention kernels.
        traffic: bytes that all other operations read and write.
        kernels: number of operations, without those that send.
        sent: collective operations -> how many there are.
    """

    products: Counter[Product] = field(default_factory=Counter)
    attention: float = 0.0
    traffic: float = 0.0
    kernels: int = 0
    sent: Counter[Sent] = field(default_factory=Counter)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.kernels + other.kernels,
            self.sent + other.sent,
        )

    @property
    def flops(self) -> float:
        """Returns the FLOPs: 2 for each multiplication with its addition."""
        return self.attention + sum(product.flops * count for product, count in self.products.items())


_behind = False


@contextmanager
def behind_products() -> Iterator[None]:
    """Runs its body with all that is sent in it counted as overlapping with matrix products."""
    global _behind
    before, _behind = _behind, True
    try:
        yield
    finally:
        _behind = before


class CountWork(TorchDispatchMode):
    """Adds what operations do to ``work`` while it is entered; ``work`` may be replaced meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.see(func, args, output)
        return output

    def see(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        """Counts the work of an operation."""
        if func.namespace == "c10d":
            self._count_sent(func, args)
        elif func.namespace == "megasched_planner":
            self._count_stand_in(func, args, output)
        elif func.namespace == "aten" and not _is_view(func):
            self._count(func, args, output)

    def _count_stand_in(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        """Counts the work of an operation of ``megasched/planner/stand_ins/kernels.py``."""
        self.work.kernels += 1
        if func.overloadpacket.__name__ == "product":
            left, _, shape, k, _, added, batch = args
            written = 2 * 4 if added else output.element_size()
            made = Product(batch, math.prod(shape[:-1]) // batch, shape[-1], k, left.element_size(), written)
            self.work.products[made] += 1
        elif flops := args[4]:
            self.work.attention += flops
        else:
            self.work.traffic += sum(map(_bytes, tree_leaves((args[0], output))))

    def _count(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        product = _product(func.overloadpacket, args, output)
        name = func.overloadpacket.__name__
        self.work.kernels += func.overloadpacket not in _FREE
        if product is not None:
            self.work.products[product] += 1
        elif name.startswith("_scaled_dot_product"):
            self.work.attention += _attention_flops(name, args)
        elif func.overloadpacket not in _FREE:
            self.work.traffic += sum(map(_bytes, tree_leaves((args, output))))

    def _count_sent(self, func: Any, args: tuple[Any, ...]) -> None:
        boxed = (leaf for leaf in args if isinstance(leaf, torch.ScriptObject))
        group = next(map(torch.distributed.ProcessGroup.unbox, boxed), None)
        if group is None or group.size() == 1:
            return
        tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        largest = max(((_bytes(one), one.element_size()) for one in tensors), default=(0, 1))
        name, itemsize = func.overloadpacket.__name__.strip("_"), largest[1]
        self.work.sent[Sent(name, group.group_desc, _behind, largest[0] // itemsize, itemsize)] += 1


# They write nothing; what they made is counted where it is written.
_FREE = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten._local_scalar_dense}


@cache
def _is_view(func: Any) -> bool:
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _product(packet: Any, args: tuple[Any, ...], output: Any) -> Product | None:
    """Returns the matrix product that an operation computes; None where it does none."""
    if packet in (_aten.mm, _aten.bmm):
        left, right = args[:2]
    elif packet in (_aten.addmm, _aten.baddbmm):
        left, right = args[1:3]
    elif packet is _aten._grouped_mm:
        left, right = args[:2]
        if left.dim() == right.dim() == 2:  # of groups of columns of the left with rows of the right
            groups = output.shape[0]
            sizes = left.shape[0], right.shape[1], max(1, left.shape[1] // groups)
        else:
            groups = right.shape[0]
            sizes = max(1, left.shape[-2] // groups), right.shape[-1], left.shape[-1]
        return Product(groups, *sizes, left.element_size(), output.element_size())
    else:
        return None
    batch = left.shape[0] if left.dim() == 3 else 1
    sizes = left.shape[-2], right.shape[-1], left.shape[-1]
    return Product(batch, *sizes, left.element_size(), output.element_size())


def _attention_flops(name: str, args: tuple[Any, ...]) -> float:
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    causal = any(arg is True for arg in args)
    batch, heads, queries, width = query.shape
    pairs = attended(queries, key.shape[2], causal, window=None)
    return attention_flops(batch * heads * pairs, width, value.shape[-1], backward)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
