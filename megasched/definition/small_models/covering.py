"""Makes a small copy deep enough to have every kind of layer that the whole model has, and tells what it lacks.

Many classes decide by a layer's number what is in it, e.g. attention in every sixth one. What holds for a copy
without such a layer says nothing about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from megasched.definition.build import build_definition
from megasched.definition.objectives import CAUSAL_LM, Objective
from megasched.definition.small_models.conditions import conditions_of
from megasched.definition.small_models.shrink import LAYERS
from megasched.definition.small_models.small_models import small_copy

# A deeper copy is made only when it is asked for.
MOST_LAYERS = 16
_INDEX = re.compile(r"\b\d+\b")
_DIGITS = re.compile(r"\d+")
_CLASS = "class"
# Path of a module within its layer, and what code decides by: attributes and conditions, with their values.
Traits = set[tuple[str, frozenset[tuple[str, Any]]]]


@dataclass(frozen=True)
class Lack:
    """Describes a layer of which a copy has no like.

    Attributes:
        path: the first such layer of the model.
        index: its number in its list.
        what: what no layer of the copy has.
    """

    path: str
    index: int
    what: str

    def __str__(self) -> str:
        return f"{self.path} ({self.what})" if self.what else self.path


def covering_copy(
    config: Any,
    layers: int | None = None,
    *,
    stages: int = 1,
    objective: Objective = CAUSAL_LM,
    trust_remote_code: bool = False,
) -> tuple[Any, int, list[Lack]]:
    """Returns a small config with every kind of layer of a given one, its number of layers, and what it lacks.

    Args:
        layers: number of layers; by default as many as it takes, and no fewer than four.
        stages: number of pipeline stages, which no copy has fewer layers than.

    Raises:
        ConfigError: no small copy can be made, or transformers has no such model.
    """
    whole = build_definition(config, objective, trust_remote_code=trust_remote_code)

    def copied(count: int) -> tuple[Any, list[Lack]]:
        small = small_copy(config, layers=count, objective=objective)
        return small, lacking(whole, build_definition(small, objective, trust_remote_code=trust_remote_code))

    least = layers or max(LAYERS, stages)
    small, lacks = copied(least)
    depth = stages * -(-(1 + max((lack.index for lack in lacks), default=0)) // stages)
    if not lacks or layers is not None or not least < depth <= MOST_LAYERS:
        return small, least, lacks
    deeper, fewer = copied(depth)
    return (deeper, depth, fewer) if len(fewer) < len(lacks) else (small, least, lacks)


def lacking(whole: nn.Module, small: nn.Module) -> list[Lack]:
    """Returns the first layers of a model that hold a module of which no layer of a small copy holds the like."""
    there, found = _lists_of(small), []
    for name, rows in _lists_of(whole).items():
        varying = _varying([traits for _, _, traits in rows])
        met = {one for _, _, traits in there.get(name, ()) for one in _of_kind(traits, varying)}
        for path, index, traits in rows:
            more = _of_kind(traits, varying) - met
            if more:
                met |= more
                found.append(Lack(path, index, _words(more)))
    return found


def _lists_of(model: nn.Module) -> dict[str, list[tuple[str, int, Traits]]]:
    """Maps the path of each list of modules, without numbers, to path, number and traits of what is in it."""
    found: dict[str, list[tuple[str, int, Traits]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            rows = found.setdefault(_INDEX.sub("*", path), [])
            rows += [(f"{path}.{index}", index, _traits(layer)) for index, layer in enumerate(module)]
    return found


def _traits(layer: nn.Module) -> Traits:
    return {(_INDEX.sub("*", path), frozenset(_attributes(module))) for path, module in layer.named_modules()}


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what tells one module from another; no numbers, which are others in a copy."""
    yield _CLASS, type(module).__qualname__
    yield "modules", frozenset(_INDEX.sub("*", name) for name in module._modules)
    for name, parameter in module._parameters.items():
        yield name, parameter is not None
    for name, value in vars(module).items():
        if value is None or isinstance(value, bool):
            yield name, value
        elif isinstance(value, str):
            yield name, _DIGITS.sub("*", value)
    yield from conditions_of(module)


def _varying(rows: list[Traits]) -> set[tuple[str, str]]:
    """Returns paths and attributes that are not the same in all layers of a list."""
    values: dict[tuple[str, str], set[Any]] = {}
    for traits in rows:
        for path, attributes in traits:
            for name, value in attributes:
                values.setdefault((path, name), set()).add(value)
    paths = {path for traits in rows for path, _ in traits}
    some = {path for path in paths if not all(any(own == path for own, _ in traits) for traits in rows)}
    return {(path, name) for (path, name), held in values.items() if len(held) > 1 or path in some}


def _of_kind(traits: Traits, varying: set[tuple[str, str]]) -> set[tuple[str, frozenset[tuple[str, Any]]]]:
    """Returns the modules of a layer by what varies over the layers."""
    found = set()
    for path, attributes in traits:
        own = frozenset((name, value) for name, value in attributes if (path, name) in varying)
        found |= {(path, own)} if own else set()
    return found


def _words(modules: set[tuple[str, frozenset[tuple[str, Any]]]]) -> str:
    """Returns the class of the first module and what is its own, e.g. ``mixer: Attention``."""
    path, attributes = min(modules, key=lambda one: one[0])
    values = dict(attributes)
    told = values.get(_CLASS) or ", ".join(
        f"{name}={value}" for name, value in sorted(values.items()) if name != "modules"
    )
    return ": ".join(filter(None, (path, told)))
