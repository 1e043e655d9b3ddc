"""What a primitive call leaves behind: which primitive, on which module, with what, asked for at which line.

Nothing is changed when a primitive is called; the records are the schedule. They can be printed, saved,
compared and replayed on another schedule.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError

_LIBRARY = (str(Path(__file__).parent), str(Path(__file__).parent.parent / "model_adapters"))


def caller_source() -> str:
    """``file:line`` of the innermost frame outside this library (outside the adapters too, if there is one)."""
    frame = sys._getframe(1)
    fallback = ""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY[0]):
            place = f"{filename}:{frame.f_lineno}"
            if not filename.startswith(_LIBRARY[1]):
                return place
            fallback = fallback or place
        frame = frame.f_back
    return fallback


@dataclass(frozen=True)
class Record:
    """One primitive call.

    Attributes:
        primitive: registered name, e.g. ``shard``.
        path: module path in the definition, e.g. ``model.layers.0.mlp.up_proj``; empty for the root.
        arguments: the primitive's arguments by name.
        source: ``file:line`` that asked for it; not part of equality, so that schedules can be compared.
    """

    primitive: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={_show(value)}" for key, value in self.arguments.items())
        return f"{self.path or '<model>'}: {self.primitive}({arguments})"


def _show(value: Any) -> str:
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else repr(value)


def save_records(records: Iterable[Record], path: str | Path) -> None:
    """Writes records as JSON. Functions and classes are saved by import path; a lambda or local one is an error."""
    rows = [
        {
            "primitive": r.primitive,
            "path": r.path,
            "arguments": _encode(dict(r.arguments)),
            "source": r.source,
        }
        for r in records
    ]
    target = Path(path)
    beside = target.with_name(target.name + ".part")
    beside.write_text(json.dumps(rows, indent=1) + "\n")
    beside.replace(target)


def load_records(path: str | Path) -> list[Record]:
    """Reads what ``save_records`` wrote; named functions are imported again."""
    rows = json.loads(Path(path).read_text())
    return [Record(row["primitive"], row["path"], _decode(row["arguments"]), row["source"]) for row in rows]


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if callable(value):
        name = getattr(value, "__qualname__", "")
        if not name or "<" in name:
            raise ConfigError(f"can't save {value!r}: only functions and classes at module level have a name")
        return {"$function": f"{value.__module__}:{name}"}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"$function"}:
            module, _, name = value["$function"].partition(":")
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            return found
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
