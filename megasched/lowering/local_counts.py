"""Divides attributes by which a definition counts heads or features among the TP ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from megasched.language.roles import Roles, owner_of
from megasched.layers.build_context import BuildContext
from megasched.plan.record_checks import local_value, sharded_attention


def divide_local_attributes(
    roles: Roles, model: nn.Module, context: BuildContext, here: Callable[[str], bool]
) -> None:
    """Divides the attributes that the adapter names by TP, where the module's heads are sharded.

    ``config.x`` divides a field of the module's config, on a copy of its own.
    """
    if context.size == 1:
        return
    modules = dict(model.named_modules())
    sharded = sharded_attention(context.plan)
    for path, names in roles.local_attributes.items():
        if path not in modules or not here(path) or not sharded(path):
            continue
        if any(name.startswith("config.") for name in names):
            modules[path].config = copy.copy(modules[path].config)
        for name in names:
            owner, field = owner_of(modules[path], name)
            if hasattr(owner, field):
                setattr(owner, field, local_value(context.plan, path, getattr(owner, field)))
