"""Keeps transformers from taking a context-parallel rank's positions for those of packed sequences."""

from __future__ import annotations

from typing import Any

from megasched.attributes import Undo, set_attribute
from megasched.patches.registry import Patch
from megasched.transformers_names import PACKED
from megasched.versions import TESTED


def _change() -> Undo:
    def find_packed_sequence_indices(position_ids: Any) -> None:
        """Returns None: each row holds one sequence. A schedule refuses packed ones."""

    return set_attribute(PACKED, find_packed_sequence_indices)


PATCH = Patch(
    name="zigzag_positions",
    targets=(PACKED,),
    versions={"transformers": TESTED["transformers"]},
    why=(
        "transformers/masking_utils.py:750 takes positions that do not count up by one for several sequences "
        "packed into a row, and masks them from each other; a context parallel rank has two pieces of one "
        "sequence (megatron/core/utils.py, get_batch_on_this_cp_rank), with a jump between them"
    ),
    change=_change,
    signature={PACKED: ("position_ids",)},
)
