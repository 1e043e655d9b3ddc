"""Reads JSON that somebody else has written."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from megasched.reading.files import Expected, read_text
from megasched.reading.forms import misfit, misfit_of_field, unsound

# Of a whole number: more digits than one of 64 bits has.
_LONG = re.compile(r"\d{20,}")


class NoJson(ValueError):
    """Is raised for text that is no JSON."""


def read_json(
    path: str | os.PathLike[str], expected: Expected, form: Any = object, *, unique: bool = False
) -> Any:
    """Reads what a JSON file holds.

    Args:
        form: that it must have; see ``forms``.
        unique: an object may not have a key twice, of which the last would count.

    Raises:
        MegaschedError: ``expected.error``, with the line and column, or the field.
    """
    text = read_text(path, expected)
    try:
        return parse_json(text, form, unique=unique)
    except ValueError as error:
        raise expected.refusal(path, str(error)) from error


def parse_json(text: str, form: Any = object, *, unique: bool = False) -> Any:
    """Reads what JSON text says; arguments as those of ``read_json``.

    Raises:
        NoJson: says where.
        ValueError: it is nested too deep, has what no file can hold, or is of another form; says where.
    """
    try:
        found = _loads(text, parse_int=_whole, object_pairs_hook=_without_doubles if unique else None)
    except _LongNumber as error:
        at = _LONG.search(text)
        line = 1 + text.count("\n", 0, at.start()) if at else 1
        raise ValueError(f"line {line}: {error}") from None
    if why := unsound(found) or misfit(found, form):
        raise ValueError(why)
    return found


def parse_field(text: str, key: str, form: Any) -> Any:
    """Reads a field of the object that JSON text holds; the other fields may hold what they will.

    Raises:
        NoJson: says where.
        ValueError: it is nested too deep or no object, or the field is missing, of another form, or has what no
            file can hold; says where.
    """
    # A number that is longer than Python takes is as good as any of its size: nothing here reads it.
    found = _loads(text, parse_int=lambda digits: int(digits) if len(digits) < 20 else float(digits))
    if why := misfit(found, dict) or misfit_of_field(found, key, form) or unsound({key: found[key]}):
        raise ValueError(why)
    return found[key]


def _loads(text: str, **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError as error:
        raise NoJson(f"line {error.lineno}, column {error.colno}: it is no JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class _LongNumber(ValueError):
    """Is raised for a number that nothing here can use."""


def _whole(digits: str) -> int:
    if len(digits) >= 20 and len(digits.lstrip("-0")) >= 20:
        raise _LongNumber(f"a whole number of {len(digits)} digits, of which 64 bits hold 19")
    return int(digits)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        doubles = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"named twice: {', '.join(doubles)}")
    return found
