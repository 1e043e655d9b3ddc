"""Turns the roles that were found in a definition into an adapter."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from megasched.analysis.find_layer_stack import layer_stack_of
from megasched.analysis.roles.infer import infer_roles
from megasched.language.roles import Roles, counts_by
from megasched.model_adapters.generic import read_plan
from megasched.verify.new_adapter.globs import fold_paths
from megasched.verify.new_adapter.naming import name_roles, parts_of


@dataclass(frozen=True)
class Proposal:
    """Represents an adapter as data that can be written down.

    Attributes:
        model_type: model type that it is for.
        roles: glob -> role.
        packed: role -> sizes of its parts in this very config; the author writes them as fields of the config.
        local_attributes: glob -> attributes.
        left_out: path of a linear that was found and is not in it -> why.
    """

    model_type: str
    roles: dict[str, str]
    packed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    local_attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def found_roles(model: nn.Module) -> Roles:
    """Returns the roles in a definition without an adapter: those of HF's plan, and those inferred at TP 2."""
    return infer_roles(model, read_plan(model), layer_stack_of(model), tp=2)


def propose(model: nn.Module, roles: Roles) -> Proposal:
    """Makes an adapter from the roles that were found.

    Args:
        model: the definition.
        roles: the result of ``found_roles`` for it.
    """
    named = name_roles(model, roles)
    packed, left_out = {}, {}
    for role in dict.fromkeys(named.values()):
        parts = {path: parts_of(path, roles.components) for path, name in named.items() if name == role}
        if not any(parts.values()):
            continue
        if role == "column":
            reason = "and no role stands for so many"
        elif len(set(parts.values())) > 1:
            reason = "which are not those of every layer; packed holds for all modules in a role"
        else:
            packed[role] = next(iter(parts.values()))
            continue
        left_out |= {path: f"its output has parts of {part}, {reason}" for path, part in parts.items()}
    paths = [path for path, _ in model.named_modules()]
    in_order = {path: named[path] for path in paths if path in named and path not in left_out}
    names = {name for of_one in roles.local_attributes.values() for name in of_one}
    counting = [path for path in paths if counts_by(model.get_submodule(path), names)]
    local = fold_paths(dict(roles.local_attributes), counting)
    return Proposal(model.config.model_type, fold_paths(in_order, paths), packed, local, left_out)
