"""Defines patterns: ordinary code in one or several spellings, traced like modules; and the built-in ones.

The part of a spelling's name before a ``/`` says which function is computed (``tanh`` and ``erf`` differ), the
rest only how it is written.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megasched.analysis.recording.meta_call import meta_copy
from megasched.errors import Problem, ScheduleError
from megasched.graph import opaque
from megasched.graph.capture import Graph, capture
from megasched.graph.intercept import Limits
from megasched.graph.match import ANY_NUMBER, SMALLEST_SIZE, find_matches, returns_operation, sizes_in
from megasched.language.records import caller_source
from megasched.language.subgraph import Subgraph

# Sizes of an example that nobody gave: [b, s, h], each a size that no axis or power has.
EXAMPLE = (SMALLEST_SIZE + 2, SMALLEST_SIZE + 6, 38)

Shape = tuple[int, ...]

_ABOUT_PATTERNS = (
    "a pattern is a module, or a function of tensors (of [b, s, h] where examples gives no other shape) that "
    "returns what one operation gives; a function that chooses operations has one parameter, called node"
)


@dataclass(frozen=True)
class Pattern:
    """Describes a computation to search for.

    Attributes:
        name: of the pattern, e.g. ``bias_gelu``.
        spellings: name of the spelling -> a function of tensors that computes it in this way. All take the same
            parameters; those of type float stand for any number.
        examples: parameter -> shape of an example; [b, s, h] by default, sizes no smaller than 11.
    """

    name: str
    spellings: Mapping[str, Callable[..., torch.Tensor]]
    examples: Mapping[str, Shape | torch.Tensor] = field(default_factory=dict)

    __hash__ = object.__hash__

    def find(self, graph: Graph, path: str) -> list[Subgraph]:
        """Returns the parts of a graph that compute this, in any spelling; each part is found once.

        Args:
            path: path of the traced module.

        Raises:
            ScheduleError: a spelling can't be traced, or does not return what one operation gives.
        """
        found: list[Subgraph] = []
        taken: set[str] = set()
        for title, function in self.spellings.items():
            try:
                traced, scalar, written = _trace_pattern(self, function)
            except ScheduleError as error:
                what = f"find: the pattern {error.problems[0].what}"
                raise ScheduleError(Problem(what, path, caller_source(), _ABOUT_PATTERNS)) from error
            if not returns_operation(traced):
                what = "find: the pattern does not return what one operation gives"
                raise ScheduleError(Problem(what, path, caller_source(), _ABOUT_PATTERNS))
            form = title.partition("/")[0]
            spelling = f"{self.name}:{form}" if form else self.name
            for part in find_matches(traced, graph, path, spelling, scalar, written):
                if not taken & set(part.nodes):
                    taken.update(part.nodes)
                    found.append(part)
        order = {name: index for index, name in enumerate(graph.names)}
        return sorted(found, key=lambda part: order[part.nodes[0]])


def as_pattern(
    what: Callable[..., torch.Tensor] | nn.Module | Pattern, examples: Mapping[str, Any] | None, path: str
) -> Pattern:
    """Returns a function of tensors, or a module, as a pattern without a name; a pattern unchanged.

    Raises:
        ScheduleError: it is something else; names the path of the traced module.
    """
    if isinstance(what, Pattern):
        return what
    if isinstance(what, type) or not callable(what):
        shown = f"the class {what.__name__}" if isinstance(what, type) else repr(what)
        problem = f"find: {shown} is neither a regular expression nor a pattern"
        raise ScheduleError(Problem(problem, path, caller_source(), _ABOUT_PATTERNS))
    return Pattern("", {"": what}, dict(examples or {}))


@cache
def _trace_pattern(pattern: Pattern, function: Callable[..., torch.Tensor]) -> tuple[Graph, str, frozenset[int]]:
    """Returns the graph of one spelling, the parameter whose number is left open, and numbers that are no sizes.

    Those are as large in a second trace, of examples twice as large. Code that makes none of such examples may
    write sizes, which stand for any.
    """
    traced, scalar = _trace_once(pattern, function, 1)
    sizes = sizes_in(traced)
    if not sizes:
        return traced, scalar, frozenset()
    try:
        others = sizes_in(_trace_once(pattern, function, 2)[0])
    except ScheduleError:
        return traced, scalar, frozenset()
    if len(others) != len(sizes):
        return traced, scalar, frozenset()
    moved = {size for size, other in zip(sizes, others, strict=True) if size != other}
    return traced, scalar, frozenset(sizes) - moved


def _trace_once(pattern: Pattern, function: Callable[..., torch.Tensor], scale: int) -> tuple[Graph, str]:
    """Returns the graph of one spelling on examples of ``scale`` times their sizes, and the open number's name."""
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
        dtype = example.dtype if isinstance(example, torch.Tensor) else torch.get_default_dtype()
        shape = example.shape if isinstance(example, torch.Tensor) else example
        scaled = [size * scale if size >= SMALLEST_SIZE else size for size in shape]
        args.append(torch.empty(scaled, dtype=dtype, device="meta"))
    return capture(module, run, tuple(args), {}, Limits(), path=pattern.name or "<pattern>"), scalar


def call(name: str, *tensors: torch.Tensor) -> torch.Tensor:
    """Matches, in a pattern, one operation whose whole name matches this regular expression.

    Example: ``lambda x: call(r".*down_proj", F.silu(call(r".*gate_proj", x)))``
    """
    return opaque.call(f"?{name}", _first_like, *tensors)


def anything(*tensors: torch.Tensor) -> torch.Tensor:
    """Matches, in a pattern, any one operation on these tensors."""
    return call(".*", *tensors)


def _first_like(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensors[0])


__all__ = [
    "READY",
    "anything",
    "bias_gelu",
    "call",
    "dropout_add",
    "gelu",
    "layer_norm",
    "rms_norm",
    "rotary",
    "softmax_cross_entropy",
    "swiglu",
]

_C = math.sqrt(2 / math.pi)
_GELU = {
    "erf": lambda x: F.gelu(x),
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf/spelled out": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "tanh/spelled out": lambda x: 0.5 * x * (1.0 + torch.tanh(_C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "tanh/factored": lambda x: 0.5 * x * (1.0 + torch.tanh(x * _C * (1.0 + 0.044715 * x * x))),
    "sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
}


def _after_bias(spelling):  # type: ignore[no-untyped-def]
    return lambda x, bias: spelling(x + bias)


def _rms(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.float32)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * _rms(x, eps).to(x.dtype)


def _rms_norm_offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, eps) * (1.0 + weight.float())


def _rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


gelu = Pattern("gelu", _GELU)
bias_gelu = Pattern("bias_gelu", {name: _after_bias(spelling) for name, spelling in _GELU.items()})
rms_norm = Pattern(
    "rms_norm",
    {"": _rms_norm, "fused": _rms_norm_torch, "offset": _rms_norm_offset},
    {"weight": EXAMPLE[-1:]},
)
layer_norm = Pattern("layer_norm", {"": _layer_norm}, {"weight": EXAMPLE[-1:], "bias": EXAMPLE[-1:]})
swiglu = Pattern(
    "swiglu",
    {"": lambda gate, up: F.silu(gate) * up, "/spelled out": lambda gate, up: gate * torch.sigmoid(gate) * up},
)
_HEADS = (SMALLEST_SIZE, SMALLEST_SIZE + 2, SMALLEST_SIZE + 6, 38)
rotary = Pattern("rotary", {"": _rotary}, dict.fromkeys(("x", "cos", "sin"), _HEADS))
softmax_cross_entropy = Pattern(
    "softmax_cross_entropy",
    {
        "": lambda logits, labels: F.cross_entropy(logits, labels),
        "/two steps": lambda logits, labels: F.nll_loss(F.log_softmax(logits, dim=-1), labels),
    },
    {"logits": (17, 38), "labels": torch.zeros(17, dtype=torch.long)},
)


def _dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p, True) + residual


dropout_add = Pattern("dropout_add", {"": _dropout_add})

READY = {
    pattern.name: pattern
    for pattern in (
        bias_gelu,
        gelu,
        rms_norm,
        layer_norm,
        swiglu,
        rotary,
        softmax_cross_entropy,
        dropout_add,
    )
}
