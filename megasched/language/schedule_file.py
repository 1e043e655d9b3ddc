"""Finds a user's schedule: a Python file with ``def schedule(sch, layout)``, or one registered by name.

A file may hold several, each registered with ``@register_schedule("name")`` and chosen as ``FILE:name``.
Installed packages register theirs through the entry point group ``megasched.schedules``.

A function with more than these two parameters takes options: ``FILE:ratio=0.5,level=block`` or
``FILE:name:ratio=0.5``. Options are part of the name, so that code that passes a schedule on passes them on, too.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from megasched.errors import ConfigError, Problem, ScheduleError, some_of
from megasched.reading.files import MIB, Expected, read_bytes
from megasched.reading.forms import unsound_text
from megasched.reading.json_file import NoJson, parse_json

if TYPE_CHECKING:
    from torch import nn

    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.schedule import Schedule

GROUP = "megasched.schedules"
AUTO = "auto"  # the schedule by roles, which megasched itself registers
_SUFFIX = ".py"
SCHEDULE = Expected("a schedule, a Python file with `def schedule(sch, layout)`", most=16 * MIB)
ScheduleFunction = Callable[..., None]  # of a Schedule, its ParallelDims, and its options
_REGISTERED: dict[str, ScheduleFunction] = {}


def register_schedule(name: str) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Registers the decorated schedule function under a name."""

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
    """Returns the schedule that ``--model-schedule`` names: ``auto``, a file, ``FILE:name``, or a registered name.

    Options in the name are bound to the returned function.

    Raises:
        ConfigError: there is none, the file can't be read, or it does not take these options.
        ScheduleError: the import of the file fails; names the line.
    """
    file, chosen, options = _parts(name)
    function = _find(chosen) if file is None else _from_file(file, chosen)
    head = ":".join(filter(None, [str(file or ""), chosen]))
    return _with_options(function, head, options) if options else function


def check_schedule(name: str, flag: str = "--model-schedule", instead: str = "") -> None:
    """Checks that a schedule's file is there and is Python, and runs nothing of it.

    Args:
        flag: what names it.
        instead: what else that takes; a name without a file is looked up then, which imports those who register.

    Raises:
        ConfigError: there is no such file, or no such name.
        ScheduleError: it has a syntax error; names the line.
    """
    file, rest = split_file(name)
    if file is None and len(Path(rest).parts) > 1:
        file = Path(rest)
    if file is not None:
        if not os.path.lexists(file):
            raise ConfigError(f"{flag} {name}: no such file")
        _compile(file)
    elif instead and rest != AUTO:
        _find(_parts(name)[1], flag, instead)


def _compile(path: Path) -> CodeType:
    text = read_bytes(path, SCHEDULE.named_by("--model-schedule"))
    try:
        return compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        what = f"the schedule file has a syntax error: {error.msg}"
        raise ScheduleError(Problem(what, source=f"{path}:{error.lineno or 1}")) from error


def split_file(name: str) -> tuple[Path | None, str]:
    """Returns the file in a schedule's name and the text after its colon, or None and the name without a file.

    A path may contain colons: of several ends in ``.py``, the first that is an existing file counts.
    """
    ends = [at + len(_SUFFIX) for at in range(len(name)) if name.startswith(_SUFFIX, at)]
    ends = [end for end in ends if name[end : end + 1] in ("", ":")]
    if not ends:
        return None, name
    end = next((end for end in ends if Path(name[:end]).is_file()), ends[0])
    return Path(name[:end]), name[end + 1 :]


def add_options(name: str, options: Sequence[str]) -> str:
    """Returns the name of a schedule with options added to its own; of repeated options the last counts.

    Args:
        options: each ``KEY=VALUE``.

    Raises:
        ConfigError: an option does not have this form.
    """
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier() or set(value) & set(",:"):
            raise ConfigError(f"--schedule-option {option}: write KEY=VALUE; no comma or colon in the value")
    file, chosen, given = _parts(name)
    given |= dict(option.split("=", 1) for option in options)
    told = ",".join(f"{key}={value}" for key, value in given.items())
    return ":".join(filter(None, [str(file or ""), chosen, told]))


def _parts(name: str) -> tuple[Path | None, str, dict[str, str]]:
    """Returns the file, the name, and the options of ``FILE:name:KEY=VALUE,KEY=VALUE``."""
    file, rest = split_file(name)
    head, _, last = rest.rpartition(":")
    if "=" not in last or (file is None and not head):
        return file, rest, {}
    options = {}
    for option in last.split(","):
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--model-schedule {name}: {option!r} is no option; write KEY=VALUE,KEY=VALUE")
        options[key] = value
    return file, head, options


def _with_options(function: ScheduleFunction, name: str, options: Mapping[str, str]) -> ScheduleFunction:
    """Returns the function with its options bound; values are parsed as JSON where possible."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    known = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    unknown = [key for key in options if key not in known]
    if unknown and len(known) == len(parameters):
        takes = f"it takes {', '.join(known)}" if known else "it takes none: it has no parameter after the layout"
        raise ConfigError(f"--model-schedule {name}: the schedule has no option {', '.join(unknown)}; {takes}")
    values = {key: _value(key, text) for key, text in options.items()}

    @functools.wraps(function)
    def bound(sch: Schedule, layout: ParallelDims) -> None:
        function(sch, layout, **values)

    return bound


def _value(key: str, text: str) -> Any:
    """Returns the value of an option: parsed if it is JSON, else the text.

    Raises:
        ConfigError: the JSON is unusable: nested too deep, numbers of a thousand digits.
    """
    if why := unsound_text(text):
        raise ConfigError(f"--schedule-option {key}: {why}")
    try:
        return parse_json(text)
    except NoJson:
        return text
    except ValueError as error:
        raise ConfigError(f"--schedule-option {key}={text:.60}: {error}") from error


def _find(name: str, flag: str = "--model-schedule", instead: str = "") -> ScheduleFunction:
    if name == AUTO:  # whatever other packages have registered, or can't load
        point = next(point for point in entry_points(group=GROUP) if point.name == AUTO)
        return cast(ScheduleFunction, point.load())
    found = _registered().get(name)
    if found is None:
        known = ", ".join(sorted(_registered().keys() - {AUTO})) or "none"
        raise ConfigError(
            f"{flag} {name or repr(name)}: no such file (a schedule file ends in .py), and no schedule is "
            f"registered under this name; registered: {known}; or `auto`{instead}"
        )
    return found


def apply_schedule(sch: Schedule, function: ScheduleFunction) -> Schedule:
    """Calls a user's schedule function on a schedule, and returns the schedule.

    Raises:
        ScheduleError: the function raised an error; names the line of the user's file. Or it changed the model
            itself, as Slapo's schedules do, which nobody would see or compare.
    """
    before = _state_of(sch.mod)
    try:
        function(sch, sch.layout)
    except ScheduleError:
        raise
    except Exception as error:
        what = f"the schedule raised {type(error).__name__}: {error}"
        raise ScheduleError(Problem(what, source=_raised_at(error, function))) from error
    _refuse_changes(before, _state_of(sch.mod), _place(function))
    return sch


# Of a module's attribute, or of its config's: path and name -> what it is, and what is in it.
type _State = dict[tuple[str, str], tuple[object, ...]]


def _state_of(model: nn.Module) -> _State:
    """Returns what the modules of a model and their configs hold, by identity."""
    holders: list[tuple[str, object]] = list(model.named_modules())
    state: _State = {}
    met: set[int] = set()
    for path, holder in holders:  # configs are added on the way
        if id(holder) in met:
            continue
        met.add(id(holder))
        state[path, "__class__"] = (type(holder),)
        for name, value in vars(holder).items():
            if hasattr(type(value), "to_dict"):
                holders.append((f"{path}.{name}".strip("."), value))
            inside = [*value, *value.values()] if isinstance(value, dict) else []
            inside = list(value) if isinstance(value, list | tuple | set) else inside
            trained = [one.requires_grad for one in inside if hasattr(one, "requires_grad")]
            state[path, name] = (value, *inside, *trained)
    return state


def _refuse_changes(before: _State, after: _State, source: str) -> None:
    """Raises ScheduleError where a schedule has changed the model itself, and not said what is to be changed."""
    none: tuple[object, ...] = ()
    changed = [
        key
        for key in {**before, **after}
        if len(old := before.get(key, none)) != len(new := after.get(key, none))
        or any(a is not b for a, b in zip(old, new, strict=True))
    ]
    if changed:
        names = [
            path or "the model" if name.startswith("_") else f"{path}.{name}".strip(".") for path, name in changed
        ]
        what = f"the schedule changes the model itself, and no call says so: {some_of(list(dict.fromkeys(names)))}"
        remedy = (
            "a primitive (replace, hook, annotate, one of your own), or another model: its config.json, its code"
        )
        raise ScheduleError(Problem(what, changed[0][0], source, remedy))


def _from_file(path: Path, chosen: str) -> ScheduleFunction:
    if not os.path.lexists(path):
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
    """Runs the file as a module named after it; a failure names the line in the file."""
    code = _compile(path)
    module = ModuleType(f"megasched_schedule_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        exec(code, module.__dict__)  # the user's own file, named on the command line
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
    """Returns the line of the user's function that raised, or of its definition if it could not be called."""
    place = _place(function)
    return _line_in(error, place.rpartition(":")[0]) or place


def _line_in(error: Exception, filename: str) -> str:
    """Returns the innermost line of the user's file in a traceback; empty if the file is not in it."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    return f"{filename}:{lines[-1].lineno}" if lines else ""


def _place(function: ScheduleFunction) -> str:
    """Returns ``file:line`` of a function, or the ``repr`` of a callable without code of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
