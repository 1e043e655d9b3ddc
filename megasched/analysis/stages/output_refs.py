"""Defines the places of tensors that go from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

BEFORE = -1  # where modules run that the model calls before its layers


@dataclass(frozen=True)
class OutputRef:
    """Says where a tensor stands once a module has run.

    Attributes:
        path: the module; "" for the model's own input.
        index: in the returned tuple or list, or in the entry; None for the returned tensor (the entry) itself.
        argument, key: for a tensor that the module wrote into a mapping it was handed: position (int) or name
            (str) of that argument, and the entry's key.
    """

    path: str
    index: int | None = None
    argument: int | str | None = None
    key: Any = None

    def tensor(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
        """Returns the tensor, after the module ran with these arguments and returned ``output``."""
        value = output if self.argument is None else self._mapping(args, kwargs)[self.key]
        return value if self.index is None else value[self.index]

    def put(self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Returns the module's output with the tensor in it; writes into the mapping instead if that has it."""
        if self.argument is None:
            return self._in(output, tensor)
        mapping = self._mapping(args, kwargs)
        mapping[self.key] = self._in(mapping.get(self.key, ()), tensor)
        return output

    def _mapping(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MutableMapping[Any, Any]:
        return args[self.argument] if isinstance(self.argument, int) else kwargs[str(self.argument)]

    def _in(self, value: Any, tensor: torch.Tensor) -> Any:
        if self.index is None:
            return tensor
        found = [*value, *[None] * (self.index + 1 - len(value))]
        found[self.index] = tensor
        return found if isinstance(value, list) else tuple(found)


@dataclass
class TensorUse:
    """Holds a tensor with its places, and the layers that made and read it in one run."""

    tensor: torch.Tensor
    made: int
    read: int = BEFORE
    places: list[OutputRef] = field(default_factory=list)


@dataclass(frozen=True)
class StageInput:
    """Describes a tensor that is read past the layer after the one that made it.

    Attributes:
        made: the layer that made it, or the one before which a module outside of the layers did; ``BEFORE`` for
            modules before all layers.
        read: the last layer that reads it; the number of layers for code after them.
        places: where it stands, first in the output of the module that made it, then in layers that hand it on.
    """

    made: int
    read: int
    places: tuple[OutputRef, ...] = ()

    def crosses(self, boundary: int) -> bool:
        """Returns whether a cut before the layer ``boundary`` has it made on one side and read on the other."""
        return self.made < boundary <= self.read
