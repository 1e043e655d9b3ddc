"""Primitive ``probe``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class Probe(Primitive):
    """Prints statistics of what a module returns, and of its gradient, on each rank.

    Parameters:
        label: word at the beginning of its lines, to tell probes apart.
        every: print the first of so many calls, and then each so-many-th.

    It prints mean, standard deviation, least and largest value of each tensor on this rank (its shard, if it is
    cut), and how many values are not finite. No number changes. A column linear is computed by itself, not by one
    product with others, so that its output is there to be looked at. A module that is recomputed may be called
    twice. Printing waits for the device.

    Example: ``sch["model.layers.0.mlp"].probe()``
    """

    name = "probe"
    aliases = ("print",)
    acts_on_calls = True
    one_call_in_graph = "always"

    def record(self, node: Node, label: str = "", every: int = 1) -> Mapping[str, Any]:
        return {"label": label, "every": every}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        every = arguments["every"]
        if every > 0:
            return []
        return [Problem(f"probe: every={every!r} is no number of calls", node.path, source, "1 or more")]
