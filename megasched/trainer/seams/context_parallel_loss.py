"""Corrects the mean loss of a micro-batch where context parallel ranks have uneven numbers of labels.

Each CP rank has a part of every sequence. Megatron divides the loss of a rank by the labels that count on it, and
averages gradients over DP and CP: a label weighs more where others are masked (``--eod-mask-loss``). Divided by
the labels of all parts, each weighs the same, as on one rank. ``--calculate-per-token-loss`` needs none of this,
as Megatron then sums the number that it divides by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megasched.attributes import Undo, resolve, wrap_attribute
from megasched.errors import ConfigError
from megasched.patches.registry import Patch
from megasched.trainer.current_session import has_session

if TYPE_CHECKING:
    import torch

_TARGET = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"


def _change() -> Undo:
    from megatron.core import parallel_state

    _check_division()

    def over_ranks(
        calc_loss: Any, model: Any, output_tensor: Any, loss_func: Any, config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        means = loss_func is not None and not config.calculate_per_token_loss and has_session()
        if means and parallel_state.get_context_parallel_world_size() > 1:
            loss_func = of_all_ranks(loss_func, parallel_state.get_context_parallel_group())
        return calc_loss(model, output_tensor, loss_func, config, *args, **kwargs)

    return wrap_attribute(_TARGET, over_ranks)


def of_all_ranks(loss_func: Callable[..., Any], group: torch.distributed.ProcessGroup) -> Callable[..., Any]:
    """Wraps a loss function so that Megatron divides by the labels of all parts of the sequences.

    Args:
        loss_func: loss function of the forward step: its loss is a sum where it also returns the number of labels
            that count.
        group: the ranks that have the parts; gradients are averaged over them, not summed.
    """
    import torch

    @wraps(loss_func)
    def counted(output_tensor: torch.Tensor, **named: Any) -> Any:
        outputs = loss_func(output_tensor, **named)
        if named or len(outputs) != 3:  # non_loss_data; a mean already
            return outputs
        loss, num_tokens, report = outputs
        everywhere = num_tokens.clone()
        torch.distributed.all_reduce(everywhere, group=group)
        return loss * group.size(), everywhere, report

    return counted


def _check_division() -> None:
    """Checks how the installed Megatron divides a loss.

    Raises:
        ConfigError: it does not divide a rank's loss by the labels on that rank.
    """
    import torch

    loss, parts = (torch.tensor(6.0), torch.tensor(3), {}), 2
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    got, _ = resolve(_TARGET)(None, None, lambda _: loss, config, None, False, 1, [], parts, True)
    if got != 2:
        raise ConfigError(
            f"{_TARGET} makes {float(got)} of a loss of 6 over 3 labels, not 2: whether it counts the labels of "
            f"all context parallel ranks is not known. Versions known to work: {PATCH.version_range}"
        )


PATCH = Patch(
    name="context_parallel_loss",
    targets=(_TARGET,),
    why=(
        "megatron/core/pipeline_parallel/schedules.py:334 divides by the labels that count on this rank, and "
        "megatron/core/distributed/distributed_data_parallel.py:227 averages over DP and CP: with masks that are "
        "uneven over the parts of a sequence, gradients are not those of its mean loss"
    ),
    change=_change,
    signature={
        _TARGET: (
            *("model", "output_tensor", "loss_func", "config", "vp_stage", "collect_non_loss_data"),
            *("num_microbatches", "forward_data_store", "cp_group_size", "is_last_stage"),
        )
    },
)
