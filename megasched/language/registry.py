"""Registers primitives: which exist, how they are carried out, and where their documentation is.

Built-in primitives and third parties' are both found through the entry point group ``megasched.primitives``:
importing the module named there registers the primitives that it defines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, overload

from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language.records import Record, caller_source
from megasched.language.signatures import unfit

if TYPE_CHECKING:
    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.roles import Roles

GROUP = "megasched.primitives"
LOWERINGS = "megasched.lowerings"

Phase = Literal["edit", "plan", "graph", "lowered"]
# How a record is carried out: gets the lowered module, the record and a ``BuildContext``.
Lowering = Callable[[Any, Record, Any], None]


class Node(Protocol):
    """Describes the attributes of a ``Schedule`` that a primitive sees of the module it is called on."""

    @property
    def path(self) -> str: ...
    @property
    def mod(self) -> Any: ...
    @property
    def parent(self) -> Node | None: ...
    @property
    def root(self) -> Node: ...
    @property
    def layout(self) -> ParallelDims: ...
    @property
    def roles(self) -> Roles: ...
    @property
    def records(self) -> list[Record]: ...
    @property
    def renamed(self) -> dict[str, tuple[str, ...]]: ...
    @property
    def memory(self) -> dict[str, Any]: ...
    @property
    def built(self) -> bool: ...
    def role_of(self, path: str) -> str | None: ...
    def role(self, name: str) -> Iterable[Node]: ...
    def children(self) -> Iterable[Node]: ...
    def below(self) -> Mapping[str, Node]: ...
    @property
    def child(self) -> Mapping[str, Node]: ...
    def named_schedules(self, prefix: str = "") -> Iterable[tuple[str, Node]]: ...
    def get_module(self, name: str) -> Any: ...
    def __contains__(self, path: str) -> bool: ...
    def __getitem__(self, key: str) -> Node: ...


class Primitive:
    """Defines one transformation: a subclass states what its calls record, and how each phase treats the records.

    Attributes that a subclass does not set have safe defaults: its record is carried out on the lowered module,
    and optimisations that would change that module (a fused product, Megatron's layer around it) are left out.

    Attributes:
        name: method name on a schedule.
        aliases: other method names.
        leaves_record: whether a call is recorded; otherwise the call returns what ``record`` returns.
        phase: what carries a record out. ``edit`` changes the definition before planning, ``plan`` decides on
            placement and computation, ``graph`` works on traced modules, and ``lowered`` calls the primitive's own
            function (``register_lowering``) on the lowered module.
        replaces_modules: other modules replace the definition's.
        survives_replacement: the record is also valid on a module that replacements take away; others are refused.
        of_weights: a call is about the module's own parameters, and holds where a replacement puts them.
        of_definition: a call can't be made on a module that a replacement brings in.
        acts_on_calls: it changes or watches what happens when the module is called, so that it is refused on one
            whose class has no forward, such as a ``ModuleList``; unless it is about a sub-graph.
        keeps_product: a column linear still computes the matrix product of the definition, so that one product may
            compute it together with others.
        on_megatron_module: a call on a module is carried out on Megatron's own module that replaces it.
        inside_megatron_module: a call on a submodule of a module that Megatron's own replaces is allowed, though
            the submodule is gone then.
        one_call_in_graph: whether the module is one call in the graph of a traced module around it.
        makes_graph: the module's code is traced, and runs as a graph.
        takes_subgraph: an argument ``subgraph``, if given, is checked as operations of the traced module; records
            get it through ``record_subgraph``.
        inlines_subgraph: the replacement looks inside these operations, so that no live call can be among them.
        runs_code_again: the module's code may run more often than its model is called.
        chooses_trained: the records decide which parameters are trained.
        shown_by_effect: ``megasched show`` prints the effect on the module, and need not name the call.
        instead: arguments that Slapo's primitive of this name takes and this one does not -> what to do instead.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    leaves_record: ClassVar[bool] = True
    phase: ClassVar[Phase] = "lowered"
    replaces_modules: ClassVar[bool] = False
    survives_replacement: ClassVar[bool] = False
    of_weights: ClassVar[bool] = False
    of_definition: ClassVar[bool] = False
    acts_on_calls: ClassVar[bool] = False
    keeps_product: ClassVar[bool] = False
    on_megatron_module: ClassVar[bool] = True
    inside_megatron_module: ClassVar[bool] = False
    one_call_in_graph: ClassVar[Literal["never", "always", "unless sharded"]] = "never"
    makes_graph: ClassVar[bool] = False
    takes_subgraph: ClassVar[bool] = False
    inlines_subgraph: ClassVar[bool] = False
    runs_code_again: ClassVar[bool] = False
    chooses_trained: ClassVar[bool] = False
    shown_by_effect: ClassVar[bool] = False
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def record(self, node: Node, *args: Any, **kwargs: Any) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """Returns the arguments to keep, by name; it changes nothing and does nothing expensive.

        A call that stands for several returns the arguments of each, and leaves as many records.
        """
        raise NotImplementedError(f"primitive {self.name} defines no record()")

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        """Returns problems of this call that the definition alone shows; collected over the whole schedule."""
        return []

    def paths(self, node: Node, arguments: Mapping[str, Any]) -> list[str]:
        """Returns the paths of the modules that this call affects: by default the one that it is made on."""
        return [node.path]


# What a schedule has of its own under these names would hide a primitive.
RESERVED = frozenset(name for name in vars(Node) if not name.startswith("_"))
_PRIMITIVES: dict[str, Primitive] = {}
_LOWERINGS: dict[str, Lowering] = {}


@overload
def register_primitive[P: type[Primitive]](cls: P) -> P: ...
@overload
def register_primitive[P: type[Primitive]](cls: None = None) -> Callable[[P], P]: ...
def register_primitive(cls: type[Primitive] | None = None) -> Any:
    """Registers a primitive class, so that it is callable on every schedule under its name and aliases.

    A decorator, with parentheses or without. A file that runs again (a schedule file) may register its classes
    again.

    Raises:
        ConfigError: another class has the name, a schedule has a method or attribute of this name, or the class is
            no primitive.
    """
    if cls is None:
        return register_primitive
    _refuse_other_form(cls)
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


def _refuse_other_form(cls: type) -> None:
    """Raises ConfigError for a class that is no primitive, or has the form of Slapo's."""
    if not (isinstance(cls, type) and issubclass(cls, Primitive) and isinstance(getattr(cls, "name", None), str)):
        raise ConfigError(
            f"{cls!r} is no primitive: one is a subclass of megasched.Primitive with a string name; its record() "
            "returns what a call keeps, and a function under @megasched.register_lowering(name) carries that out "
            "on the module"
        )


def register_lowering(primitive: str) -> Callable[[Lowering], Lowering]:
    """Registers a function that carries out the records of this primitive on the lowered module.

    The function gets (module, record, context) after all parallel layers are in place; records are carried
    out in the order of the calls. A file that runs again (a schedule file) may register its function again.

    Raises:
        ConfigError: another function is registered for the primitive, or another phase carries it out.
    """

    def decorate(function: Lowering) -> Lowering:
        known = _LOWERINGS.get(primitive, function)
        same = (known.__module__, known.__qualname__) == (function.__module__, function.__qualname__)
        other_phase = has_primitive(primitive) and get_primitive(primitive).phase != "lowered"
        if other_phase or not same:
            raise ConfigError(f"a lowering of {primitive!r} is registered already, by {known.__module__}")
        _LOWERINGS[primitive] = function
        return function

    return decorate


@cache
def load_group(group: str) -> None:
    """Imports, once, the modules that installed packages name in a group of entry points."""
    for point in entry_points(group=group):
        point.load()


def has_lowering(primitive: Primitive) -> bool:
    """Returns whether records of this primitive can be carried out, by a phase or by its own function."""
    load_group(LOWERINGS)
    return primitive.phase != "lowered" or primitive.name in _LOWERINGS


def get_lowering(primitive: str) -> Lowering:
    """Returns the function that carries out records of this primitive; ask ``has_lowering`` first."""
    load_group(LOWERINGS)
    return _LOWERINGS[primitive]


@dataclass(frozen=True)
class SubgraphRules:
    """Holds the functions of ``megasched.graph`` that record and check an argument ``subgraph``.

    Attributes:
        record: maps (primitive, node, value) to the data that a record keeps.
        check: maps (primitive, node, arguments, source) to the argument's problems within the whole schedule.
    """

    record: Callable[[Primitive, Node, Any], dict[str, Any]]
    check: Callable[[Primitive, Node, Mapping[str, Any], str], list[Problem]]


_SUBGRAPH_RULES: list[SubgraphRules] = []


def register_subgraph_rules(rules: SubgraphRules) -> None:
    """Registers the rules by which arguments called ``subgraph`` are recorded and checked."""
    _SUBGRAPH_RULES[:] = [rules]


def record_subgraph(primitive: Primitive, node: Node, value: Any) -> dict[str, Any]:
    """Returns the data that a record keeps of a sub-graph passed to a primitive.

    Raises:
        ScheduleError: it is not part of this traced module, or can't be handled as one.
    """
    load_group(GROUP)
    return _SUBGRAPH_RULES[0].record(primitive, node, value)


def check_arguments(primitive: Primitive, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Compares the arguments of a call with those that the primitive takes, and with the types that it declares.

    Raises:
        ScheduleError: it does not take them; says what to do instead of an argument of Slapo's.
    """
    try:
        bound = inspect.signature(primitive.record).bind(node, *args, **kwargs).arguments
    except TypeError as error:
        instead = [f"{name}: {primitive.instead[name]}" for name in kwargs if name in primitive.instead]
        remedy = "; ".join(instead) or call_of(primitive)
        raise ScheduleError(Problem(f"{primitive.name}: {error}", node.path, caller_source(), remedy)) from error
    wrong = [f"{name}={bound[name]!r} is no {declared}" for name, declared in unfit(primitive.record, bound)]
    if wrong:
        what = f"{primitive.name}: {', '.join(wrong)}"
        raise ScheduleError(Problem(what, node.path, caller_source(), call_of(primitive)))


def check_call(node: Node, record: Record) -> list[Problem]:
    """Returns the problems of one call, found by its primitive and by the rules for its arguments."""
    primitive = get_primitive(record.primitive)
    problems = primitive.check(node, record.arguments, record.source)
    if primitive.takes_subgraph and "subgraph" in record.arguments:
        problems = [*problems, *_SUBGRAPH_RULES[0].check(primitive, node, record.arguments, record.source)]
    return problems


def records_where(records: Iterable[Record], holds: Callable[[Primitive], bool]) -> list[Record]:
    """Returns the records whose primitive fulfils the condition, in their order."""
    return [record for record in records if holds(get_primitive(record.primitive))]


def has_primitive(name: str) -> bool:
    load_group(GROUP)
    return name in _PRIMITIVES


def get_primitive(name: str) -> Primitive:
    """Returns the primitive of this name or alias.

    Raises:
        ConfigError: there is none; lists the existing ones.
    """
    if not has_primitive(name):
        raise ConfigError(f"no primitive {name!r}; there are: {', '.join(list_primitives(name_only=True))}")
    return _PRIMITIVES[name]


@overload
def list_primitives(*, name_only: Literal[True]) -> list[str]: ...
@overload
def list_primitives(*, name_only: Literal[False] = False) -> dict[str, str]: ...
def list_primitives(*, name_only: bool = False) -> list[str] | dict[str, str]:
    """Returns the names of all primitives, or a dictionary of name -> documentation."""
    load_group(GROUP)
    own = {primitive.name: primitive for primitive in _PRIMITIVES.values()}
    if name_only:
        return sorted(own)
    return {name: document(own[name]) for name in sorted(own)}


def call_of(primitive: Primitive) -> str:
    """Returns the signature of a primitive's call on a schedule: ``shard(param, axis)``."""
    signature = inspect.signature(primitive.record)
    parameters = [p for name, p in signature.parameters.items() if name != "node"]
    return f"{primitive.name}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"


def document(primitive: Primitive) -> str:
    """Returns the signature and documentation of a primitive as text."""
    also = f"\n\nAlso known as: {', '.join(primitive.aliases)}" if primitive.aliases else ""
    return f"{call_of(primitive)}\n\n{inspect.getdoc(primitive) or ''}{also}"
