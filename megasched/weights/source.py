"""Defines the interface of sources of weights, their names, and how a definition is filled from one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megasched.errors import CheckpointError, some_of
from megasched.plan.placement import Placement

if TYPE_CHECKING:
    import torch
    from torch import nn


class WeightSource(Protocol):
    """Provides the values of a definition's parameters, one parameter at a time."""

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """Returns the part of the HF parameter ``placement.name`` that TP rank ``rank`` of ``size`` holds.

        Returns:
            CPU tensor in the source's dtype, shape ``placement.local_shape(size)``, contiguous, with
            memory of its own.

        Raises:
            CheckpointError: the source has no such parameter, or has it in another shape.
        """

    def buffer(self, name: str) -> torch.Tensor | None:
        """Returns the whole value of a persistent buffer (e.g. a trained router bias); None keeps the class's.

        Raises:
            CheckpointError: the source has it in another shape.
        """

    def check(self, names: Collection[str]) -> None:
        """Compares the source with the definition's canonical parameter names (the first ones of tied parameters).

        Raises:
            CheckpointError: lists every missing and every unexpected name.
        """


def canonical_names(definition: torch.nn.Module) -> dict[str, str]:
    """Maps every parameter name of the definition to the first name of the same (tied) parameter.

    The values are the canonical names, in the order of ``named_parameters()``; an untied parameter maps to itself.
    """
    first: dict[int, str] = {}
    every = definition.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(param), name) for name, param in every}


def compare_names(holder: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raises CheckpointError with every missing and every unexpected name, if there is any.

    Args:
        holder: what lacks or has them, for the message, e.g. ``weights in /models/llama``.
        missing: names that the definition has and the holder lacks.
        unexpected: names that the holder has and the definition lacks.
    """
    if not missing and not unexpected:
        return
    lines = [f"{holder} do not fit the definition"]
    for title, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            lines += [f"  {title} ({len(names)}):", *(f"    {name}" for name in sorted(names))]
    lines.append("  remedy: the config and the weights must be of the same model, under the definition's names")
    raise CheckpointError("\n".join(lines))


def of_passed_over(architecture: str, names: Sequence[str]) -> str:
    """Returns a line that names stored tensors that are not loaded.

    Args:
        architecture: the class that does not load them.
        names: at least one.
    """
    return (
        f"not taken, as {architecture} does not take them: {some_of(names)}; no "
        "checkpoint of a run has them, and no export"
    )


def padded_lengths(length: int, args: Any) -> set[int]:
    """Returns the possible lengths of an embedding or head over a vocabulary in a checkpoint.

    Args:
        length: of the vocabulary.
        args: Megatron's, of the run that wrote the checkpoint; None for imported weights.
    """
    divisor, tp = (
        getattr(args, name, None) for name in ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
    )
    multiple = divisor * tp if divisor and tp else 1
    return {length, -(-length // multiple) * multiple}


@dataclass(frozen=True)
class Shards:
    """Says what of a model a rank holds.

    Attributes:
        placements: of the model's parameters by name.
        names: canonical names of the definition's parameters; a pipeline stage holds some of them.
        ranks: name of a group, of placements -> (rank, size) in it.
        renamed: buffer of the model -> its name in the definition, if that is another.
    """

    placements: Mapping[str, Placement]
    names: Collection[str]
    ranks: Mapping[str, tuple[int, int]]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def read(self, source: WeightSource, placement: Placement) -> torch.Tensor:
        """Returns what the rank holds of a parameter."""
        return source.local(placement, *self.ranks[placement.group])


def materialize(
    definition: nn.Module,
    source: WeightSource,
    dtype: torch.dtype | None = None,
    shards: Shards | None = None,
) -> nn.Module:
    """Gives every parameter of the definition a real CPU tensor from the source, in place.

    Tied parameters stay one parameter, ``requires_grad`` and attributes of parameters are kept, and persistent
    buffers that the source has are filled.

    Args:
        definition: unscheduled, e.g. from ``build_definition``.
        source: source of the values.
        dtype: of the parameters; float32 by default. Buffers keep theirs.
        shards: what a rank holds of a model that was cut; by default all of it.

    Returns:
        The definition itself.

    Raises:
        CheckpointError: the source does not fit the definition, or a buffer of that is on the meta device.
    """
    import torch

    computed = [name for name, buffer in definition.named_buffers() if buffer.is_meta]
    if computed:
        what = f"nothing computes buffers that are on the meta device: {some_of(computed)}"
        raise CheckpointError(f"{what}; leave include_buffers out of init_empty_weights")
    canonical = canonical_names(definition)
    source.check(set(canonical.values()) if shards is None else shards.names)
    filled: dict[str, torch.nn.Parameter] = {}
    for first in dict.fromkeys(canonical.values()):
        empty = definition.get_parameter(first)
        if shards is None:
            value = source.local(Placement(first, tuple(empty.shape)), 0, 1)
        else:
            value = shards.read(source, shards.placements[first]).contiguous()
        filled[first] = torch.nn.Parameter(value.to(dtype or torch.float32), requires_grad=empty.requires_grad)
        filled[first].__dict__.update(empty.__dict__)
    persistent, renamed = definition.state_dict(), {} if shards is None else shards.renamed
    buffers = [renamed.get(name, name) for name, _ in definition.named_buffers() if name in persistent]
    fill_buffers(definition, source, buffers, renamed)
    for name, first in canonical.items():  # once all values are there: after an error the model is as it was
        path, _, leaf = name.rpartition(".")
        definition.get_submodule(path)._parameters[leaf] = filled[first]
    return definition


def fill_buffers(
    definition: nn.Module,
    source: WeightSource,
    names: Iterable[str],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Fills buffers with the source's values; buffers that it lacks keep the class's values.

    Args:
        names: of persistent buffers in HF's definition.
        renamed: name in the lowered definition -> name in HF's, if it differs.

    Raises:
        CheckpointError: the class computed a buffer from weights, which had no values, and the source has none.
    """
    values = {name: value for name in names if (value := source.buffer(name)) is not None}
    for path, module in definition.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            value = values.get(renamed.get(full, full))
            if buffer is None or (value is None and not buffer.is_meta):
                continue
            if value is None:
                raise CheckpointError(
                    f"{renamed.get(full, full)} is a buffer that the class makes of its weights, and none of the "
                    "weights to start from has it: start from weights that do, without --hf-random-init"
                )
            module._buffers[name] = value.to(buffer.dtype) if buffer.is_meta else buffer.copy_(value)
