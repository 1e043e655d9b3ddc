"""What was found out about a definition, written as an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megasched.analysis.infer import infer_roles
from megasched.analysis.structure import layer_stack_of
from megasched.language.roles import Roles
from megasched.model_adapters.generic import read_plan
from megasched.verify.new_adapter.globs import fold_paths, pattern_of
from megasched.verify.new_adapter.naming import name_roles, parts_of
from megasched.verify.new_adapter.sizes import write_sizes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Proposal:
    """An adapter as data that can be written down.

    Attributes:
        model_type: that it is for.
        roles: glob -> role.
        packed: role -> sizes of its parts as an expression of ``config``.
        local_attributes: glob -> attributes.
        left_out: path of a linear that was found and is not in it -> why.
    """

    model_type: str
    roles: dict[str, str]
    packed: dict[str, str] = field(default_factory=dict)
    local_attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def found_roles(model: nn.Module) -> Roles:
    """What is known of a definition without an adapter: HF's plan, and what is inferred at TP 2."""
    return infer_roles(model, read_plan(model), layer_stack_of(model), tp=2)


def propose(model: nn.Module, roles: Roles, small: nn.Module | None = None) -> Proposal:
    """An adapter that says what was found.

    Args:
        model: the definition.
        roles: what ``found_roles`` says of it.
        small: another definition of the same architecture, so that a size is not taken for the wrong field of
            the config; or None.
    """
    named = name_roles(model, roles)
    seen: list[tuple[Any, Mapping[str, tuple[int, ...]]]] = [(model.config, roles.components)]
    if small is not None:
        seen.append((small.config, found_roles(small).components))
    packed, left_out = {}, {}
    for role in dict.fromkeys(named.values()):
        members = [path for path, name in named.items() if name == role]
        parts = {path: parts_of(path, roles.components) for path in members}
        if not any(parts.values()):
            continue
        sizes = _sizes_of_role(role, parts, seen)
        if isinstance(sizes, str):
            packed[role] = sizes
        else:
            left_out |= {path: f"its output has parts of {part}, {sizes[0]}" for path, part in parts.items()}
    named = {path: role for path, role in named.items() if path not in left_out}
    paths = [path for path, _ in model.named_modules()]
    local = fold_paths(dict(roles.local_attributes), paths)
    return Proposal(model.config.model_type, fold_paths(_in_order(named, paths), paths), packed, local, left_out)


def _sizes_of_role(
    role: str, parts: Mapping[str, tuple[int, ...]], seen: list[tuple[Any, Mapping[str, tuple[int, ...]]]]
) -> str | tuple[str]:
    """The expression for all modules in a role, or the reason (in a tuple) why there is none."""
    if role == "column":
        return ("and no role stands for so many",)
    if len(set(parts.values())) > 1:
        return ("which are not those of every layer; packed holds for all modules in a role",)
    patterns = {pattern_of(path) for path in parts}
    facts = []
    for config, components in seen:
        sizes = {one for path, one in components.items() if pattern_of(path) in patterns}
        if len(sizes) == 1:
            facts.append((config, sizes.pop()))
    return write_sizes(facts) or ("which are no fields of the config; write packed by hand",)


def _in_order(named: Mapping[str, str], paths: list[str]) -> dict[str, str]:
    """As the modules lie in the definition."""
    return {path: named[path] for path in paths if path in named}
