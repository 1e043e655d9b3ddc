"""Primitive ``annotate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class Annotate(Primitive):
    """Puts an attribute on a parameter; it survives shard, replace, build and load.

    Parameters:
        param: name of the parameter in this module, e.g. ``weight``.
        key: attribute name, e.g. ``is_embedding_parameter``.
        value: its value.

    Example: ``sch["model.embed_tokens"].annotate("weight", "is_embedding_parameter", True)``
    """

    name = "annotate"
    instead = {"param_name": "here it is called param"}  # noqa: RUF012
    survives_replacement = True

    def record(self, node: Node, param: str, key: str, value: Any) -> Mapping[str, Any]:
        return {"param": param, "key": key, "value": value}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        problems, key = missing_parameter(node, arguments["param"], source), arguments["key"]
        if problems:
            return problems
        parameter = getattr(node.mod, arguments["param"])
        try:
            setattr(
                parameter.detach()[..., :0] if parameter.dim() else parameter.detach(), key, arguments["value"]
            )
        except (AttributeError, TypeError, RuntimeError) as error:
            what = f"annotate: a parameter's {key} can't be set: {error}"
            return [Problem(what, node.path, source, "a name that torch's tensors do not have")]
        return []


def missing_parameter(node: Node, param: str, source: str) -> list[Problem]:
    """Returns a problem if the module itself (not its children) has no parameter of this name."""
    own = [name for name, value in node.mod.named_parameters(recurse=False) if value is not None]
    if param in own:
        return []
    remedy = f"its parameters are: {', '.join(own)}" if own else "it has no parameters of its own"
    return [Problem(f"{type(node.mod).__name__} has no parameter {param!r}", node.path, source, remedy)]
