"""Reads a file with an adapter that ``--adapter`` names: a Python program with ``ADAPTER`` at module level."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import CodeType
from typing import Any

from megasched.errors import ConfigError
from megasched.reading.files import MIB, Expected, read_bytes

FLAG = "--adapter"
ADAPTER_FILE = Expected(
    "an adapter, a Python file with `ADAPTER = Adapter(...)` as `megasched new-adapter --output FILE` writes it",
    flag=FLAG,
    most=16 * MIB,
)


def compile_adapter(file: str) -> CodeType:
    """Reads the file and compiles it; runs nothing of it.

    Raises:
        ConfigError: there is no such file, or it has a syntax error; names the line.
    """
    text = read_bytes(file, ADAPTER_FILE)
    try:
        return compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # a NUL is no syntax error
        line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", str(error))
        raise ConfigError(f"{FLAG} {file}:{line}: the adapter file has a syntax error: {why}") from error


def run_adapter(file: str) -> dict[str, Any]:
    """Runs the file, which the user has named, and returns the names at its module level.

    Raises:
        ConfigError: there is no such file, or its code raises; names the line.
    """
    code = compile_adapter(file)
    names: dict[str, Any] = {"__name__": f"megasched_adapter_{Path(file).stem}", "__file__": file}
    try:
        exec(code, names)
    except Exception as error:  # whatever the file's code raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        raise ConfigError(
            f"{FLAG} {file}:{lines[-1]}: the adapter file fails: {type(error).__name__}: {error}"
        ) from error
    return names
