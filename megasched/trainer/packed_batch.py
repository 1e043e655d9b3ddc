"""Converts a micro-batch of packed sequences from Megatron's form to the one that a definition takes."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megasched.errors import ConfigError, ScheduleError
from megasched.layers.packed import PackedRows
from megasched.layers.te.attention import uses_transformer_engine
from megasched.plan.plan import Plan


def unpack_rows(params: PackedSeqParams, rows: int, length: int) -> PackedRows:
    """Returns where sequences begin in the rows of a micro-batch, from Megatron's packed parameters.

    Raises:
        ConfigError: another form than that of Megatron's fine-tuning data.
    """
    bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    if params.qkv_format != "thd" or bounds is None or params.max_seqlen_q is None or params.cp_group is not None:
        raise ConfigError(
            "packed sequences must come as Megatron's fine-tuning data does: PackedSeqParams with "
            f"qkv_format='thd', cu_seqlens_q and max_seqlen_q, without context parallelism; got {params}"
        )
    return PackedRows(bounds.view(-1), int(params.max_seqlen_q), rows, length)


def as_rows(ids: torch.Tensor | None, params: PackedSeqParams, micro_batch_size: int) -> torch.Tensor | None:
    """Reshapes token ids or labels from [1, b * s] to [b, s]; None stays None.

    Megatron joins all rows to one, but sends hidden states of b rows between stages.

    Args:
        micro_batch_size: b, where ``params`` do not say how long a row is.
    """
    if ids is None:
        return None
    return ids.view(-1, params.tokens_per_sample or ids.numel() // micro_batch_size)


def packed_arguments(plan: Plan, rows: PackedRows, device: torch.device) -> dict[str, Any]:
    """Returns the forward arguments that tell a definition where sequences begin, beside its masks.

    Raises:
        ConfigError: the run was not planned for packed sequences.
        ScheduleError: a row holds several sequences, and the definition would mix them.
    """
    packed = plan.packed
    if packed is None:
        raise ConfigError("packed sequences come with --sft alone, and it was not given")
    if packed.problems:
        if rows.several:
            raise ScheduleError(packed.problems)
        return {}  # one sequence a row is what it sees in any case
    given: dict[str, Any] = {"position_ids": rows.positions()}
    # Lengths differ from batch to batch, and a traced module would be traced anew for each.
    traced = plan.records_where(lambda primitive: primitive.makes_graph)
    by_megatron = plan.blocks or plan.attentions
    if packed.hands_on_bounds and (by_megatron or (uses_transformer_engine(device) and not traced)):
        given |= rows.arguments()
    return given
