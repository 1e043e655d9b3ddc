"""Primitive ``replace_all``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem
from megasched.registry import Primitive, register_primitive

if TYPE_CHECKING:
    from torch import nn

    from megasched.schedule import Schedule


@register_primitive
class ReplaceAll(Primitive):
    """Replaces every module below this one that matches, as ``replace`` does one.

    Parameters:
        what: a module class (exactly this class), a role of the adapter (``norm.input``), or a regular
            expression that must match the whole path below this module.
        factory: function that takes the old module and returns the new one.
        weights, drop: as in ``replace``.

    Replacements are not searched again. No match is an error.
    """

    name = "replace_all"

    def record(
        self,
        node: Schedule,
        what: type[nn.Module] | str,
        factory: Callable[[nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | None = None,
        drop: tuple[str, ...] = (),
    ) -> Mapping[str, Any]:
        return {"what": what, "factory": factory, "weights": dict(weights or {}), "drop": tuple(drop)}

    def check(self, node: Schedule, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        if matches(node, arguments["what"]):
            return []
        remedy = "a class, a role or a regular expression over the whole path below this module"
        return [Problem(f"replace_all: nothing matches {arguments['what']!r}", node.path, source, remedy)]


def matches(node: Schedule, what: type[nn.Module] | str) -> list[str]:
    """Full paths of the outermost modules below ``node`` that match."""
    prefix = node.path + "." if node.path else ""
    found: list[str] = []
    for name, module in node.mod.named_modules():
        path = prefix + name
        if not name or any(path.startswith(outer + ".") for outer in found):
            continue
        if isinstance(what, str):
            hit = node.role_of(path) == what or re.fullmatch(what, name) is not None
        else:
            hit = type(module) is what
        if hit:
            found.append(path)
    return found
