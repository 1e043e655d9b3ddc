"""Where tensors stand that go from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

BEFORE = -1  # where modules run that the model calls before its layers


@dataclass(frozen=True)
class OutputRef:
    """Where a tensor stands once a module has run.

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
        """The tensor, after the module ran with these arguments and returned ``output``."""
        value = output if self.argument is None else self._mapping(args, kwargs)[self.key]
        return value if self.index is None else value[self.index]

    def put(self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """What the module returns with the tensor in its place, or ``output`` where it is in a mapping."""
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
    """A tensor with a place, as one run saw it."""

    tensor: torch.Tensor
    made: int
    read: int = BEFORE
    places: list[OutputRef] = field(default_factory=list)


@dataclass(frozen=True)
class StageInput:
    """A tensor that is read past the layer after the one that made it.

    Attributes:
        made: the layer that made it, or the one before which a module outside of the layers did; ``BEFORE``.
        read: the last layer that reads it; the number of layers for what comes after them.
        places: where it stands, the module that made it first. A layer that hands it on has a place, too.
    """

    made: int
    read: int
    places: tuple[OutputRef, ...] = ()

    def crosses(self, boundary: int) -> bool:
        """Whether a cut before the layer ``boundary`` has it made on one side and read on the other."""
        return self.made < boundary <= self.read
