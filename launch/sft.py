"""What ``pretrain_gpt.py --sft`` tells the model of packed sequences, from a batch of Megatron's own data set."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

# What ``SFTDataset`` adds to the fields of other data sets.
PACKED_FIELDS = ("cu_seqlens", "max_seqlen")


def packed_seq_params(
    cu_seqlens: torch.Tensor | None, max_seqlen: torch.Tensor | None, seq_length: int
) -> PackedSeqParams | None:
    """Where the sequences of a micro-batch begin, as Megatron's models take it; None where nothing is packed.

    Args:
        cu_seqlens: [1, n + 1] int32, cumulative lengths over all rows of the micro-batch, one after the other.
        max_seqlen: [1], length of the longest.
        seq_length: of a row.
    """
    if cu_seqlens is None or max_seqlen is None:
        return None
    bounds, longest = cu_seqlens.squeeze(0), int(max_seqlen.item())
    update_seqlen_stats_from_cu_seqlens(bounds)  # for the FLOPs in the log
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=seq_length,
    )
