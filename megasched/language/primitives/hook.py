"""Primitive ``hook``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive

MODES = ("fw_pre", "fw_post", "bw_post")


@register_primitive
class Hook(Primitive):
    """Registers a hook on the lowered module.

    Parameters:
        mode: ``fw_pre`` calls ``fn(module, inputs)`` before the forward, ``fw_post`` calls
            ``fn(module, inputs, output)`` after it, ``bw_post`` calls ``fn(module, grad_input, grad_output)``
            after the backward; what a hook returns (unless None) takes the place of what it was given.
        fn: the function.
    """

    name = "hook"
    one_call_in_graph = "always"

    def record(self, node: Node, mode: str, fn: Callable[..., Any]) -> Mapping[str, Any]:
        return {"mode": mode, "fn": fn}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        if arguments["mode"] in MODES:
            return []
        return [Problem(f"no hook mode {arguments['mode']!r}", node.path, source, f"one of {', '.join(MODES)}")]
