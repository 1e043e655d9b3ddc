"""Defines what is tried: symbols with their values, conditions between them, and all assignments that meet these.

A user writes it as a Python file with ``def space(space)``.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from megasched.errors import ConfigError
from megasched.reading.files import MIB, Expected, read_bytes
from megasched.tuner.expression import INACTIVE, Assignment, Expression

# Each point is held in memory and looked at before each trial.
MOST_POINTS = 100_000
Memory = Literal["grows", "shrinks"]
Words = Callable[[Any], Sequence[Any]]
SHORT = {
    "tp": "--tensor-model-parallel-size",
    "sp": "--sequence-parallel",
    "pp": "--pipeline-model-parallel-size",
    "vp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}
SPACE = Expected("a space, a Python file with `def space(space)`", most=16 * MIB)


class Symbol(Expression):
    """Represents a name with values to choose from; stands for the value in conditions.

    Attributes:
        values: its values, in the order in which they were given.
        flag: its form on the command line: a flag, or a function of the value that returns words.
        schedule: whether it is an option of the schedule instead.
        when: condition under which it has a value.
        memory: whether a larger value never needs less memory ("grows"), or never more ("shrinks").
    """

    def __init__(
        self,
        name: str,
        values: tuple[Any, ...],
        *,
        flag: str | Words,
        schedule: bool,
        when: Expression | None,
        memory: Memory | None,
    ) -> None:
        super().__init__(name, frozenset([name]), lambda assignment: assignment.get(name, INACTIVE))
        self.name, self.values, self.flag, self.schedule = name, values, flag, schedule
        self.when, self.memory = when, memory

    @cached_property
    def ordered(self) -> bool:
        """Returns whether its values are numbers, of which near ones do nearly the same."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    @cached_property
    def ranks(self) -> dict[Any, int]:
        """Maps each value to its place, by size where the symbol is ordered."""
        return {value: rank for rank, value in enumerate(sorted(self.values) if self.ordered else self.values)}

    def is_active(self, assignment: Assignment) -> bool:
        return self.when is None or self.when.evaluate(assignment) not in (False, INACTIVE)


class Space:
    """Represents a finite space of assignments.

    ```python
    def space(space):
        tp = space.choice("tp", [1, 2, 4])
        pp = space.choice("pp", [1, 2, 4])
        space.choice("vp", [1, 2], when=pp > 1)
        space.choice("micro_batch_size", [1, 2, 4, 8], memory="grows")
        space.where(tp * pp <= 8)
    ```
    """

    def __init__(self) -> None:
        self.symbols: dict[str, Symbol] = {}
        self.conditions: list[Expression] = []

    def choice(
        self,
        name: str,
        values: Iterable[Any],
        *,
        flag: str | Words | None = None,
        schedule: bool = False,
        when: Expression | None = None,
        memory: Memory | None = None,
    ) -> Symbol:
        """Adds a symbol that has one of some values.

        Args:
            name: ``tp``, ``sp``, ``pp``, ``vp``, ``cp`` or ``ep``, or a flag without its dashes, or any name with
                ``flag`` or ``schedule``.
            values: text, numbers, True (the flag is there) and False or None (it is not).
            flag: the flag it stands for, if the name does not say it; or a function that takes the value and
                returns the words for the command line, for a value that stands for several flags.
            schedule: whether it is an option of the schedule.
            when: condition under which it has a value.
            memory: ``"grows"`` if a larger value never needs less memory, ``"shrinks"`` if never more.

        Raises:
            ConfigError: the name is taken, or values can't be used.
        """
        found = tuple(values)
        self._check(name, found, when)
        if schedule and (flag is not None or not name.isidentifier()):
            raise ConfigError(f"{name}: an option of the schedule has a Python name, and no flag")
        said = flag or flag_of(name)
        symbol = Symbol(name, found, flag=said, schedule=schedule, when=when, memory=memory)
        if memory not in (None, "grows", "shrinks"):
            raise ConfigError(f'{name}: memory={memory!r}; it is "grows" or "shrinks"')
        if memory and not symbol.ordered:
            raise ConfigError(
                f'{name}: memory="{memory}" is said of larger values, and these are no numbers: {found}'
            )
        self.symbols[name] = symbol
        return symbol

    def integer(self, name: str, low: int, high: int, *, step: int = 1, **more: Any) -> Symbol:
        """Adds a symbol that has one of ``low``, ``low + step``, ... up to ``high``; otherwise as `choice`."""
        if step < 1 or high < low:
            raise ConfigError(f"{name}: nothing lies between {low} and {high} in steps of {step}")
        return self.choice(name, range(low, high + 1, step), **more)

    def where(self, condition: Expression) -> None:
        """Leaves out all assignments for which this does not hold.

        A condition on a symbol that has no value, because its ``when`` does not hold, is not checked.

        Raises:
            ConfigError: it is no condition on symbols.
        """
        if not isinstance(condition, Expression):
            raise ConfigError(
                f"space.where takes a condition on symbols, e.g. tp * pp <= 8; this is {condition!r}"
            )
        self.conditions.append(condition)

    def _check(self, name: str, values: tuple[Any, ...], when: Any) -> None:
        if name in self.symbols:
            raise ConfigError(f"the space has two symbols {name}")
        if not values:
            raise ConfigError(f"{name}: there are no values to choose from")
        wrong = [value for value in values if not isinstance(value, str | int | float | bool | None)]
        if wrong:
            raise ConfigError(f"{name}: {wrong[0]!r} can't be a value; text, numbers, True, False and None can")
        if len({json.dumps(value) for value in values}) < len(values) or len(set(values)) < len(values):
            raise ConfigError(f"{name}: a value is there twice in {list(values)}")
        if when is not None and not isinstance(when, Expression):
            raise ConfigError(f"{name}: when= takes a condition on symbols, e.g. pp > 1; this is {when!r}")

    @cached_property
    def points(self) -> tuple[dict[str, Any], ...]:
        """Returns all assignments that meet the conditions, the last symbol changing fastest.

        Raises:
            ConfigError: there are none, or too many.
        """
        if not self.symbols:
            raise ConfigError("the space has no symbols; give it some: space.choice(NAME, [VALUES])")
        found = []
        for point in self._extend({}, list(self.symbols.values())):
            found.append(point)
            if len(found) > MOST_POINTS:
                raise ConfigError(
                    f"the space has more than {MOST_POINTS} points; give it fewer values, or conditions"
                )
        if not found:
            conditions = ", ".join(map(str, self.conditions))
            raise ConfigError(f"no assignment meets all conditions of the space: {conditions}")
        return tuple(found)

    def _extend(self, point: dict[str, Any], left: list[Symbol]) -> Iterator[dict[str, Any]]:
        if not left:
            yield dict(point)
            return
        symbol, *rest = left
        decided = {one.name for one in left[1:]}
        due = [c for c in self.conditions if symbol.name in c.symbols and not c.symbols & decided]
        if not symbol.is_active(point):
            yield from self._extend(point, rest)
            return
        for value in symbol.values:
            point[symbol.name] = value
            if all(condition.evaluate(point) is INACTIVE or condition.evaluate(point) for condition in due):
                yield from self._extend(point, rest)
        del point[symbol.name]

    def complete(self, given: Assignment) -> dict[str, Any] | None:
        """Returns the part of an assignment that is a point of this space; None if there is no such point."""
        point = {name: given[name] for name in self.symbols if name in given}
        point = {name: value for name, value in point.items() if self.symbols[name].is_active(point)}
        return point if self.place(point) is not None else None

    def place(self, point: Assignment) -> int | None:
        """Returns the index of a point in `points`; None for an assignment that is no point."""
        return self._places.get(_key(point))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {_key(point): number for number, point in enumerate(self.points)}

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash of symbols and points: two spaces with the same one are searched alike."""
        symbols = [[s.name, s.values, s.memory, s.schedule] for s in self.symbols.values()]
        text = json.dumps([symbols, [list(point.items()) for point in self.points]])
        return hashlib.sha256(text.encode()).hexdigest()


def flag_of(name: str) -> str:
    """Returns the flag that a name stands for, e.g. ``--micro-batch-size`` for ``micro_batch_size``."""
    return SHORT.get(name, f"--{name.lstrip('-').replace('_', '-')}")


def _key(point: Assignment) -> str:
    """Returns the key of a point: equal for equal values, whatever their order."""
    return json.dumps(dict(point), sort_keys=True)


def load_space(path: Path) -> Space:
    """Runs the file's function on an empty space, and returns that space.

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
    """Returns ``file:line`` of the innermost line of the file in a traceback; the file if it is not in it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
