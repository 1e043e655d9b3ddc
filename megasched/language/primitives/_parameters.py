"""What several primitives check about a parameter's name."""

from __future__ import annotations

from megasched.errors import Problem
from megasched.language.registry import Node


def missing_parameter(node: Node, param: str, source: str) -> list[Problem]:
    """A problem if the module itself (not its children) has no parameter of this name."""
    own = [name for name, value in node.mod.named_parameters(recurse=False) if value is not None]
    if param in own:
        return []
    remedy = f"its parameters are: {', '.join(own)}" if own else "it has no parameters of its own"
    return [Problem(f"{type(node.mod).__name__} has no parameter {param!r}", node.path, source, remedy)]
