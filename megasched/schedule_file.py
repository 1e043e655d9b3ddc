"""A user's schedule: a Python file with ``def schedule(sch, layout)``, or one registered by name.

A file may hold several, each registered with ``@register_schedule("name")`` and chosen as ``FILE:name``.
Installed packages register theirs through the entry point group ``megasched.schedules``.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError, Problem, ScheduleError

if TYPE_CHECKING:
    from megasched.layout import Layout
    from megasched.schedule import Schedule

GROUP = "megasched.schedules"
ScheduleFunction = Callable[["Schedule", "Layout"], None]
_REGISTERED: dict[str, ScheduleFunction] = {}


def register_schedule(name: str) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Decorator: registers a schedule function under a name."""

    def decorate(function: ScheduleFunction) -> ScheduleFunction:
        known = _REGISTERED.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ConfigError(f"schedule {name!r} is registered twice: {_place(known)} and {_place(function)}")
        _REGISTERED[name] = function
        return function

    return decorate


def find_schedule(name: str) -> ScheduleFunction:
    """The schedule that ``--model-schedule`` names: ``auto``, a file, ``FILE:name``, or a registered name.

    Raises:
        ConfigError: there is none, or the file can't be read.
        ScheduleError: the file fails when it is imported; names the line.
    """
    if name == "auto":
        from megasched.model_adapters.default_schedule import schedule

        return schedule
    file, _, chosen = name.partition(":")
    if file.endswith(".py"):
        return _from_file(Path(file), chosen)
    found = _registered().get(name)
    if found is None:
        known = ", ".join(sorted(_registered())) or "none"
        raise ConfigError(
            f"--model-schedule {name}: no such file (a schedule file ends in .py), and no schedule is "
            f"registered under this name; registered: {known}; or `auto`"
        )
    return found


def apply_schedule(sch: Schedule, function: ScheduleFunction) -> Schedule:
    """Calls a user's schedule function on a schedule.

    Raises:
        ScheduleError: what it raises, with the line of the user's file that did.
    """
    try:
        function(sch, sch.layout)
    except ScheduleError:
        raise
    except Exception as error:
        what = f"the schedule raised {type(error).__name__}: {error}"
        raise ScheduleError(Problem(what, source=_raised_at(error, function))) from error
    return sch


def _from_file(path: Path, chosen: str) -> ScheduleFunction:
    if not path.is_file():
        raise ConfigError(f"--model-schedule {path}: no such file")
    module = _import(path)
    if chosen:
        found = _REGISTERED.get(chosen) or getattr(module, chosen, None)
        missing = f'a schedule {chosen!r}: register it with @megasched.register_schedule("{chosen}")'
    else:
        found = getattr(module, "schedule", None)
        missing = "`def schedule(sch, layout)`"
    if not callable(found):
        raise ConfigError(f"{path}: the schedule file does not define {missing}")
    return found


def _import(path: Path) -> ModuleType:
    """Runs the file as a module of its own name; a failure names the line in it."""
    module = ModuleType(f"megasched_schedule_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        code = compile(path.read_text(), str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # the user's own file, named on the command line
    except SyntaxError as error:
        what = f"the schedule file has a syntax error: {error.msg}"
        raise ScheduleError(Problem(what, source=f"{error.filename}:{error.lineno}")) from error
    except ScheduleError:
        raise
    except Exception as error:
        what = f"the schedule file fails when it is imported: {type(error).__name__}: {error}"
        raise ScheduleError(Problem(what, source=_line_in(error, str(path)) or str(path))) from error
    return module


def _registered() -> dict[str, ScheduleFunction]:
    found: dict[str, Any] = {point.name: point.load() for point in entry_points(group=GROUP)}
    return {**found, **_REGISTERED}


def _raised_at(error: Exception, function: ScheduleFunction) -> str:
    """The line of the user's function that raised; where the function stands if it could not even be called."""
    place = _place(function)
    return _line_in(error, place.rpartition(":")[0]) or place


def _line_in(error: Exception, filename: str) -> str:
    """The innermost line of the user's file in a traceback; empty if the file is not in it."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    return f"{filename}:{lines[-1].lineno}" if lines else ""


def _place(function: ScheduleFunction) -> str:
    """``file:line`` of a function; what it is for a callable that has no code of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
