"""Keeps calls opaque in a traced graph: code that a graph must not look into runs live, in its present state.

Megatron's parallel layers communicate in custom autograd functions, whose backward a trace through them
would silently lose. So a call of such a module, or of a function given to ``call``, becomes one node.
While the graph is made, the node's result has the shapes and types that the real call returned in a run just
before it (the *probe*), so that local sizes of a TP rank show; while the graph runs, the real call is made.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from megasched.analysis.notes.python_state import inside
from megasched.analysis.notes.restorable_state import RestorableState
from megasched.errors import MegaschedError, Problem, ScheduleError

_HOLE = object()  # where a tensor stands in a flattened structure
_NUMBERS = bool | int | float | complex
_DATA = _NUMBERS | str | bytes | None | Enum | torch.Size | torch.dtype | torch.device | torch.layout
_DEEPEST = 6  # of what is in an object that is an argument


class Unfit(Exception):
    """Reports code that does more than a graph would do.

    Attributes:
        module: path of the module whose code it is, from the traced one.
        remedy: a remedy other than keeping the module a call, or empty.
    """

    def __init__(self, what: str, module: str = "", remedy: str = "") -> None:
        self.module, self.remedy = module, remedy
        super().__init__(what)


@dataclass
class TensorTree:
    """Represents nested arguments or results: the places of the tensors, and all other values."""

    spec: pytree.TreeSpec
    leaves: list[Any]

    @classmethod
    def take(cls, value: Any) -> tuple[TensorTree, list[torch.Tensor]]:
        """Returns the structure of a value, and its tensors in order."""
        leaves, spec = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return cls(spec, [_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]), tensors

    def put(self, tensors: Any) -> Any:
        """Returns the value with these tensors in it."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if leaf is _HOLE else leaf for leaf in self.leaves], self.spec)

    def is_of(self, tensors: Iterable[torch.Tensor], value: Any) -> bool:
        """Returns whether a value has this structure, holds these tensors, and otherwise the same objects."""
        other, held = self.take(value)
        mine, theirs = [*tensors, *self.others], [*held, *other.others]
        return other.spec == self.spec and list(map(id, mine)) == list(map(id, theirs))

    @property
    def objects(self) -> list[Any]:
        """Returns the values in it that are neither tensors nor plain data, such as a cache or an iterator."""
        return [value for value in self.others if not isinstance(value, _DATA)]

    @property
    def others(self) -> list[Any]:
        """Returns all values in it that are no tensors."""
        return [leaf for leaf in self.leaves if leaf is not _HOLE]


@dataclass
class OpaqueCall:
    """Represents a call that stays one node.

    Attributes:
        name: name of the node, e.g. ``self_attn.q_proj``.
        function: the live call.
        shapes: (shape, dtype, device) of each tensor that it returned in the probe.
        result: structure of its result.
        asked: path of the traced module, and ``file:line`` of the call that asked for the trace.
        arguments: structure of (args, kwargs); set once the graph is made.
        writes: numbers of the tensors in its arguments to which it writes.
        leaves: attributes of modules that it changes, by module and name.
    """

    name: str
    function: Callable[..., Any]
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]]
    result: TensorTree
    asked: tuple[str, str]
    arguments: TensorTree | None = None
    writes: list[int] = field(default_factory=list)
    leaves: dict[tuple[int, str], str] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Makes the live call, and returns its tensors: a single one, or a tuple of several.

        Raises:
            ScheduleError: it returns other numbers or shapes than in the probe, which the graph has taken over.
        """
        assert self.arguments is not None
        args, kwargs = self.arguments.put(tensors)
        result, found = TensorTree.take(self.function(*args, **kwargs))
        if result != self.result or [tensor.shape for tensor in found] != [shape for shape, _, _ in self.shapes]:
            raise ScheduleError(self._now(result, found))
        return found[0] if len(self.shapes) == 1 else tuple(found)

    def _now(self, result: TensorTree, found: list[torch.Tensor]) -> Problem:
        path, source = self.asked
        now = result.put([tuple(tensor.shape) for tensor in found])
        then = self.result.put([tuple(shape) for shape, _, _ in self.shapes])
        what = f"{self.name}, which stays a call in a graph, returns {now} now (tensors by shape), and returned "
        what += f"{then} when the graph was made, which would compute with that"
        return Problem(what, path, source, "keep the module whose code calls it a call, too")


@dataclass
class Recording:
    """Holds the opaque calls of one trace, in the order in which they are made.

    Attributes:
        root: the traced module.
        asked: path of the traced module, and ``file:line`` of the call that asked for the trace.
        calls: the calls.
        made: while the graph is made, how many calls have come; None in the probe.
        inside: whether the probe is inside of an opaque call: what it calls is its own affair.
        running: modules whose code runs, the innermost last.
        changed: names of what live calls have changed in their modules.
        elsewhere: names of what changed in the probe beside that.
        gone: attribute of a module -> its name and the live call that has changed it in the probe, once that call
            has come while the graph is made: what stands there is not what would.
    """

    root: nn.Module
    asked: tuple[str, str] = ("", "")
    calls: list[OpaqueCall] = field(default_factory=list)
    made: int | None = None
    inside: bool = False
    running: list[nn.Module] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    elsewhere: list[str] = field(default_factory=list)
    gone: dict[tuple[int, str], str] = field(default_factory=dict)
    _parameters: dict[int, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Notes the parameters that a run of the code begins with."""
        self.running = [self.root]
        self._parameters = {id(vars(module)): dict(module._parameters) for module in self.root.modules()}

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Notes within its body that the module's code runs."""
        self.running.append(module)
        try:
            yield
        finally:
            self.running.pop()

    def path_of(self, module: nn.Module) -> str:
        """Returns the path of a module from the traced one."""
        return next((path for path, one in self.root.named_modules() if vars(one) is vars(module)), "")

    def refuse_read(self, module: nn.Module, name: str) -> None:
        """Refuses to read an attribute that a live call sets.

        Raises:
            Unfit: it is one.
        """
        told = self.gone.get((id(vars(module)), name))
        if told is not None and not self.inside:
            home = self.running[-1]
            raise Unfit(told, "" if home is self.root else self.path_of(home))

    def probe(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a live call, and notes what it returns and what else it leaves.

        Raises:
            Unfit: it leaves what the code around it may read and a graph would not have.
        """
        owner = self.running[-1]
        given, tensors = TensorTree.take((args, kwargs))
        self._refuse_other_parameters(name, owner)
        before, versions = RestorableState(owner, values=False, outside=False), _versions(tensors)
        self.inside = True
        try:
            output = function(*args, **kwargs)
        finally:
            self.inside = False
        if not given.is_of(tensors, (args, kwargs)):
            raise _unfit(name, "changes a list or dictionary that it is handed", self.path_of(owner))
        result, found = TensorTree.take(output)
        if result.objects:
            kind = type(result.objects[0]).__name__
            raise _unfit(name, f"returns a {kind}, which a graph can't look into", self.path_of(owner))
        made = OpaqueCall(name, function, [(t.shape, t.dtype, t.device) for t in found], result, self.asked)
        made.writes = [index for index, one in enumerate(_versions(tensors)) if one != versions[index]]
        names = before.changed(RestorableState(owner, values=False, outside=False))
        made.leaves = _attributes(owner, names)
        prefix = self.path_of(owner)
        self.changed.update(".".join(filter(None, [prefix, one])) for one in names)
        self.calls.append(made)
        return output

    def replay(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Puts a marker of the next live call into the graph that is made, and returns what the call returned.

        Raises:
            MegaschedError: the code makes another call now.
            Unfit: an object that the call is handed holds values that the graph computes.
        """
        assert self.made is not None
        index, self.made = self.made, self.made + 1
        if index >= len(self.calls) or self.calls[index].name != name:
            raise MegaschedError(
                f"the forward calls {name} now, which it did not in the run before: it is not static"
            )
        made, owner = self.calls[index], self.running[-1]
        self._refuse_other_parameters(name, owner)
        made.function = function
        made.arguments, tensors = TensorTree.take((args, kwargs))
        for value in made.arguments.objects:
            if any(isinstance(tensor, FakeTensor) for tensor in _held(value)):
                what = f"is handed a {type(value).__name__} with tensors in it, which a graph can't look into"
                raise _unfit(name, what, self.path_of(owner))
        label = f"its code reads {{}}, which {name} sets, a call that a graph does not look into"
        self.gone |= {spot: label.format(attribute) for spot, attribute in made.leaves.items()}
        return made.result.put(torch.ops.megasched.opaque(index, tensors))

    def _refuse_other_parameters(self, name: str, owner: nn.Module) -> None:
        for module in owner.modules():
            held = self._parameters.get(id(vars(module)))
            if held is None:
                continue
            now = module._parameters
            if now.keys() != held.keys() or any(now[key] is not held[key] for key in held):
                what = "computes with other parameters than its own (functional_call), and would not in a graph"
                raise _unfit(name, what, self.path_of(owner))


def _unfit(name: str, what: str, module: str) -> Unfit:
    remedy = "keep the module whose code calls it a call, too"
    return Unfit(f"{name}, which stays a call, {what}", module, remedy)


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _attributes(owner: nn.Module, names: Iterable[str]) -> dict[tuple[int, str], str]:
    """Returns the attributes of modules that hold what has these names, by module and name."""
    modules = dict(owner.named_modules())
    found = {}
    for name in names:
        if name.startswith("len("):  # beside which its entries have names
            continue
        path = max((path for path in modules if not path or name.startswith(f"{path}.")), key=len)
        own = re.split(r"[.\[ ]", name.removeprefix(f"{path}." if path else ""))[0]
        found[(id(vars(modules[path])), own)] = own
    return found


def _held(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yields the tensors in an object of a class that torch does not look into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and not isinstance(value, nn.Module | type):
        for _, item, _ in inside(value):
            yield from _held(item, depth + 1)


_local = threading.local()  # a graph is made in a thread of its own


def active() -> Recording | None:
    """Returns the recording of the trace in progress in this thread, or None."""
    return getattr(_local, "recording", None)


@contextmanager
def recording(to: Recording) -> Iterator[None]:
    before, _local.recording = active(), to
    try:
        yield
    finally:
        _local.recording = before


def call(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)``, which stays one call in the graph of a module that is being traced."""
    current = active()
    if current is None or current.inside:
        return function(*args, **kwargs)
    return (current.probe if current.made is None else current.replay)(name, function, args, kwargs)


torch.library.define("megasched::opaque", "(int index, Tensor[] tensors) -> Tensor[]")


@torch.library.register_fake("megasched::opaque")
def _opaque_shapes(index: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    current = active()
    assert current is not None
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in current.calls[index].shapes]


def _no_backward(ctx: Any, *gradients: Any) -> Any:
    raise MegaschedError("a marker of a live call is never run")


# So that what depends on a marker requires gradients while the graph is made, as it does when the graph runs.
torch.library.register_autograd("megasched::opaque", _no_backward)
