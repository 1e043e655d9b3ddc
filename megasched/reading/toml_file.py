"""Reads TOML that somebody else has written."""

from __future__ import annotations

import os
import tomllib
from typing import Any

from megasched.reading.files import Expected, read_text
from megasched.reading.forms import misfit, unsound


def read_toml(path: str | os.PathLike[str], expected: Expected, form: Any = object) -> dict[str, Any]:
    """Reads what a TOML file holds.

    Args:
        form: that it must have; see ``forms``.

    Raises:
        MegaschedError: ``expected.error``, with the line and column, or the field.
    """
    text = read_text(path, expected)
    try:
        found = tomllib.loads(text)
    except RecursionError as error:
        raise expected.refusal(path, "it is nested too deep") from error
    except ValueError as error:  # a TOMLDecodeError, or a number of too many digits
        raise expected.refusal(path, str(error)) from error
    if why := unsound(found) or misfit(found, form):
        raise expected.refusal(path, why)
    return found
