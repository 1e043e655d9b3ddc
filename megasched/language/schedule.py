"""Defines the schedule: a tree that mirrors the module tree, on which primitives are called.

``sch["model.layers.0.self_attn"]`` is the schedule of one module, ``sch["model.layers.*.mlp"]`` and
``sch["model.layers"][2:4]`` are lists of them, and a primitive called on a list is called on each.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from megasched.errors import Problem, ScheduleError
from megasched.language.module_paths import ModulePaths
from megasched.language.parallel_dims import ParallelDims, current_layout
from megasched.language.records import Record, caller_source
from megasched.language.registry import Primitive, check_arguments, get_primitive, has_primitive
from megasched.language.replacements import ReplacedModel, Replacements
from megasched.language.roles import Roles

if TYPE_CHECKING:
    from torch import nn

    from megasched.language.primitive_calls import PrimitiveCalls  # a stub alone: written from the registry
else:
    PrimitiveCalls = object


@dataclass
class Root:
    """Holds the state that all nodes of one schedule share."""

    model: nn.Module
    layout: ParallelDims
    roles: Roles = field(default_factory=Roles)
    records: list[Record] = field(default_factory=list)
    renamed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    built: bool = False
    replacements: Replacements = field(default_factory=Replacements)

    def __post_init__(self) -> None:
        self.modules = ModulePaths(self.model, self.trial)

    def trial(self) -> ReplacedModel | None:
        """Returns the trial of the replacements that are asked for up to now; None without any.

        Once they are made, the model is no definition to try them on.
        """
        return self.replacements.last if self.built else self.replacements.trial(self.records, Schedule(self, ""))


class Schedule(PrimitiveCalls):
    """Represents the schedule of one module.

    Attributes:
        path: path of the module in the definition; the first one if it has several.
        mod: the module of the definition (not yet lowered); of one that a replacement brings in, what a trial on
            meta has made.
        parent: schedule of the module around it; None at the root.

    A schedule is truthy even if its module has no children; ``if "x" in sch`` tells whether there is a child
    ``x``.
    """

    def __init__(self, root: Root, path: str, module: nn.Module | None = None) -> None:
        self._root = root
        self._path = root.modules.first(path) if module is None else path
        self._module = module

    @property
    def path(self) -> str:
        return self._path

    @property
    def mod(self) -> nn.Module:
        found = self._root.modules.find(self.path) if self._module is None else self._module
        assert found is not None
        return found

    @property
    def parent(self) -> Schedule | None:
        return Schedule(self._root, self.path.rpartition(".")[0]) if self.path else None

    @property
    def root(self) -> Schedule:
        return Schedule(self._root, "")

    @property
    def layout(self) -> ParallelDims:
        return self._root.layout

    @property
    def roles(self) -> Roles:
        return self._root.roles

    @property
    def records(self) -> list[Record]:
        """Returns all records of this schedule, in the order of the calls."""
        return self._root.records

    @property
    def renamed(self) -> dict[str, tuple[str, ...]]:
        """Maps each parameter of a replaced module to the definition's that it is made of; filled by the build."""
        return self._root.renamed

    @property
    def memory(self) -> dict[str, Any]:
        """Returns data that primitives share in memory beside the records, for the whole schedule, e.g. graphs."""
        return self._root.memory

    @property
    def built(self) -> bool:
        """Returns whether ``megasched.build`` has carried this schedule out."""
        return self._root.built

    @built.setter
    def built(self, value: bool) -> None:
        self._root.built = value

    def role_of(self, path: str) -> str | None:
        """Returns the role that the adapter gives the module at this full path, e.g. ``mlp.down``, or None."""
        return self._root.roles.role.get(path)

    def role(self, name: str) -> ScheduleList:
        """Returns every module below this one with the role ``name`` (globs allowed: ``qkv.*``).

        Raises:
            ScheduleError: no module has the role; lists the existing roles.
        """
        roles = [(node, role) for node in self.below().values() if (role := self.role_of(node.path)) is not None]
        found = [node for node, role in roles if fnmatch.fnmatchcase(role, name)]
        if not found:
            known = ", ".join(sorted({role for _, role in roles})) or "none: no adapter knows this model"
            self._refuse(f"no module has the role {name!r}", f"roles here: {known}")
        return ScheduleList(found)

    def children(self) -> ScheduleList:
        """Returns the schedules of the direct child modules."""
        return ScheduleList([node for name, node in self.below().items() if "." not in name])

    def below(self) -> dict[str, Schedule]:
        """Returns every module of the definition below this one, by its relative name; the first one if shared."""
        found: dict[str, Schedule] = {}
        seen: set[str] = set()
        for name in self._root.modules.names_below(self.path):
            node = self._child(name)
            if node.path not in seen:
                seen.add(node.path)
                found[name] = node
        return found

    @property
    def child(self) -> dict[str, Schedule]:
        """Returns the schedules of the child modules by name; those in a ``ModuleList`` as ``layers.0``."""
        found: dict[str, Schedule] = {}
        for name, module in self.mod.named_children():
            if any(base.__name__ == "ModuleList" for base in type(module).__mro__):
                found |= {
                    f"{name}.{index}": self._child(f"{name}.{index}") for index, _ in module.named_children()
                }
            else:
                found[name] = self._child(name)
        return found

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, Schedule]]:
        """Yields this schedule and all below it, children before their siblings, each with its name.

        Args:
            prefix: name of this one; the others have it in front.
        """
        yield prefix, self
        for name, node in self.child.items():
            yield from node.named_schedules(f"{prefix}.{name}" if prefix else name)

    def get_module(self, name: str) -> nn.Module:
        """Returns the module of the definition at this path below; this one itself for an empty path.

        Raises:
            ScheduleError: there is none.
        """
        return self[name].mod if name else self.mod

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self.children())

    def __len__(self) -> int:
        return len(self.children())

    def __bool__(self) -> bool:
        return True

    def __contains__(self, path: str) -> bool:
        return self._root.modules.find(self._join(path)) is not None

    @overload
    def __getitem__(self, key: slice) -> ScheduleList: ...
    @overload
    def __getitem__(self, key: int) -> Schedule: ...
    @overload
    def __getitem__(self, key: str) -> Schedule: ...  # a list of them where the key is a glob, called as one is
    def __getitem__(self, key: str | int | slice) -> Schedule | ScheduleList:
        if isinstance(key, slice):
            return self.children()[key]
        if isinstance(key, int):
            children = self.children()
            if not -len(children) <= key < len(children):
                self._refuse(f"no child {key} in {self.path or 'the model'}", f"it has {len(children)}")
            return children[key]
        if any(sign in key for sign in "*?["):
            return self._glob(key)
        if self._root.modules.find(self._join(key)) is None:
            self._refuse(f"no module {key!r} in {self.path or 'the model'}", self._suggest(key))
        return self._child(key)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        _must_be_primitive(name)
        primitive = get_primitive(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if primitive.of_definition and self.path not in self._root.modules.of_definition:
                what = f"{name}: a replacement brings this module in, and {name} is of modules of the definition"
                self._refuse(what, "leave the call out, or call it on a module that stays")
            check_arguments(primitive, self, args, kwargs)
            kept = primitive.record(self, *args, **kwargs)
            if not primitive.leaves_record:
                return kept
            self.records.extend(_records(primitive, self.path, kept, caller_source()))
            return self

        call.__doc__ = primitive.__doc__
        call.__name__ = name
        return call

    def __repr__(self) -> str:
        return f"Schedule({self.path or '<model>'!r}, {type(self.mod).__name__})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and (self._root, self.path) == (other._root, other.path)

    def __hash__(self) -> int:
        return hash((id(self._root), self.path))

    def _join(self, path: str) -> str:
        return f"{self.path}.{path}" if self.path and path else self.path or path

    def _child(self, path: str) -> Schedule:
        return Schedule(self._root, self._join(path))

    def _glob(self, pattern: str) -> ScheduleList:
        """Returns the modules that match a glob, as they are after the replacements up to now.

        ``*`` stands for one name of the path, as in HF's plans, ``**`` for any number of them, zero included.
        """
        parts = pattern.split(".")

        def matching(*, now: bool) -> list[Schedule]:
            names = self._root.modules.names_below(self.path, now=now)
            return [self._child(name) for name in names if matches_glob(parts, name.split("."))]

        nodes = matching(now=True) or matching(now=False)
        if not nodes:
            self._refuse(f"no module matches {pattern!r} in {self.path or 'the model'}", self._suggest(pattern))
        return ScheduleList(list({node.path: node for node in nodes}.values()))

    def _suggest(self, key: str) -> str:
        names = self._root.modules.names_below(self.path, now=True)
        close = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
        hint = self._root.modules.why_unknown(self._join(key))
        hint += f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        return f"{hint}its children are: {', '.join(name for name in names if '.' not in name) or 'none'}"

    def _refuse(self, what: str, remedy: str) -> None:
        raise ScheduleError(Problem(what, module=self.path, source=caller_source(), remedy=remedy))


def schedule_of(schedule: Schedule, path: str, module: nn.Module) -> Schedule:
    """Returns the schedule of a module that stands at a path after the replacements of a run."""
    return Schedule(schedule._root, path, module)


def matches_glob(pattern: Sequence[str], names: Sequence[str]) -> bool:
    """Returns whether a path, split at its dots, matches a glob, split likewise."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(matches_glob(pattern[1:], names[taken:]) for taken in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and matches_glob(pattern[1:], names[1:])


def _records(
    primitive: Primitive, path: str, kept: Mapping[str, Any] | Sequence[Mapping[str, Any]], source: str
) -> list[Record]:
    """Returns the records of one call, of which ``record`` has returned ``kept``."""
    several = [kept] if isinstance(kept, Mapping) else kept
    return [Record(primitive.name, path, arguments, source) for arguments in several]


def _must_be_primitive(name: str) -> None:
    if name.startswith("_") or not has_primitive(name):
        raise AttributeError(
            f"{name!r} is no primitive; megasched.list_primitives() lists them. "
            f'Child modules are items: sch["{name}"]'
        )


class ScheduleList(Sequence[Schedule], PrimitiveCalls):
    """Represents several schedules; a primitive or a path applies to each of them."""

    def __init__(self, items: Sequence[Schedule]) -> None:
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._items)

    @overload
    def __getitem__(self, key: int) -> Schedule: ...
    @overload
    def __getitem__(self, key: slice | str) -> ScheduleList: ...
    def __getitem__(self, key: slice | int | str) -> ScheduleList | Schedule:
        if isinstance(key, slice):
            return ScheduleList(self._items[key])
        if isinstance(key, int):
            return self._items[key]
        found: list[Schedule] = []
        for item in self._items:
            inner = item[key]
            found += inner if isinstance(inner, ScheduleList) else [inner]
        return ScheduleList(found)

    def role(self, name: str) -> ScheduleList:
        return ScheduleList([found for item in self._items for found in item.role(name)])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        _must_be_primitive(name)
        calls = [getattr(item, name) for item in self._items]

        def call(*args: Any, **kwargs: Any) -> Any:
            answers = [one(*args, **kwargs) for one in calls]
            return self if get_primitive(name).leaves_record else [found for answer in answers for found in answer]

        return call

    def __repr__(self) -> str:
        return f"ScheduleList({[item.path for item in self._items]})"


def create_schedule(model: nn.Module, layout: ParallelDims | None = None, roles: Roles | None = None) -> Schedule:
    """Returns an empty schedule of a model.

    Args:
        model: any ``nn.Module``; it is not changed before ``build``.
        layout: how the job is spread; by default the sizes of Megatron's process groups (one rank without them).
        roles: facts of an adapter about the model; none by default.
    """
    if layout is None:
        layout = current_layout()
    return Schedule(Root(model, layout, roles or Roles()), "")


def replay(records: Sequence[Record], schedule: Schedule) -> None:
    """Repeats the calls on another schedule, of the same model or of one with the same paths."""
    for record in records:
        node = schedule.root[record.path]
        primitive = get_primitive(record.primitive)
        kept = primitive.record(node, **record.arguments)
        schedule.records.extend(_records(primitive, node.path, kept, record.source))
