"""Where the hidden state stands in a layer's call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class HiddenStateArg:
    """Where the hidden state stands in a layer's call and in what it returns.

    Attributes:
        argument: position (int) or name (str) of the hidden state among the layer's arguments.
        output: its index in the returned tuple or list; None when the layer returns the tensor itself.
        others: what else the layer returns beside the hidden state, tensors left out (None in their place).
        kind: of what it returns, where that is no tensor; also a named tuple's class.
    """

    argument: int | str
    output: int | None
    others: tuple[Any, ...] = ()
    kind: type[tuple[Any, ...]] | type[list[Any]] = tuple

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The hidden state among a layer's arguments."""
        if isinstance(self.argument, int) and self.argument < len(args):
            return args[self.argument]
        return kwargs[self.argument] if isinstance(self.argument, str) else kwargs["hidden_states"]

    def put(
        self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with another hidden state."""
        if isinstance(self.argument, int) and self.argument < len(args):
            return (*args[: self.argument], hidden, *args[self.argument + 1 :]), kwargs
        name = self.argument if isinstance(self.argument, str) else "hidden_states"
        return args, {**kwargs, name: hidden}

    def result(self, output: Any) -> torch.Tensor:
        """The hidden state in what a layer returned."""
        return output if self.output is None else output[self.output]

    def wrap(self, hidden: torch.Tensor) -> Any:
        """A hidden state in the structure that the layer returns."""
        if self.output is None:
            return hidden
        found = list(self.others)
        found[self.output] = hidden
        return _made(self.kind, found)

    def rewrap(self, output: Any, hidden: torch.Tensor) -> Any:
        """What a layer returned, with another hidden state."""
        if self.output is None:
            return hidden
        kept = list(output)
        kept[self.output] = hidden
        return _made(type(output), kept)


def _made(kind: type, items: list[Any]) -> Any:
    return kind._make(items) if hasattr(kind, "_make") else kind(items)
