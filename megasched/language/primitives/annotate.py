"""Primitive ``annotate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.primitives._parameters import missing_parameter
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

    def record(self, node: Node, param: str, key: str, value: Any) -> Mapping[str, Any]:
        return {"param": param, "key": key, "value": value}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        return missing_parameter(node, arguments["param"], source)
