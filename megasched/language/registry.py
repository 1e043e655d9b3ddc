"""The registry of primitives: what exists, and where its documentation is.

Built-in primitives and third parties' come the same way, through the entry point group
``megasched.primitives``: importing the module named there registers what it defines.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol, overload

from megasched.errors import ConfigError, Problem

GROUP = "megasched.primitives"


class Node(Protocol):
    """What a primitive is told of the module it is called on (a ``Schedule``)."""

    @property
    def path(self) -> str: ...
    @property
    def mod(self) -> Any: ...
    @property
    def root(self) -> Any: ...
    def role_of(self, path: str) -> str | None: ...


class Primitive:
    """One transformation. Subclasses say what its call records; a lowering of the same name carries it out.

    Attributes:
        name: how it is called on a schedule.
        aliases: other names for the same.
        leaves_record: whether a call is recorded; otherwise what ``record`` returns is the call's answer.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    leaves_record: ClassVar[bool] = True

    def record(self, node: Node, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """The arguments to keep, by name. Nothing is changed and nothing heavy is done here."""
        raise NotImplementedError(f"primitive {self.name} defines no record()")

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        """What is wrong with this call as seen on the definition alone; collected over the whole schedule."""
        return []


# What a schedule has of its own under these names would hide a primitive (``Schedule`` in schedule.py).
RESERVED = frozenset(
    "path mod parent root layout roles records renamed memory built role role_of children below".split()  # noqa: SIM905
)
_PRIMITIVES: dict[str, Primitive] = {}


def register_primitive[P: type[Primitive]](cls: P) -> P:
    """Class decorator: makes a primitive callable on every schedule, under its name and aliases.

    A file that is run again (a schedule file) may register its classes again.

    Raises:
        ConfigError: another class has the name, or a schedule has a method or attribute of this name.
    """
    names = (cls.name, *cls.aliases)
    for name in names:
        if name in RESERVED or name.startswith("_"):
            raise ConfigError(
                f"a primitive can't be called {name!r} ({cls.__module__}): a schedule has an attribute of this "
                "name, or it starts with an underscore"
            )
        known = type(_PRIMITIVES.get(name, instance := cls()))
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"primitive {name!r} is registered twice: by {known.__module__}.{known.__qualname__} and by "
                f"{cls.__module__}.{cls.__qualname__}"
            )
    _PRIMITIVES.update(dict.fromkeys(names, instance))
    return cls


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=GROUP):
        point.load()


def has_primitive(name: str) -> bool:
    _load_entry_points()
    return name in _PRIMITIVES


def get_primitive(name: str) -> Primitive:
    """The primitive of this name or alias.

    Raises:
        ConfigError: there is none; lists those that exist.
    """
    if not has_primitive(name):
        raise ConfigError(f"no primitive {name!r}; there are: {', '.join(list_primitives(name_only=True))}")
    return _PRIMITIVES[name]


@overload
def list_primitives(*, name_only: bool = True) -> list[str]: ...
@overload
def list_primitives(*, name_only: bool = False) -> dict[str, str]: ...
def list_primitives(*, name_only: bool = False) -> list[str] | dict[str, str]:
    """All primitives: their names, or name -> documentation."""
    _load_entry_points()
    own = {primitive.name: primitive for primitive in _PRIMITIVES.values()}
    if name_only:
        return sorted(own)
    return {name: document(own[name]) for name in sorted(own)}


def call_of(primitive: Primitive) -> str:
    """How a primitive is called on a schedule: ``shard(param, axis)``."""
    signature = inspect.signature(primitive.record)
    parameters = [p for name, p in signature.parameters.items() if name != "node"]
    return f"{primitive.name}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"


def document(primitive: Primitive) -> str:
    """Signature and documentation of a primitive, as text."""
    also = f"\n\nAlso known as: {', '.join(primitive.aliases)}" if primitive.aliases else ""
    return f"{call_of(primitive)}\n\n{inspect.getdoc(primitive) or ''}{also}"
