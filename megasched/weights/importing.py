"""Imports an HF folder as a Megatron checkpoint, in one CPU process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megasched.definition.build import build_definition, kept_in_float32, load_config
from megasched.definition.objectives import find_objective
from megasched.errors import CheckpointError, ConfigError, some_of
from megasched.files import check_room, whole_folder, write_whole
from megasched.reading.tracker import RELEASE, TRACKER
from megasched.weights.exporting import Progress
from megasched.weights.hf.files import write_hf_files
from megasched.weights.hf.folder import HFFolder
from megasched.weights.hf.hub import local_folder
from megasched.weights.lazy import Computed, LazyTensor
from megasched.weights.source import canonical_names, of_passed_over
from megasched.weights.torch_dist.reader import HF_FILES
from megasched.weights.torch_dist.writer import TorchDistWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Imported:
    """Describes the checkpoint that was written.

    Attributes:
        checkpoint: for ``--load``.
        tensors, bytes: of the weights.
        passed_over: stored names that the class does not load.
    """

    hf_model: Path
    checkpoint: Path
    architecture: str
    tensors: int
    bytes: int
    passed_over: tuple[str, ...] = ()

    @property
    def left_aside(self) -> str:
        """Returns a line that names the tensors that the class does not load; empty if it loads all."""
        return of_passed_over(self.architecture, self.passed_over) if self.passed_over else ""


def import_weights(
    hf_model: str | Path,
    save: str | Path,
    *,
    progress: Progress,
    dtype: torch.dtype | None = None,
    objective: str | None = None,
    trust_remote_code: bool = False,
) -> Imported:
    """Writes a ``release`` checkpoint, whose weights Megatron loads to begin at iteration 0.

    Args:
        hf_model: folder with config and safetensors.
        save: folder for ``--load`` of a run.
        dtype: of the parameters; that of the files by default. Buffers keep theirs, and parameters that
            transformers keeps in float32 beside weights of this dtype are written so.
        objective: training task of the model.

    Raises:
        CheckpointError: the folder is damaged or does not fit its config.
        ConfigError: ``save`` has a checkpoint already, or can't be written.
    """
    save = Path(save)
    if (save / TRACKER).exists():
        raise ConfigError(f"{save}: it has checkpoints already ({TRACKER}); name another folder")
    config = load_config(hf_model, trust_remote_code=trust_remote_code)
    definition = build_definition(config, find_objective(objective), trust_remote_code=trust_remote_code)
    hf_folder = local_folder(hf_model)
    source = HFFolder(hf_folder, definition)
    tensors = _fitting(source, definition, hf_model)
    written = _written_dtypes(tensors, definition, dtype)
    size = sum(prod(tensor.shape) * written[name].itemsize for name, tensor in tensors.items())
    with whole_folder(save / RELEASE) as folder:
        check_room(folder, size)
        (folder / HF_FILES).mkdir()
        write_hf_files(folder / HF_FILES, config, hf_folder)
        with progress(size) as advance:
            writer = TorchDistWriter(folder, advance)
            for name, tensor in tensors.items():
                writer.add(name, tensor, written[name])
            writer.finish({"checkpoint_version": 3.0, "iteration": 0})
    write_whole(save / TRACKER, [RELEASE])
    name = type(definition).__name__
    return Imported(Path(hf_model), save, name, len(tensors), size, tuple(source.passed_over))


def _fitting(source: HFFolder, definition: PreTrainedModel, hf_model: str | Path) -> dict[str, LazyTensor]:
    """Returns the parameters and persistent buffers of a definition, in the order of its state.

    A buffer that the folder lacks has the class's value, as in a run: a checkpoint that lacks it can't be loaded.

    Raises:
        CheckpointError: names or shapes do not fit; lists them all. Or the class makes a buffer that the folder
            lacks of its weights.
    """
    canonical = canonical_names(definition)
    source.check(set(canonical.values()))
    state, held = definition.state_dict(), {*canonical.values(), *source.buffers}
    own = {name: value for name, value in state.items() if name not in held and name not in canonical}
    if made := [name for name, value in own.items() if value.is_meta]:
        raise CheckpointError(f"{hf_model} has no {some_of(made)}: a buffer that the class makes of its weights")
    tensors = {
        name: source.tensor(name) if name in held else Computed((), partial(own.get, name), (*value.shape,))
        for name, value in state.items()
        if name in held or name in own
    }
    wrong = [
        f"    {tensor.where} has shape {list(tensor.shape)}, the definition has {list(state[name].shape)}"
        for name, tensor in tensors.items()
        if tensor.shape != tuple(state[name].shape)
    ]
    if wrong:
        raise CheckpointError("\n".join([f"the weights in {hf_model} do not fit the definition:", *wrong]))
    return tensors


def _written_dtypes(
    tensors: Mapping[str, LazyTensor], definition: PreTrainedModel, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Returns the written dtype of each tensor: the requested one for parameters, its own for all others."""
    parameters = set(canonical_names(definition).values())
    float32 = kept_in_float32(definition, dtype, parameters) if dtype else ()
    return {
        name: (torch.float32 if name in float32 else dtype)
        if dtype and name in parameters and tensor.dtype.is_floating_point
        else tensor.dtype
        for name, tensor in tensors.items()
    }
