"""Has batch norms take their statistics of the samples of all data-parallel ranks.

Torch's ``SyncBatchNorm`` runs on GPUs alone, and sums over whatever group it is made with; this one runs anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from megasched.layers.wrap import Forward, takes_any_name, wrap_forward


def share_statistics(module: nn.Module, group: Any) -> None:
    """Makes a batch norm, in training, use the statistics over all ranks of a group; a second call has no effect.

    Ranks may have different numbers of samples, or none. In evaluation it does what it did before.
    """
    if getattr(module, "megasched_shares_statistics", False) or group.size() == 1:
        return
    module.megasched_shares_statistics = True

    def shared(forward: Forward, /, x: torch.Tensor) -> torch.Tensor:
        return _shared(module, group, x) if module.training else forward(x)

    wrap_forward(module, takes_any_name(shared), node="sync_batch_norm")


def _shared(module: nn.Module, group: Any, x: torch.Tensor) -> torch.Tensor:
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean, variance, count = _statistics(values.detach(), group)
    if module.track_running_stats:
        _keep_running(module, mean, variance * count / (count - 1))
    inverse = torch.rsqrt(variance + module.eps)
    output: torch.Tensor = _Normalized.apply(values, module.weight, module.bias, mean, inverse, count, group)
    return output.to(x.dtype)


def _statistics(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns mean [channels], variance [channels] and the number of values in a channel, over all ranks.

    Each rank's squares are about its own mean: a difference of large sums would lose digits.
    """
    own = x.mean(_beside_channels(x)) if x.numel() else x.new_zeros(x.shape[1])  # of no samples it is NaN
    squares = (x - _spread(own, x)).square().sum(_beside_channels(x))
    told = torch.cat([own, squares, own.new_tensor([x.numel() // x.shape[1]])])
    every = told.new_empty(group.size(), told.numel())
    torch.distributed.all_gather(list(every.unbind()), told, group=group)
    means, squares, counts = every.split([len(own), len(own), 1], dim=1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    return mean, (squares + counts * (means - mean).square()).sum(0) / count, count


def _keep_running(module: nn.Module, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
    module.num_batches_tracked.add_(1)
    factor = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    for running, new in ((module.running_mean, mean), (module.running_var, unbiased)):
        running.mul_(1 - factor).add_(factor * new.to(running.dtype))


class _Normalized(torch.autograd.Function):
    """Normalizes [b, channels, ...] by statistics that all ranks' values have a part in."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        count: torch.Tensor,
        group: Any,
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, inverse, count)
        normal = (x - _spread(mean, x)) * _spread(inverse, x)
        if weight is None or bias is None:
            return normal
        return normal * _spread(weight.to(x.dtype), x) + _spread(bias.to(x.dtype), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        dims = _beside_channels(x)
        normal = (x - _spread(mean, x)) * _spread(inverse, x)
        own = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        every = own.clone()
        torch.distributed.all_reduce(every, group=ctx.group)
        scale = inverse if weight is None else inverse * weight.to(x.dtype)
        common = _spread(every[0] / count, x) + normal * _spread(every[1] / count, x)
        of_x = _spread(scale, x) * (gradient - common)
        if weight is None:
            return of_x, None, None, None, None, None, None
        return of_x, own[1].to(weight.dtype), own[0].to(weight.dtype), None, None, None, None


def _beside_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _spread(of_channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns [channels] as [1, channels, 1...], to be broadcast against ``x``."""
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))
