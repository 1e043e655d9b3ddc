"""Attributes by which a definition counts heads or features: each TP rank has its part of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.lowering.context import Context
from megasched.roles import Roles


def divide_local_attributes(roles: Roles, model: nn.Module, context: Context, here: Callable[[str], bool]) -> None:
    """Divides the attributes that the adapter names by TP, where the module's heads are sharded.

    ``config.x`` divides a field of the module's config, on a copy of its own.
    """
    if context.size == 1:
        return
    for path, names in roles.local_attributes.items():
        sharded = context.plan.derived.attention.get(path, (0, True))[1]
        if not here(path) or not sharded:
            continue
        module = model.get_submodule(path)
        if any(name.startswith("config.") for name in names):
            module.config = copy.copy(module.config)
        for name in names:
            owner: Any = module.config if name.startswith("config.") else module
            field = name.rpartition(".")[2]
            whole = getattr(owner, field)
            if whole % context.size:
                what = f"TP {context.size} does not divide {name} = {whole}"
                raise ScheduleError(Problem(what, path))
            setattr(owner, field, whole // context.size)
