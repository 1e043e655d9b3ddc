"""Tells what ranks with the same parameters send to each other once a step: gradients, and new parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.groups import DATA, EXPERT_DATA, groups_of
from megasched.planner.measure.parameter_counts import Count
from megasched.planner.measure.work import Sent


def gradient_transfers(
    count: Count, layout: ParallelDims, gradient_dtype: torch.dtype, *, sharded: bool
) -> Iterator[Sent]:
    """Yields the reductions of a rank's gradients, which overlap with the backward pass.

    With Megatron's distributed optimizer each rank gets the sum of its part alone
    (``megatron/core/distributed/param_and_grad_buffer.py``).

    Args:
        count: count of the numbers in the rank's parameters.
        gradient_dtype: dtype of Megatron's gradient buffer.
        sharded: whether the optimizer's state is sharded over the ranks that have the same parameters.
    """
    yield from _of_all(count, layout, "reduce_scatter_base" if sharded else "allreduce", gradient_dtype)


def parameter_transfers(
    count: Count, layout: ParallelDims, dtype: torch.dtype, *, sharded: bool
) -> Iterator[Sent]:
    """Yields the gathering of parameters that a distributed optimizer has updated, a part on each rank."""
    if sharded:
        yield from _of_all(count, layout, "allgather_base", dtype)


def _of_all(count: Count, layout: ParallelDims, operation: str, dtype: torch.dtype) -> Iterator[Sent]:
    groups = groups_of(layout)
    for group, values in ((DATA, count.dense), (EXPERT_DATA, count.experts)):
        if values and groups[group].ranks > 1:
            yield Sent(operation, group, True, values, dtype.itemsize)
