"""Checks a data set before it is opened: its index, and whether its ids are in the model's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megasched.attributes import Undo, wrap_attribute
from megasched.patches.registry import Patch
from megasched.trainer.current_session import get_session, has_session

_TARGET = "megatron.core.datasets.indexed_dataset:IndexedDataset.initialize"


def _change() -> Undo:
    checked: set[str] = set()

    def initialize_checked(
        initialize: Callable[..., None], self: Any, path_prefix: str, *given: Any, **named: Any
    ) -> None:
        if path_prefix not in checked and "://" not in path_prefix and has_session():
            _check(path_prefix)
            checked.add(path_prefix)
        initialize(self, path_prefix, *given, **named)

    return wrap_attribute(_TARGET, initialize_checked)


def _check(prefix: str) -> None:
    import torch
    from megatron.training.global_vars import get_args

    from megasched.trainer.token_ids import check_data, vocabulary_of

    # Each rank looks at what it is going to map; all of the tokens need be read by one alone.
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    vocabulary = vocabulary_of(get_session().definition.config) if first else None
    check_data(prefix, vocabulary, get_args().data_cache_path)


PATCH = Patch(
    name="data_check",
    targets=(_TARGET,),
    why=(
        "megatron/core/datasets/indexed_dataset.py:271 takes the counts in an index at their word; nothing "
        "compares the ids of the data with the vocabulary, and an embedding that is cut over TP "
        "(core/tensor_parallel/layers.py) gives zeros for an id that no rank has"
    ),
    change=_change,
    signature={_TARGET: ("self", "path_prefix")},
)
