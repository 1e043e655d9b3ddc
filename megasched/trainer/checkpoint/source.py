"""Decides where the weights of a run come from, and adds the model's HF files to its checkpoints."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megasched.errors import ConfigError
from megasched.language.schedule import Schedule
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan
from megasched.reading.tracker import has_tracker
from megasched.trainer.stages.stage import Stage
from megasched.weights.hf.files import write_hf_files
from megasched.weights.hf.folder import HFFolder
from megasched.weights.hf.hub import known_folder, local_folder
from megasched.weights.hf.safetensors_files import has_weights
from megasched.weights.lora import CONFIG, adapter_config
from megasched.weights.progress import transfer
from megasched.weights.random_init import RandomInit
from megasched.weights.source import WeightSource
from megasched.weights.torch_dist.reader import HF_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def loaded_folder(args: Namespace, load_arg: str = "load") -> tuple[Path, bool] | None:
    """Returns the ``--save`` folder that Megatron loads from, and whether a run begins anew from it; or None.

    ``--pretrained-checkpoint`` is for a run that has no checkpoint of its own yet: Megatron then takes the weights
    and begins at iteration 0 (``training/checkpointing.py:2096``).

    Args:
        load_arg: name of the argument that holds the folder to load from.
    """
    own, pretrained = getattr(args, load_arg), args.pretrained_checkpoint
    for folder, anew in ((own, bool(args.finetune)), (pretrained, True)):
        if folder is not None and "://" not in str(folder) and has_tracker(folder):
            return Path(folder), anew
    return None


def weight_source(args: Namespace, definition: PreTrainedModel) -> WeightSource:
    """Returns the source of the run's weights: its checkpoint, the HF folder, or an initialisation on request.

    Raises:
        ConfigError: the folder has no weights and ``--hf-random-init`` was not given.
    """
    if loaded_folder(args) is not None:
        return CheckpointPlaceholder()
    if args.hf_random_init:
        return RandomInit(definition, args.seed)
    folder = local_folder(args.hf_model)
    if not has_weights(folder):
        raise ConfigError(
            f"--hf-model {args.hf_model}: no safetensors weights there; pass --hf-random-init to initialise "
            "them as the HF class would"
        )
    return HFFolder(folder, definition)


class CheckpointPlaceholder:
    """Stands in for the weights that Megatron loads from a checkpoint, so that nothing is read or drawn twice.

    The values are NaN, so that one which was not loaded after all can't go unseen.
    """

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """See ``WeightSource.local``; float32."""
        return torch.full(placement.local_shape(size), float("nan"))

    def buffer(self, name: str) -> None:
        """Returns None, as the checkpoint has the buffer."""
        return None

    def check(self, names: Collection[str]) -> None:
        """Checks nothing, as names are checked when the checkpoint is loaded."""


@contextmanager
def with_progress(source: WeightSource, plan: Plan, stage: Stage, dtype: torch.dtype) -> Iterator[WeightSource]:
    """Runs its body with the source of a run's weights, while rank 0 shows how much its stage has taken.

    Progress counts bytes of its shards in the run's precision.
    """
    if torch.distributed.get_rank() != 0 or isinstance(source, CheckpointPlaceholder):
        yield source
        return
    held = {
        canonical for name, canonical in plan.canonical.items() if stage.holds(plan.stack, name.rpartition(".")[0])
    }
    count = sum(math.prod(plan.local_shape(plan.placements[name])) for name in held)
    with transfer("weights of rank 0", count * dtype.itemsize) as advance:
        yield _WithProgress(source, lambda values: advance(values.numel() * dtype.itemsize))


class _WithProgress:
    """Wraps a weight source and reports the values that are taken from it."""

    def __init__(self, source: WeightSource, tell: Callable[[torch.Tensor], Any]) -> None:
        self._source, self._tell = source, tell

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """See ``WeightSource.local``."""
        values = self._source.local(placement, rank, size)
        self._tell(values)
        return values

    def buffer(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource.buffer``."""
        return self._source.buffer(name)

    def check(self, names: Collection[str]) -> None:
        """See ``WeightSource.check``."""
        self._source.check(names)


def keep_hf_files(checkpoint: Path, definition: PreTrainedModel, hf_model: Path, schedule: Schedule) -> None:
    """Writes the model's config and tokenizer, and PEFT's config of any adapters, into a checkpoint.

    ``megasched export`` needs nothing else.
    """
    folder = checkpoint / HF_FILES
    folder.mkdir(exist_ok=True)
    write_hf_files(folder, definition.config, known_folder(hf_model))
    adapters = adapter_config(schedule, str(hf_model))
    if adapters is not None:
        (folder / CONFIG).write_text(json.dumps(adapters, indent=2))
