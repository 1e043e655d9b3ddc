"""What a stage computes, moves and sends, counted operation by operation as it runs on fake tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


@dataclass
class Work:
    """The work of one pass through some modules on one rank.

    Attributes:
        products: (batch, m, n, k) of a matrix product -> how many there are.
        attention: FLOPs of fused attention kernels.
        traffic: bytes that all other operations read and write.
        sent: (operation, name of the group) -> bytes of the whole tensor, gathered or before it is reduced.
        calls: (operation, name of the group) -> how many there are.
    """

    products: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    attention: float = 0.0
    traffic: float = 0.0
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.sent + other.sent,
            self.calls + other.calls,
        )

    def __sub__(self, other: Work) -> Work:
        """What this one does more; what the other does more is left out."""
        return Work(
            self.products - other.products,
            max(0.0, self.attention - other.attention),
            max(0.0, self.traffic - other.traffic),
            self.sent - other.sent,
            self.calls - other.calls,
        )

    @property
    def flops(self) -> float:
        """2 for each multiplication with its addition."""
        return self.attention + sum(2.0 * b * m * n * k * count for (b, m, n, k), count in self.products.items())


class CountWork(TorchDispatchMode):
    """While it is entered, adds what operations do to ``work``, which may be changed for another meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count_sent(func, args)
        elif func.namespace == "aten" and not _is_view(func):
            self._count(func, args, output)
        return output

    def _count(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        product = _product(func.overloadpacket, args, output)
        name = func.overloadpacket.__name__
        if product is not None:
            self.work.products[product] += 1
        elif name.startswith("_scaled_dot_product"):
            self.work.attention += _attention_flops(name, args)
        elif func.overloadpacket not in _FREE:
            self.work.traffic += sum(map(_bytes, tree_leaves((args, output))))

    def _count_sent(self, func: Any, args: tuple[Any, ...]) -> None:
        group = next((_group_name(leaf) for leaf in args if isinstance(leaf, torch.ScriptObject)), "")
        key = (func.overloadpacket.__name__.strip("_"), group)
        self.work.sent[key] += max(map(_bytes, tree_leaves(args)), default=0)
        self.work.calls[key] += 1


# They write nothing; what they made is counted where it is written.
_FREE = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten._local_scalar_dense}


def _is_view(func: Any) -> bool:
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _product(packet: Any, args: tuple[Any, ...], output: Any) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of a matrix product."""
    if packet in (_aten.mm, _aten.bmm):
        left, right = args[:2]
    elif packet in (_aten.addmm, _aten.baddbmm):
        left, right = args[1:3]
    elif packet is _aten._grouped_mm:
        left, right = args[:2]
        if left.dim() == right.dim() == 2:  # of groups of columns of the left with rows of the right
            return output.shape[0], left.shape[0], right.shape[1], max(1, left.shape[1] // output.shape[0])
        return right.shape[0], max(1, left.shape[-2] // right.shape[0]), right.shape[-1], left.shape[-1]
    else:
        return None
    batch = left.shape[0] if left.dim() == 3 else 1
    return batch, left.shape[-2], right.shape[-1], left.shape[-1]


def _attention_flops(name: str, args: tuple[Any, ...]) -> float:
    """Two products of each query with each key forward, five backward; half of them where it is causal."""
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    causal = any(arg is True for arg in args)
    batch, heads, queries, width = query.shape
    pairs = batch * heads * queries * key.shape[2] * (0.5 if causal else 1.0)
    return 2.0 * pairs * (3 * width + 2 * value.shape[-1] if backward else width + value.shape[-1])


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _group_name(boxed: torch.ScriptObject) -> str:
    """What the group is for, as Megatron names it (``TENSOR_MODEL_PARALLEL_GROUP``)."""
    return torch.distributed.ProcessGroup.unbox(boxed).group_desc
