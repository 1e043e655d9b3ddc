"""Puts the mean of its distribution in the place of each random number, so that runs at any layout draw alike.

It is used alike in a rank and in the plain model, and imports torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What a report says of it.
NOTE = "what code draws at random while it trains is the mean of its distribution on both sides"

# Operation -> the mean of what it draws, from its arguments by the names of its schema.
_MEANS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "aten::rand": lambda told: 0.5,
    "aten::rand_like": lambda told: 0.5,
    "aten::randn": lambda told: 0.0,
    "aten::randn_like": lambda told: 0.0,
    "aten::bernoulli": lambda told: told.get("p", told["self"]),
    "aten::bernoulli_": lambda told: told["p"],
    "aten::uniform_": lambda told: (told["from"] + told["to"]) / 2,
    "aten::normal_": lambda told: told["mean"],
    "aten::exponential_": lambda told: 1 / told["lambd"],
}


class MeanDraws(TorchDispatchMode):
    """Draws the mean each time, where it is known: of uniform, normal, exponential and Bernoulli's distributions.

    A dropout then leaves what it is given as it is.

    Attributes:
        drawn: whether anything was drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        schema = func._schema
        told = {argument.name: argument.default_value for argument in schema.arguments}
        told |= dict(zip(told, args, strict=False)) | kwargs
        if schema.name == "aten::native_dropout" and told["train"] is not False:
            self.drawn = True
            return told["input"].clone(), torch.ones_like(told["input"], dtype=torch.bool)
        if schema.name not in _MEANS:
            return func(*args, **kwargs)
        self.drawn = True
        mean, output = _MEANS[schema.name](told), func(*args, **kwargs)
        return output.copy_(mean) if isinstance(mean, torch.Tensor) else output.fill_(mean)
