"""Registers the compilers of ``fuse``: Inductor, those of megasched's layers, and other packages'."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megasched.errors import ConfigError
from megasched.graph.partition import ExtractedSubgraph
from megasched.language.registry import load_group
from megasched.language.subgraph import Subgraph

GROUP = "megasched.compilers"
# Compilations of one sub-graph beyond which it is reported.
FEW = 4

Make = Callable[["ExtractedSubgraph"], Callable[..., Any]]
Refuse = Callable[["Subgraph"], str]


@dataclass(frozen=True)
class Compiler:
    """Describes how a sub-graph is compiled.

    Attributes:
        make: takes the part, returns its replacement, with the same inputs and outputs.
        refuse: returns why a sub-graph can't be compiled here, while the schedule is written; empty if it can.
    """

    make: Make
    refuse: Refuse


_COMPILERS: dict[str, Compiler] = {}


def register_compiler(name: str, refuse: Refuse = lambda subgraph: "") -> Callable[[Make], Make]:
    """Registers a function that ``fuse(subgraph, compiler=name)`` calls with the part.

    A file that runs again (a schedule file) may register its function again. Installed packages register
    through the entry point group ``megasched.compilers``, whose points are modules that call this.

    Raises:
        ConfigError: another function has the name.
    """

    def decorate(make: Make) -> Make:
        known = _COMPILERS[name].make if name in _COMPILERS else make
        if (known.__module__, known.__qualname__) != (make.__module__, make.__qualname__):
            raise ConfigError(f"a compiler {name!r} is registered already, by {known.__module__}")
        _COMPILERS[name] = Compiler(make, refuse)
        return make

    return decorate


def get_compiler(name: str) -> Compiler:
    """Returns the compiler of this name.

    Raises:
        ConfigError: there is none; lists the existing ones.
    """
    load_group(GROUP)
    if name not in _COMPILERS:
        raise ConfigError(f"no compiler {name!r}; there are: {', '.join(sorted(_COMPILERS))}")
    return _COMPILERS[name]


def _no_inductor(subgraph: Subgraph) -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if any(name and shutil.which(name) for name in compilers):
        return ""
    return "Inductor needs a C++ compiler on a CPU, and there is none: install g++, or name one in CXX"


@register_compiler("inductor", _no_inductor)
def inductor(part: ExtractedSubgraph) -> Callable[..., Any]:
    """Compiles the part with ``torch.compile``; warns if it is compiled again and again, or not at all."""
    import torch
    from torch._dynamo import config as dynamo
    from torch._inductor.compile_fx import compile_fx

    if dynamo.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        warnings.warn(
            f"megasched: {part.subgraph} is not compiled: TORCHDYNAMO_DISABLE is set, as rehearsal does",
            stacklevel=2,
        )

    def counted(graph: Any, examples: Any) -> Any:
        part.kept["compiled"] = part.kept.get("compiled", 0) + 1
        if part.kept["compiled"] == FEW + 1:
            warnings.warn(
                f"megasched: {part.subgraph} was compiled more than {FEW} times; each new shape, type or mode "
                "costs a compilation: pad the batches to one length",
                stacklevel=2,
            )
        return compile_fx(graph, examples)

    return torch.compile(part.graph, backend=counted, dynamic=False, fullgraph=True)
