"""Finds lists of modules or parameters of one kind, among which a definition's code may choose by values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def counterparts(model: nn.Module, name: str) -> Iterator[tuple[str, str]]:
    """Yields the parameters in other members of a list or dict that correspond to this one.

    Each comes as (path of the list or dict, name of the other parameter). Both members are of one kind, and the
    parameter stands at the same place in its member.

    Args:
        name: name of the parameter.
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
    """Returns a value that is equal for members of a list that are of one kind."""
    if isinstance(held, torch.Tensor):
        return held.shape
    return type(held), [(name, parameter.shape) for name, parameter in held.named_parameters()]
