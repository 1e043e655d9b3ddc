"""Defines where the hidden state stands in a layer's arguments and output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class HiddenStateArg:
    """Says where the hidden state stands in a layer's call and in its output.

    Attributes:
        argument: position (int) or name (str) of the hidden state among the layer's arguments.
        output: its index in the returned tuple or list; None when the layer returns the tensor itself.
        others: the other items of the returned tuple or list, with None in place of tensors.
        kind: class of the returned tuple or list, also a named tuple's.
    """

    argument: int | str
    output: int | None
    others: tuple[Any, ...] = ()
    kind: type[tuple[Any, ...]] | type[list[Any]] = tuple

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Returns the hidden state among a layer's arguments."""
        if isinstance(self.argument, int) and self.argument < len(args):
            return args[self.argument]
        return kwargs[self.argument] if isinstance(self.argument, str) else kwargs["hidden_states"]

    def put(
        self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a layer's arguments with another hidden state."""
        if isinstance(self.argument, int) and self.argument < len(args):
            return (*args[: self.argument], hidden, *args[self.argument + 1 :]), kwargs
        name = self.argument if isinstance(self.argument, str) else "hidden_states"
        return args, {**kwargs, name: hidden}

    def result(self, output: Any) -> torch.Tensor:
        """Returns the hidden state in a layer's output."""
        return output if self.output is None else output[self.output]

    def wrap(self, hidden: torch.Tensor) -> Any:
        """Returns a hidden state in the structure that the layer returns."""
        if self.output is None:
            return hidden
        found = list(self.others)
        found[self.output] = hidden
        return _made(self.kind, found)

    def rewrap(self, output: Any, hidden: torch.Tensor) -> Any:
        """Returns a layer's output with another hidden state."""
        if self.output is None:
            return hidden
        kept = list(output)
        kept[self.output] = hidden
        return _made(type(output), kept)


def _made(kind: type, items: list[Any]) -> Any:
    return kind._make(items) if hasattr(kind, "_make") else kind(items)
