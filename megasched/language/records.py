"""Defines the record of a primitive call: which primitive, on which module, with which arguments, from which line.

A primitive call changes nothing: the records are the schedule. They can be printed, saved, compared and replayed
on another schedule.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from megasched.errors import ConfigError
from megasched.reading.files import Expected
from megasched.reading.json_file import read_json

_LIBRARY = str(Path(__file__).parents[1]) + os.sep
# Where adapters are once installed; a schedule in there is who asked, not the machinery that carries it.
_ADAPTERS = _LIBRARY + "model_adapters" + os.sep
RECORDS = Expected("the records of a schedule, as `save_records` writes them")
_FORM = [{"primitive": str, "path": str, "arguments": {}, "source": str}]


def caller_source() -> str:
    """Returns ``file:line`` of the innermost frame outside this library, or an empty string if there is none.

    The adapters' own schedule counts as outside.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY) or filename.startswith(_ADAPTERS):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass(frozen=True)
class Record:
    """Represents one primitive call.

    Attributes:
        primitive: registered name, e.g. ``shard``.
        path: module path in the definition, e.g. ``model.layers.0.mlp.up_proj``; empty for the root.
        arguments: the primitive's arguments by name.
        source: ``file:line`` of the call; not part of equality, so that schedules can be compared.
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
    """Writes records as JSON, with functions and classes by their import paths.

    Raises:
        ConfigError: an argument is neither plain data nor a function or class that can be imported again
            (a lambda, a local function, one defined in a schedule file, a module instance).
    """
    rows = [
        {
            "primitive": r.primitive,
            "path": r.path,
            "arguments": _encode(dict(r.arguments), r),
            "source": r.source,
        }
        for r in records
    ]
    target = Path(path)
    beside = target.with_name(target.name + ".part")
    beside.write_text(json.dumps(rows, indent=1) + "\n")
    beside.replace(target)


def load_records(path: str | Path) -> list[Record]:
    """Reads records that ``save_records`` wrote, equal to the saved ones; named functions are imported again.

    Raises:
        ConfigError: the file can't be read, holds no records, or names a function or class that can no longer be
            imported.
    """
    rows = read_json(path, RECORDS, _FORM)
    try:
        return [Record(row["primitive"], row["path"], _decode(row["arguments"]), row["source"]) for row in rows]
    except ValueError as error:
        raise RECORDS.refusal(path, str(error)) from error


def _encode(value: Any, record: Record) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, record) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item, record) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, record) for item in value]}
    name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    if callable(value) and _found(name) is value:
        return {"$function": name}
    raise ConfigError(
        f"can't save {value!r}, an argument of {record} at {record.source}: only plain data, and functions "
        "and classes at the top level of a module that can be imported"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"$tuple"}:
            if not isinstance(value["$tuple"], list):
                raise ValueError(f"$tuple is {value['$tuple']!r:.60}, a list is due")
            return tuple(_decode(item) for item in value["$tuple"])
        if set(value) == {"$function"}:
            found = _found(value["$function"]) if isinstance(value["$function"], str) else None
            if found is None:
                raise ConfigError(f"the saved schedule uses {value['$function']}, which can't be imported")
            return found
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


def _found(name: str) -> Any:
    """Returns the object that ``module:qualified.name`` names, or None if it can't be imported."""
    module, _, path = name.partition(":")
    try:
        if importlib.util.find_spec(module) is None:  # ValueError: there, but not to be imported again
            return None
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception:  # a module may fail in any way while it is imported
        return None
    return found
