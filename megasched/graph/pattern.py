"""What a pattern is: ordinary code, in one spelling or several, traced as modules are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from megasched.analysis.meta_call import meta_copy
from megasched.graph import opaque
from megasched.graph.capture import Graph, capture
from megasched.graph.intercept import Limits
from megasched.graph.match import ANY_NUMBER, SMALLEST_SIZE, find_matches
from megasched.graph.subgraph import Subgraph

# Sizes of an example that nobody gave: [b, s, h], each a size that no axis or power has.
EXAMPLE = (SMALLEST_SIZE + 2, SMALLEST_SIZE + 6, 38)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """A computation to look for.

    Attributes:
        name: of the pattern, e.g. ``bias_gelu``.
        spellings: name of the spelling -> a function of tensors that computes it in this way. All take the same
            parameters; those of type float stand for any number.
        examples: parameter -> shape of an example; [b, s, h] unless given, sizes no smaller than 11.
    """

    name: str
    spellings: Mapping[str, Callable[..., torch.Tensor]]
    examples: Mapping[str, Shape | torch.Tensor] = field(default_factory=dict)

    __hash__ = object.__hash__

    def find(self, graph: Graph, path: str) -> list[Subgraph]:
        """The parts of a graph that compute this, in any spelling; those of one name and of several forms once."""
        found: list[Subgraph] = []
        taken: set[str] = set()
        for title, function in self.spellings.items():
            traced, scalar = _trace_pattern(self, function)
            form = title.partition("/")[0]
            spelling = f"{self.name}:{form}" if form else self.name
            for part in find_matches(traced, graph, path, spelling, scalar):
                if not taken & set(part.nodes):
                    taken.update(part.nodes)
                    found.append(part)
        order = {name: index for index, name in enumerate(graph.names)}
        return sorted(found, key=lambda part: order[part.nodes[0]])


def as_pattern(
    what: Callable[..., torch.Tensor] | nn.Module | Pattern, examples: Mapping[str, Any] | None
) -> Pattern:
    """A function of tensors, or a module, as a pattern without a name; a pattern as it is."""
    if isinstance(what, Pattern):
        return what
    return Pattern("", {"": what}, dict(examples or {}))


@cache
def _trace_pattern(pattern: Pattern, function: Callable[..., torch.Tensor]) -> tuple[Graph, str]:
    """The graph of one spelling, and which parameter is the number left open."""
    module = meta_copy(function) if isinstance(function, nn.Module) else nn.Module()
    run = module.forward if isinstance(function, nn.Module) else function
    args: list[Any] = []
    scalar = ""
    for name, parameter in inspect.signature(run).parameters.items():
        if parameter.annotation in (float, "float"):
            args.append(ANY_NUMBER)
            scalar = name
            continue
        example = pattern.examples.get(name, EXAMPLE)
        args.append(
            example.to("meta") if isinstance(example, torch.Tensor) else torch.empty(example, device="meta")
        )
    return capture(module, run, tuple(args), {}, Limits(), path=pattern.name or "<pattern>"), scalar


def call(name: str, *tensors: torch.Tensor) -> torch.Tensor:
    """In a pattern: one operation whose name matches this regular expression as a whole, whatever it computes.

    Example: ``lambda x: call(r".*down_proj", F.silu(call(r".*gate_proj", x)))``
    """
    return opaque.call(f"?{name}", _first_like, *tensors)


def anything(*tensors: torch.Tensor) -> torch.Tensor:
    """In a pattern: one operation on these tensors, whatever it is."""
    return call(".*", *tensors)


def _first_like(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensors[0])
