"""Lists of modules (or parameters) of one kind, among which the code of a definition may choose by values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def counterparts(model: nn.Module, name: str) -> Iterator[tuple[str, str]]:
    """(path of a list or dict, name of another parameter) of each that stands in another member of it as this one
    does in its own, where both members are of one kind.

    Args:
        name: of a parameter.
    """
    parts = name.split(".")
    for count in range(len(parts)):
        path, key, rest = ".".join(parts[:count]), parts[count], parts[count + 1 :]
        members = model.get_submodule(path)
        if not isinstance(members, CONTAINERS):
            continue
        held: dict[str, Any] = {**members._modules, **members._parameters}
        form = _form(held[key])
        for other, member in held.items():
            if other != key and _form(member) == form:
                yield path, ".".join([*parts[:count], other, *rest])


def _form(held: nn.Module | torch.Tensor) -> Any:
    """Equal for members of a list that are of one kind."""
    if isinstance(held, torch.Tensor):
        return held.shape
    return type(held), [(name, parameter.shape) for name, parameter in held.named_parameters()]
