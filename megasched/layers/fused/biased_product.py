"""Computes a linear with its bias by one kernel, where Megatron's function would add the bias by a second one.

Megatron's function (``core/tensor_parallel/layers.py``) is an autograd function of its own: it communicates beside
the products of its backward, and adds weights' gradients to the trainer's buffers. Where it does neither, torch's
linear is the same, and cuBLAS adds the bias as it writes the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch.nn import functional as F


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """Returns ``input @ weight.t() + bias``, [..., out], under ``torch.autocast`` all in its dtype.

    Megatron's function sends its input as it is given, and adds a float32 bias to what autocast has rounded.

    Args:
        input: [..., in]
        weight: [out, in]
        bias: [out]
        options: of Megatron's function, by its names.
    """
    if (dtype := autocast_dtype(input)) is not None:
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    if bias is not None and _computes_alone(**options):
        return F.linear(input, weight, bias)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    forward = linear_with_grad_accumulation_and_async_allreduce if trained else linear_with_frozen_weight
    with _buffers_to_keep():
        return forward(input, weight, bias, **options)


@contextmanager
def _buffers_to_keep() -> Iterator[None]:
    """Runs its body, which may make a buffer of Megatron's, so that training can write to it later.

    Megatron keeps what it gathers into (``GlobalMemoryBuffer``, ``core/utils.py``). What is made in
    ``torch.inference_mode`` can't be written to outside of it.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype in which ``torch.autocast`` has products of a tensor computed; None where it is off."""
    kind = x.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def _computes_alone(
    *,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: Any = None,
    gtp_remat_size: int = 1,
    **others: Any,
) -> bool:
    communicates = allreduce_dgrad or sequence_parallel or gtp_remat_size > 1
    return not communicates and not gradient_accumulation_fusion and grad_output_buffer is None
