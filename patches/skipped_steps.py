"""Passes over the data of ``--iterations-to-skip`` on every rank that reads some, for each of its model chunks."""

from __future__ import annotations

from typing import Any

from megasched.attributes import Undo, set_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.training.training:dummy_train_step"


def _change() -> Undo:
    def dummy_train_step(data_iterator: Any) -> None:
        """Takes the micro-batches of one step from this rank's iterators: one, one for each chunk, or none."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        of_chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        while get_rerun_state_machine().should_run_forward_backward(data_iterator):
            for iterator in of_chunks:
                for _ in range(get_num_microbatches() if iterator is not None else 0):
                    next(iterator)

    return set_attribute(_TARGET, dummy_train_step)


PATCH = Patch(
    name="skipped_steps",
    targets=(_TARGET,),
    why=(
        "--iterations-to-skip: megatron/training/training.py:2309 takes a batch from a list where a rank has "
        "several chunks, and from nothing on stages between the first and the last, which ends the run there"
    ),
    change=_change,
    signature={_TARGET: ("data_iterator",)},
)
