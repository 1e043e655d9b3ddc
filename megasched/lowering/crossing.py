"""Whether anything but the hidden state goes from layer to layer: a pipeline's wire carries nothing else."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megasched.lowering.meta_call import DefaultScalars, tensors_in


class UsesRun(DefaultScalars):
    """A run that remembers which operation made each tensor that parameters went into, and which read it.

    Attributes:
        count: operations so far.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.count = 0
        self._parameters = {id(parameter) for parameter in parameters}
        self._made: dict[int, int] = {}
        self._read: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self.count += 1
        operands = {id(tensor) for tensor in tensors_in((args, kwargs))}
        made = operands & self._made.keys()
        self._read += [(self.count, tensor) for tensor in made]
        if made or operands & self._parameters:
            for tensor in tensors_in(output):  # indices that are chosen by what was computed, too
                self._made.setdefault(id(tensor), self.count)
                self._kept.append(tensor)  # keeps the id from being given to another tensor
        return output

    def crosses(self, layers: Sequence[tuple[int, int]], hidden: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor was read past the layer after the one that made it, the hidden state left out.

        Args:
            layers: operations done when each layer began, and when it ended.
            hidden: what each layer returned as the hidden state.
        """
        bounds = [bound for layer in layers for bound in layer]
        states = {id(tensor): 2 * index + 1 for index, tensor in enumerate(hidden)}
        for operation, tensor in self._read:
            made, read = (bisect_left(bounds, number) for number in (self._made[tensor], operation))
            made = states.get(tensor, made)
            # Odd places are layers, even ones what lies before, between and after them.
            reach = made + 2 if tensor in states else made + 1 - made % 2
            if not made <= read <= reach:
                return True
        return False
