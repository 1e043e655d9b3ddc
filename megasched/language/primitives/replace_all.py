"""Primitive ``replace_all``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive

if TYPE_CHECKING:
    from torch import nn


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
        node: Node,
        what: type[nn.Module] | str,
        factory: Callable[[nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | None = None,
        drop: tuple[str, ...] = (),
    ) -> Mapping[str, Any]:
        if isinstance(what, str):
            try:
                re.compile(what)
            except re.error as error:
                problem = f"replace_all: {what!r} is no regular expression: {error}"
                raise ScheduleError(Problem(problem, node.path, caller_source())) from error
        return {"what": what, "factory": factory, "weights": dict(weights or {}), "drop": tuple(drop)}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        if matches(node, arguments["what"]):
            return []
        remedy = "a class, a role or a regular expression over the whole path below this module"
        return [Problem(f"replace_all: nothing matches {arguments['what']!r}", node.path, source, remedy)]


def matches(node: Node, what: type[nn.Module] | str) -> list[str]:
    """Full paths of the outermost modules below ``node`` that match."""
    found: dict[str, str] = {}
    for name, child in node.below().items():
        if any(name.startswith(outer + ".") for outer in found):
            continue
        if isinstance(what, str):
            hit = node.role_of(child.path) == what or re.fullmatch(what, name) is not None
        else:
            hit = type(child.mod) is what
        if hit:
            found[name] = child.path
    return list(found.values())
