"""Holds what the entry scripts beside pretrain_gpt.py share; each gives its objective and its data sets.

A sample is a dict of tensors: the arguments of the Hugging Face forward by their names, ``labels`` (none of them
negative) and ``loss_mask`` (int64, 1 where a label counts), which have one shape.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import broadcast_data
from megatron.training import get_args, get_timers, inprocess_restart, pretrain, print_rank_0
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

from megasched.definition.objectives import Objective
from megasched.launch.pretrain_gpt import LossReport, get_embedding_ranks, loss_func, straggler

Batch = dict[str, torch.Tensor]
# Of Megatron's arguments and the samples wanted of each: training, validation and test set, or None.
Provider = Callable[[Namespace, list[int]], tuple[Any, Any, Any]]

TARGETS = {"labels": "int64", "loss_mask": "int64"}


def holds_data() -> bool:
    """Returns whether this rank reads samples: TP rank 0 of every stage does, as every stage needs the masks."""
    return mpu.get_tensor_model_parallel_rank() == 0


class Mock(torch.utils.data.Dataset):
    """Draws samples for ``--mock-data``, each from a seed of its own."""

    def __init__(self, draw: Callable[[torch.Generator], Batch], samples: int, seed: int) -> None:
        self.draw, self.samples, self.seed = draw, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        return self.draw(torch.Generator().manual_seed(self.seed + index))


def mock_sets(draw: Callable[[torch.Generator], Batch], num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Returns three data sets that draw different samples; None where no samples are wanted."""
    seeds = np.cumsum([0, *(n or 0 for n in num_samples)]).tolist()
    train, valid, test = (Mock(draw, n, seed) if n else None for n, seed in zip(num_samples, seeds, strict=False))
    return train, valid, test


def tell_splits(sets: tuple[Any, Any, Any]) -> None:
    """Tells data sets that are none of Megatron's which of its splits they are.

    Its loader goes by that for ``--eval-micro-batch-size`` and ``--full-validation``
    (``training/datasets/data_samplers.py:27``).
    """
    for split, found in zip(Split, sets, strict=True):
        if isinstance(found, torch.utils.data.Dataset) and not {"split", "index_split"} & set(dir(found)):
            found.split = split  # type: ignore[attr-defined]


def masked_data(args: Namespace) -> dict[str, Any]:
    """Returns the arguments that the configurations of Megatron's masked data sets share, from its flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "masking_probability": args.mask_prob,
        "short_sequence_probability": args.short_seq_prob,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }


def get_batch(data_iterator: Iterator[Batch] | None, objective: Objective) -> Batch:
    """Returns one micro-batch, read on TP rank 0 and broadcast over TP.

    Args:
        data_iterator: yields samples; None where ``holds_data`` is False.
    """
    sample = next(data_iterator) if data_iterator is not None else None
    fields = {**objective.inputs, **TARGETS}
    batch: Batch = {}
    for dtype in sorted(set(fields.values())):
        names = [name for name, kind in fields.items() if kind == dtype]
        batch |= broadcast_data(names, sample, getattr(torch, dtype))
    return batch


def forward_step(
    data_iterator: Iterator[Batch] | None, model: torch.nn.Module, *, objective: Objective
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReport]]:
    """Runs one model chunk on one micro-batch; returns the output, to be sent on, and a function for the loss."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    with straggler(bdata=True):
        batch = get_batch(data_iterator, objective)
    timer.stop()
    with straggler:
        output_tensor = model(**{name: batch[name] for name in (*objective.inputs, *TARGETS)})
    return output_tensor, partial(loss_func, batch["loss_mask"])


def missing_flags(argv: list[str], **defaults: str) -> list[str]:
    """Returns flags with the defaults that the user did not override.

    They go onto the command line: Megatron also parses it where no script can give a default (in-process restart),
    and there it settles all that it must know of the model.
    """
    given = {word.partition("=")[0] for word in argv}
    wanted = {f"--{name.replace('_', '-')}": value for name, value in defaults.items()}
    return [word for flag, value in wanted.items() if flag not in given for word in (flag, value)]


def train(objective: Objective, provider: Provider, **defaults: str) -> None:
    """Parses Megatron's flags and hands everything to its trainer.

    Args:
        defaults: defaults of Megatron's arguments that the user does not give.
    """

    def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        print_rank_0("> building train, validation and test datasets ...")
        found = provider(get_args(), num_samples)  # on every rank: Megatron's builder waits for them all
        tell_splits(found)
        return found if holds_data() else (None, None, None)

    # Every rank calls it, once per model chunk; who reads is decided there.
    datasets.is_distributed = True  # type: ignore[attr-defined]
    sys.argv += missing_flags(sys.argv[1:], objective=objective.name, **defaults)
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args()
    run(
        pretrain_cfg_container_from_args(args, hybrid_config_from_args(args)),
        datasets,
        ModelType.encoder_or_decoder,
        partial(forward_step, objective=objective),
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
