"""Answers DeepSpeed's questions about process groups by Megatron's: its official ``mpu=`` argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import distributed

_GROUPS = ("tensor_model_parallel", "pipeline_model_parallel", "data_parallel", "model_parallel")


class ModelParallelUnit:
    """Has ``get_*_group``, ``get_*_rank`` and ``get_*_world_size`` of each of Megatron's groups.

    Megatron's ``parallel_state`` lacks some of what DeepSpeed 0.19 asks for (runtime/utils.py, zero/stage3.py).
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        for name in _GROUPS:
            group: Callable[[], distributed.ProcessGroup] = getattr(parallel_state, f"get_{name}_group")
            setattr(self, f"get_{name}_group", group)
            setattr(self, f"get_{name}_rank", partial(_asked, distributed.get_rank, group))
            setattr(self, f"get_{name}_world_size", partial(_asked, distributed.get_world_size, group))

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Returns the ranks of the world that have this rank's shards."""
        from megatron.core import parallel_state

        return distributed.get_process_group_ranks(parallel_state.get_data_parallel_group())

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Returns the rank of the world that is the first of this rank's TP group."""
        from megatron.core import parallel_state

        return distributed.get_global_rank(parallel_state.get_tensor_model_parallel_group(), 0)


def _asked(
    question: Callable[[distributed.ProcessGroup], int], group: Callable[[], distributed.ProcessGroup]
) -> int:
    return question(group())
