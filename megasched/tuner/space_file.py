"""A user's space: a Python file with ``def space(space)``."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType

from megasched.errors import ConfigError
from megasched.reading.files import MIB, Expected, read_bytes
from megasched.tuner.space import Space

SPACE = Expected("a space, a Python file with `def space(space)`", most=16 * MIB)


def load_space(path: Path) -> Space:
    """Runs the file's function on an empty space.

    Raises:
        ConfigError: there is no such file or function, it fails (with the line), or the space is empty.
    """
    text = read_bytes(path, SPACE)
    module = ModuleType(f"megasched_space_{path.stem}")
    module.__file__ = str(path)
    space = Space()
    try:
        code = compile(text, str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # the user's own file, named on the command line
        function = getattr(module, "space", None)
        if not callable(function):
            raise ConfigError("the file does not define `def space(space)`")
        function(space)
        assert space.points  # made here, so that what its conditions can't compute names the file
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: syntax error: {error.msg}") from error
    except ConfigError as error:
        raise ConfigError(f"{_line(error, path)}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{_line(error, path)}: {type(error).__name__}: {error}") from error
    return space


def _line(error: Exception, path: Path) -> str:
    """``file:line`` of the innermost line of the file in a traceback; the file if it is not in it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
