"""Prints the one JSON object of a command under ``--json``, and keeps all else off standard output."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any


@contextmanager
def json_only(wanted: bool) -> Iterator[None]:
    """Runs its body with standard output redirected to standard error if ``wanted``, as under ``--json``.

    Schedules, spaces and the code of models are other people's, and may print.
    """
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def print_json(found: Mapping[str, Any]) -> None:
    """Prints one object that any JSON parser can read; a number that is not finite becomes null, a path text."""
    print(json.dumps(_plain(found), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
