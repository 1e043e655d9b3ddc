"""Names Megatron's groups of ranks, and tells how many ranks they have and where these lie."""

from __future__ import annotations

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.hardware.hardware import Group

TENSOR, CONTEXT = "TENSOR_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP"
EXPERT = "EXPERT_MODEL_PARALLEL_GROUP"
DATA, EXPERT_DATA = "DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"


def groups_of(layout: ParallelDims) -> dict[str, Group]:
    """Returns Megatron's groups by name.

    Its order of ranks is TP, CP, DP, PP; those of experts have a grid of their own, in which it is EP, DP, PP
    (``megatron/core/parallel_state.py``).
    """
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    of_stage = tp * cp * layout.data_parallel_size
    return {
        TENSOR: Group(tp, tp),
        CONTEXT: Group(cp, tp * cp),
        EXPERT: Group(ep, ep),
        DATA: Group(cp * layout.data_parallel_size, of_stage),
        EXPERT_DATA: Group(layout.expert_data_parallel_size, of_stage),
    }
