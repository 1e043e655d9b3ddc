"""Extracts operations from a graph: checks that they form one part, cuts it out, and runs a replacement."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import fx
from torch.fx.passes.utils.fuser_utils import fuse_as_graphmodule, validate_partition

from megasched.analysis.recording.operators import storage_of
from megasched.errors import Problem, ScheduleError
from megasched.graph.capture import Graph
from megasched.graph.effects import tensors_of, written_by
from megasched.graph.naming import covered_by
from megasched.language.subgraph import Subgraph

# How the same values in the same type come out again; in the type that training uses they may convert.
CASTS = (torch.ops.aten.to.dtype, torch.ops.aten.to.device, torch.ops.aten._to_copy.default)


@dataclass
class ExtractedSubgraph:
    """Holds the input of a compiler.

    Attributes:
        graph: takes ``subgraph.inputs`` in their order (parameters among them); returns a tensor, or a tuple.
        subgraph: its names.
        kept: storage for the compiler, shared by all forms of call.
    """

    graph: fx.GraphModule
    subgraph: Subgraph
    kept: dict[str, Any]


@dataclass
class Edit:
    """Describes the replacement of a part of a graph.

    Attributes:
        subgraph: the part.
        make: takes the part, returns the function that runs in its place.
        source: ``file:line`` of the call.
        inlined: ``make`` looks inside, so that the part must have no live calls.
        title: name of the call in the graph's code; empty for any.
    """

    subgraph: Subgraph
    make: Callable[[ExtractedSubgraph], Callable[..., Any]]
    source: str = ""
    inlined: bool = False
    title: str = ""
    kept: dict[str, Any] = field(default_factory=dict)


def is_idle_cast(node: fx.Node) -> bool:
    """Returns whether a conversion has no effect in this trace: its result has its input's dtype and device."""
    if node.target not in CASTS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    return (
        before is not None and after is not None and (before.dtype, before.device) == (after.dtype, after.device)
    )


def uncast(node: fx.Node) -> fx.Node:
    """Returns the node that a chain of idle casts starts from."""
    while is_idle_cast(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def check_subgraph(
    graph: Graph, subgraph: Subgraph, path: str, source: str = "", *, inlined: bool = False
) -> list[Problem]:
    """Returns the problems that keep these operations from being handled as one."""
    missing = [name for name in subgraph.nodes if name not in graph.names]
    if missing:
        what = f"the graph has no operation {', '.join(missing)}"
        remedy = f"it has: {', '.join(graph.names)}"
        module = covered_by(graph.names, missing[0])
        if module:
            what += f": {module} is one call in it, since it is a leaf, or hooked or wrapped (recomputed, for one)"
            inner = ".".join(filter(None, [path, module]))
            remedy = f'trace that module by itself, sch["{inner}"].trace(): what is around it then stays around it'
        return [Problem(what, path, source, remedy)]
    nodes = [graph.names[name] for name in subgraph.nodes]
    if apart := _apart(graph, nodes):
        what = (
            f"the sub-graph ends within what {apart[0]} returns: several tensors, each of which an operation takes"
        )
        return [Problem(what, path, source, f"join {' | '.join(apart)}")]
    # Conversions count, too: what is idle here converts in a run of another type.
    if not validate_partition(nodes):
        what = "an operation outside of the sub-graph lies between two inside of it: " + ", ".join(subgraph.nodes)
        return [Problem(what, path, source, "take the one between in as well, or two sub-graphs")]
    if all(node.target in CASTS for node in nodes):
        names = ", ".join(subgraph.nodes)
        what = f"the sub-graph only converts types, which in a run of that type does nothing: {names}"
        return [Problem(what, path, source, "join it with what reads the result, by |")]
    if all(user in nodes for node in nodes for user in node.users):
        return [_unneeded(subgraph, path, source)]
    writing = [name for name in subgraph.nodes if _writes(graph.names[name])]
    if writing:
        what = f"the sub-graph writes in place: {', '.join(writing)}"
        return [Problem(what, path, source, "leave these operations out of it")]
    if (writer := _overtaken(nodes)) is not None:
        name = next(name for name, node in graph.names.items() if node is writer)
        what = (
            f"{name}, within the sub-graph and no part of it, writes to what operations read that would then run "
        )
        what += f"on the other side of it: {', '.join(subgraph.nodes)}"
        return [Problem(what, path, source, "take what lies before it and behind it as two sub-graphs")]
    calls = [name for name in subgraph.nodes if "opaque" in graph.names[name].meta]
    if calls and inlined:
        what = f"the sub-graph holds live calls, which can't be compiled: {', '.join(calls)}"
        remedy = "fuse what lies before and behind as two sub-graphs; to take in the bias of a linear, call "
        remedy += f'sch["{path}.<linear>"].decompose() before trace()'
        return [Problem(what, path, source, remedy)]
    return []


def _unneeded(subgraph: Subgraph, path: str, source: str) -> Problem:
    what = f"nothing outside of the sub-graph needs what it computes: {', '.join(subgraph.nodes)}"
    return Problem(what, path, source, "leave this call out")


def _apart(graph: Graph, nodes: Sequence[fx.Node]) -> list[str]:
    """Returns the names of an operation with several results and of those that take each, where a part has some.

    Only tensors can go into and out of a part; the list that such an operation returns is none. Empty where there
    is no such operation.
    """
    names = {node: name for name, node in graph.names.items()}
    for node in nodes:
        made = node.args[0] if node.target is operator.getitem else node
        if isinstance(made, fx.Node) and isinstance(made.meta.get("val"), list | tuple):
            together = [one for one in (made, *made.users) if one in names]
            if not set(together) <= set(nodes):
                return [names[one] for one in together]
    return []


def _dependents(members: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the operations between the first member and the last that need a result of one, in their order."""
    depends, found, node = set(members), [], members[0]
    while node is not members[-1].next:
        if node not in depends and any(source in depends for source in node.all_input_nodes):
            depends.add(node)
            found.append(node)
        node = node.next
    return found


def _overtaken(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Returns an operation that writes to what another reads or returns and that would change places with it.

    The members run where the last one stands, and behind it what needs their results (``_put``).
    """
    members = [node for node in nodes[0].graph.nodes if node in set(nodes)]
    late = {**dict.fromkeys(members, 1), **dict.fromkeys(_dependents(members), 2)}
    span = [members[0]]
    while span[-1] is not members[-1]:
        span.append(span[-1].next)
    for at, writer in enumerate(span):
        written = {storage_of(tensor) for tensor in written_by(writer)}
        for index, node in enumerate(span if written else ()):
            shift = late.get(node, 0) - late.get(writer, 0)
            overtakes = shift > 0 if index < at else shift < 0
            if overtakes and not written.isdisjoint(map(storage_of, tensors_of([node, *node.all_input_nodes]))):
                return writer
    return None


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_tangled(graph: Graph, parts: Iterable[Sequence[str]]) -> bool:
    """Returns whether these parts can't all be single calls, because they would wait for each other."""
    owner: dict[fx.Node, int] = {}
    for index, part in enumerate(parts):
        owner |= dict.fromkeys([graph.names[name] for name in part], index)
    after: dict[Any, set[Any]] = {}
    for node in graph.module.graph.nodes:
        mine = owner.get(node, node)
        after.setdefault(mine, set()).update(
            theirs for user in node.users if (theirs := owner.get(user, user)) != mine
        )
    try:
        list(TopologicalSorter(after).static_order())
    except CycleError:
        return True
    return False


def apply_edit(graph: Graph, edit: Edit, path: str) -> None:
    """Makes the part run by the function that ``edit`` makes of it.

    Raises:
        ScheduleError: the part is not in this graph, or can't be taken out of it.
    """
    problems = check_subgraph(graph, edit.subgraph, path, edit.source, inlined=edit.inlined)
    if problems:
        raise ScheduleError(problems)
    module = graph.module
    nodes = [graph.names[name] for name in edit.subgraph.nodes]
    idle = {node: uncast(node) for node in nodes if is_idle_cast(node)}
    for node, before in idle.items():
        node.replace_all_uses_with(before, delete_user_cb=lambda user: user not in nodes)
    members = [node for node in module.graph.nodes if node in set(nodes)]
    part, inputs, outputs = fuse_as_graphmodule(module, members, "Part")
    if not outputs:  # only what idle casts return is read
        raise ScheduleError(_unneeded(edit.subgraph, path, edit.source))
    if edit.subgraph.inputs:
        inputs = _in_order(graph, edit, part, inputs, path)
    known = replace(edit.subgraph, inputs=_names_of(graph, inputs))
    run = edit.make(ExtractedSubgraph(part, known, edit.kept))
    now = _put(module, members, inputs, outputs, _checked(run, outputs, path, edit))
    _name_again(graph, edit.subgraph.nodes, {**idle, **now})


def _name_again(graph: Graph, names: Iterable[str], now: Mapping[fx.Node, fx.Node]) -> None:
    """Updates names for later edits: extracted operations lose theirs, and results name their replacement."""
    for name in names:
        node = graph.names.pop(name)
        if node in now:
            graph.names[name] = now[node]


def _names_of(graph: Graph, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    names = {node: name for name, node in reversed([*graph.inputs.items(), *graph.names.items()])}
    return tuple(names[node] for node in nodes)


def _in_order(
    graph: Graph, edit: Edit, part: fx.GraphModule, inputs: Sequence[fx.Node], path: str
) -> tuple[fx.Node, ...]:
    """Orders the part's placeholders as the sub-graph listed its inputs, and returns the inputs in that order.

    An input that is listed twice is read once.
    """
    order = [graph.names.get(name) or graph.inputs.get(name) for name in edit.subgraph.inputs]
    if set(order) != set(inputs):
        what = f"the sub-graph reads {', '.join(_names_of(graph, inputs))} when it runs, "
        what += f"and read {', '.join(edit.subgraph.inputs)} when it was found"
        raise ScheduleError(Problem(what, path, edit.source, "find it in the model as it is trained"))
    placeholders = dict(zip(inputs, [n for n in part.graph.nodes if n.op == "placeholder"], strict=True))
    anchor = next(iter(part.graph.nodes)).prev
    for node in order:
        placeholder = placeholders.pop(node, None) or part.graph.placeholder("again")
        anchor.append(placeholder)
        anchor = placeholder
    part.recompile()
    return tuple(order)  # type: ignore[arg-type]  # none is missing: the inputs are all


def _checked(run: Callable[..., Any], outputs: Sequence[fx.Node], path: str, edit: Edit) -> Callable[..., Any]:
    """Returns ``run``, named as asked, with a check at the first call: results have the shapes of the part's."""
    wanted = [tuple(node.meta["val"].shape) for node in outputs]
    told = False

    def checked(*tensors: torch.Tensor) -> Any:
        nonlocal told
        result = run(*tensors)
        if not told:
            found = [tuple(t.shape) for t in (result if isinstance(result, tuple | list) else (result,))]
            if found != wanted:
                what = f"what runs in the sub-graph's place returns shapes {found}, the sub-graph {wanted}"
                raise ScheduleError(Problem(what, path, edit.source, "return what the sub-graph returns"))
            told = True
        return result

    checked.__name__ = checked.__qualname__ = edit.title or "checked"
    return checked


def _put(
    module: fx.GraphModule,
    members: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    run: Callable[..., Any],
) -> dict[fx.Node, fx.Node]:
    """Calls ``run`` in the place of the members, and moves operations that depend on them behind it.

    Returns:
        The replacement of each output.
    """
    waiting, last = _dependents(members), members[-1]
    for node in waiting:
        last.append(node)
        last = node
    with module.graph.inserting_after(members[-1]):
        new = module.graph.call_function(run, tuple(inputs))
    new.meta = dict(outputs[0].meta)
    now = {outputs[0]: new}
    if len(outputs) > 1:
        place = new
        for index, output in enumerate(outputs):
            with module.graph.inserting_after(place):
                place = now[output] = module.graph.call_function(_item, (new, index))
            place.meta = dict(output.meta)
    for output, place in now.items():
        output.replace_all_uses_with(place, delete_user_cb=lambda user: user not in members)
    for node in reversed(members):
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return now


def _item(values: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return values[index]
