"""Primitive ``hook``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive
from megasched.language.signatures import takes

# Mode -> the arguments of torch's hooks there.
MODES = {
    "fw_pre": ("module", "inputs"),
    "fw_post": ("module", "inputs", "output"),
    "bw_post": ("module", "grad_input", "grad_output"),
}


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
    acts_on_calls = True
    one_call_in_graph = "always"

    def record(self, node: Node, mode: str, fn: Callable[..., Any]) -> Mapping[str, Any]:
        return {"mode": mode, "fn": fn}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        mode, function = arguments["mode"], arguments["fn"]
        if mode not in MODES:
            return [Problem(f"no hook mode {mode!r}", node.path, source, f"one of {', '.join(MODES)}")]
        if takes(function, len(MODES[mode])):
            return []
        what = f"hook: {getattr(function, '__qualname__', repr(function))} can't be called at {mode}"
        return [Problem(what, node.path, source, f"a function of ({', '.join(MODES[mode])})")]
