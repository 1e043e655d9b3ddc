"""Reads the points to begin with from what a planner proposes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError
from megasched.reading.files import Expected
from megasched.reading.json_file import read_json
from megasched.tuner.space import Space, Symbol

FORM = '{"layouts": [{"flags": {"tensor_model_parallel_size": 8, ...}}, ...]}'
WARM_START = Expected(f"JSON of the form {FORM}", flag="--warm-start")


def read_warm_start(path: Path, space: Space) -> list[int]:
    """Returns the places of the points that a file names, best first, each once.

    A layout stands for the first point that agrees with all its flags; flags that are no symbol's are passed over.

    Raises:
        ConfigError: the file can't be read, or none of its layouts is in the space.
    """
    found = read_json(path, WARM_START, {"layouts": [{"flags": {}}]})
    layouts = [layout["flags"] for layout in found["layouts"]]
    places = [place for flags in layouts if (place := _place(flags, space)) is not None]
    if not places:
        first = f", e.g. {json.dumps(layouts[0])}" if layouts else ""
        names = ", ".join(_flag_name(symbol) for symbol in space.symbols.values())
        raise ConfigError(
            f"--warm-start {path}: no layout of it is a point of the space{first}; the space is of {names}"
        )
    return list(dict.fromkeys(places))


def _place(flags: Mapping[str, Any], space: Space) -> int | None:
    said = {}
    for symbol in space.symbols.values():
        for name in (symbol.name, _flag_name(symbol)):
            if flags.get(name) is not None:
                said[symbol.name] = flags[name]
    if not said:
        return None
    return next((place for place, point in enumerate(space.points) if _agrees(point, said)), None)


def _agrees(point: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Returns whether a point has these values.

    A symbol without one equals a size of 1 (no interleaving), and a flag that is not there.
    """
    has = {name: False if value is None else value for name, value in point.items()}
    return all(has[name] == value if name in has else value in (1, False) for name, value in said.items())


def _flag_name(symbol: Symbol) -> str:
    """Returns ``tensor_model_parallel_size`` for ``tp``; a symbol's own name if a function makes its flags."""
    return symbol.flag.lstrip("-").replace("-", "_") if isinstance(symbol.flag, str) else symbol.name
