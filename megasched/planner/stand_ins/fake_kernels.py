"""Represents kernels of a GPU in a plan, on fake tensors: what they read, make and compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Shape = Sequence[int]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_library = torch.library.Library("megasched_planner", "DEF")
_library.define("kernel(Tensor[] read, int[] sizes, int[] dims, int[] dtypes, float flops) -> Tensor[]")
_library.define(
    "product(Tensor left, Tensor right, int[] shape, int k, int dtype, bool added, int batch) -> Tensor"
)


@torch.library.register_fake("megasched_planner::kernel", lib=_library)
def _make(read: list[torch.Tensor], sizes: list[int], dims: list[int], dtypes: list[int], flops: float) -> Any:
    left = iter(sizes)
    shapes = [[next(left) for _ in range(count)] for count in dims]
    return [
        torch.empty(shape, dtype=_DTYPES[dtype], device="cpu") for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@torch.library.register_fake("megasched_planner::product", lib=_library)
def _multiply(
    left: torch.Tensor, right: torch.Tensor, shape: list[int], k: int, dtype: int, added: bool, batch: int
) -> torch.Tensor:
    return torch.empty([0] if added else shape, dtype=_DTYPES[dtype], device="cpu")


def kernel(
    read: Sequence[torch.Tensor], *made: tuple[Shape, torch.dtype], flops: float = 0.0
) -> list[torch.Tensor]:
    """Runs one kernel that reads tensors (one that it reads twice is there twice) and makes others.

    Args:
        flops: FLOPs of fused attention.
    """
    sizes = [size for shape, _ in made for size in shape]
    dtypes = [_DTYPES.index(dtype) for _, dtype in made]
    found: list[torch.Tensor] = torch.ops.megasched_planner.kernel(
        list(read), sizes, [len(shape) for shape, _ in made], dtypes, flops
    )
    return found


def like(tensor: torch.Tensor) -> tuple[Shape, torch.dtype]:
    """Returns the shape and dtype of a tensor, for a result of its form."""
    return tensor.shape, tensor.dtype


def product(
    left: torch.Tensor, right: torch.Tensor, shape: Shape, k: int, dtype: torch.dtype, batch: int = 1
) -> torch.Tensor:
    """Runs a matrix product over ``k``; the dtype of ``left`` tells in how many bits.

    Args:
        batch: number of products, each with other rows, of which the result is put together.
    """
    found: torch.Tensor = torch.ops.megasched_planner.product(
        left, right, list(shape), k, _DTYPES.index(dtype), False, batch
    )
    return found


def add_product(left: torch.Tensor, right: torch.Tensor, shape: Shape, k: int, batch: int = 1) -> None:
    """Runs a matrix product that is added to a gradient that is there (``--gradient-accumulation-fusion``)."""
    torch.ops.megasched_planner.product(left, right, list(shape), k, _DTYPES.index(torch.float32), True, batch)
