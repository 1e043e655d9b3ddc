"""Primitives on static graphs: ``trace``, ``trace_until``, ``find``, ``fuse`` and ``decompose``.

They are registered as third parties' are: the entry point group ``megasched.primitives`` names this module. With
them comes what the language asks of the floors above it: the rules of sub-graphs, and the trial of replacements.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megasched.definition.linears import is_linear
from megasched.errors import Problem, ScheduleError
from megasched.language.lora import is_linear_class
from megasched.language.records import caller_source
from megasched.language.registry import (
    Node,
    Primitive,
    SubgraphRules,
    records_where,
    register_primitive,
    register_subgraph_rules,
)
from megasched.language.replacements import register_replacement_trial
from megasched.language.subgraph import Subgraph

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megasched.graph.naming import GraphNode
    from megasched.graph.patterns import Pattern
    from megasched.language.replacements import ReplacedModel


class _MakesGraph(Primitive):
    phase = "graph"
    of_definition = True
    on_megatron_module = False
    makes_graph = True
    runs_code_again = True

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        return _check_traces(node, arguments, source)


@register_primitive
class Trace(_MakesGraph):
    """Makes a static graph of this one module, for ``find``, ``fuse``, and partial ``replace`` and ``checkpoint``.

    Parameters:
        leaves: submodules that stay calls: paths below this module, globs, regular expressions, classes or their
            names.
        flatten: look into submodules, as is the default; otherwise each child stays a call.
        inputs: example tensors by parameter, for a module that a trial call of the model does not reach.
        recursive: False is Slapo's spelling of ``flatten=False``; True of the default.
        leaf_modules: another name of ``leaves``, which is Slapo's.

    Linears, embeddings and attention always stay calls, of what stands there when the model runs. Paths,
    parameter names and state-dict keys stay. A module that can't be traced is refused at this line.

    Example: ``sch["model.layers.0.mlp"].trace()``
    """

    name = "trace"
    instead = {  # noqa: RUF012
        "concrete_args": "leave it out: the graph is of the call that the model makes, with its arguments",
        "tracer": "leave it out: torch.export makes the graph",
    }

    def record(
        self,
        node: Node,
        leaves: Sequence[str | type[nn.Module]] = (),
        flatten: bool | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        *,
        recursive: bool | None = None,
        leaf_modules: Sequence[str | type[nn.Module]] = (),
    ) -> Mapping[str, Any]:
        from megasched.graph.definition_graphs import chosen_leaves, shapes_of, standing_leaves, trial_of

        if recursive and flatten is False:
            what = "trace: recursive=True with flatten=False asks for a graph of each child, too"
            remedy = "leave both out, and one graph looks into the children; or call trace on each that you mean"
            raise ScheduleError(Problem(what, node.path, caller_source(), remedy))
        into = recursive is not False if flatten is None else flatten
        chosen = set(chosen_leaves(node.mod, [*leaves, *leaf_modules], node.path))
        if not into:
            chosen |= {name for name, _ in node.mod.named_children()}
        shapes = shapes_of(inputs)
        trial_of(node).trace(node.path, frozenset(chosen | standing_leaves(node.mod)), shapes)
        return {"leaves": tuple(sorted(chosen)), "flatten": into, "inputs": shapes}


@register_primitive
class TraceUntil(_MakesGraph):
    """Makes a static graph of this module down to the modules named, which stay calls.

    Parameters:
        where: path or glob below this module, or a function of (path, module); the outermost that match count.
        inputs: as in ``trace``.

    Example: ``sch["model"].trace_until("layers.*")`` shows how a model calls its layers.
    """

    name = "trace_until"

    def record(
        self,
        node: Node,
        where: str | Callable[[str, nn.Module], bool] | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        leaves: tuple[str, ...] = (),
    ) -> Mapping[str, Any]:
        from megasched.graph.definition_graphs import reached, shapes_of, standing_leaves, trial_of

        # A record keeps what was reached, so that a function need not be saved.
        chosen = leaves if where is None else reached(node.mod, where, node.path)
        shapes = shapes_of(inputs)
        trial_of(node).trace(node.path, frozenset({*chosen, *standing_leaves(node.mod)}), shapes)
        return {"leaves": tuple(chosen), "inputs": shapes}


@register_primitive
class Find(Primitive):
    """Sub-graphs of a traced module that match, as a list; it leaves no record.

    Parameters:
        what: a regular expression that matches whole names of operations (each its own sub-graph; join them
            with ``|``); a pattern: a function of tensors, a module, or one of ``megasched.graph.patterns``; or a
            function of one ``node``, as in ``find_node``.
        missing_ok: return an empty list where nothing matches, which is an error otherwise.
        examples: parameter of a pattern -> shape of an example, where [b, s, h] does not fit.

    Example: ``sch["model.layers.0.mlp"].find(patterns.swiglu)``
    """

    name = "find"
    aliases = ("find_subgraph",)
    leaves_record = False
    phase = "graph"
    of_definition = True
    instead = {"regex_or_pattern_fn": "here it is called what", "pattern_fn": "here it is called what"}  # noqa: RUF012

    def record(
        self,
        node: Node,
        what: str | Callable[..., torch.Tensor | bool] | nn.Module | Pattern,
        missing_ok: bool = False,
        examples: Mapping[str, Any] | None = None,
    ) -> list[Subgraph]:  # type: ignore[override]
        from megasched.graph.definition_graphs import graph_of
        from megasched.graph.patterns import as_pattern

        if isinstance(what, str) or _chooses_nodes(what):
            return _find_nodes(node, what, missing_ok)
        pattern = as_pattern(what, examples, node.path)
        found = pattern.find(graph_of(node), node.path)
        return _found_or_refused(node, found, pattern.name or "the pattern", missing_ok)


@register_primitive
class FindNode(Primitive):
    """Single operations of a traced module, each as a sub-graph, in a list; it leaves no record.

    Parameters:
        what: a regular expression that matches whole names; or a function that takes a node and returns whether
            it is meant. A node has a ``name``, an ``op`` (``call_module`` or ``call_function``), a ``target`` (the
            path of that module, or torch's operator), an ``operation`` (``silu``), a ``module`` (whose code runs
            it) and ``args`` (names of what it reads).
        missing_ok: return an empty list where nothing matches, which is an error otherwise.

    Example: ``mlp.find_node(lambda node: node.operation == "silu")``
    """

    name = "find_node"
    leaves_record = False
    phase = "graph"
    of_definition = True
    instead = Find.instead

    def record(
        self, node: Node, what: str | Callable[[GraphNode], bool], missing_ok: bool = False
    ) -> list[Subgraph]:  # type: ignore[override]
        return _find_nodes(node, what, missing_ok)


def _chooses_nodes(what: Any) -> bool:
    """Returns whether a function chooses among nodes: its one parameter is called so. A pattern's are tensors."""
    return inspect.isfunction(what) and list(inspect.signature(what).parameters) == ["node"]


def _find_nodes(node: Node, what: Any, missing_ok: bool) -> list[Subgraph]:
    """Returns the operations whose names match a regular expression, or that a function chooses."""
    from megasched.graph.definition_graphs import graph_of
    from megasched.graph.naming import graph_nodes

    graph, hint = graph_of(node), ""
    try:
        if isinstance(what, str):
            names, title = [name for name in graph.names if re.fullmatch(what, name)], repr(what)
            near = difflib.get_close_matches(what, graph.names, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
        else:
            names = [each.name for each in graph_nodes(graph.names, graph.inputs) if what(each)]
            title = "the function"
            hint = "a node's op is call_module or call_function, its target a path or an operator of torch.ops; "
    except re.error as error:
        problem = Problem(f"find: {what!r} is no regular expression: {error}", node.path, caller_source())
        raise ScheduleError(problem) from error
    except Exception as error:  # of a function of the user's
        problem = f"find: the function raised {type(error).__name__}: {error}"
        remedy = "a node has name, op, target, operation, module and args"
        raise ScheduleError(Problem(problem, node.path, caller_source(), remedy)) from error
    return _found_or_refused(node, [Subgraph(node.path, (name,)) for name in names], title, missing_ok, hint)


def _found_or_refused(
    node: Node, found: list[Subgraph], title: str, missing_ok: bool, hint: str = ""
) -> list[Subgraph]:
    """Returns what was found; raises ScheduleError where that is nothing and may not be."""
    from megasched.graph.definition_graphs import graph_of

    if not found and not missing_ok:
        remedy = f"{hint}its operations are: {', '.join(graph_of(node).names)}"
        raise ScheduleError(Problem(f"find: nothing matches {title}", node.path, caller_source(), remedy))
    return found


@register_primitive
class Fuse(Primitive):
    """Compiles a sub-graph of this traced module into one call.

    Parameters:
        subgraph: one that ``find`` returned.
        compiler: ``inductor`` (torch.compile), ``megatron`` (megatron-core's fused functions, for ready patterns),
            ``te`` (Transformer Engine), or one that is registered (``megasched.register_compiler``). Slapo's
            ``TorchScript``, which torch has given up, stands for ``inductor``.
        name: of the call in the code of the graph.

    Example: ``mlp.fuse(mlp.find(patterns.swiglu)[0], compiler="megatron")``
    """

    name = "fuse"
    phase = "graph"
    of_definition = True
    takes_subgraph = True
    inlines_subgraph = True

    def record(
        self,
        node: Node,
        subgraph: Subgraph | Sequence[Subgraph] | Mapping[str, Any],
        compiler: str = "inductor",
        name: str = "",
    ) -> Mapping[str, Any]:
        from megasched.graph.compilers import get_compiler
        from megasched.graph.edits import record_subgraph

        data = record_subgraph(self, node, subgraph)
        compiler = "inductor" if compiler == "TorchScript" else compiler
        refused = get_compiler(compiler).refuse(Subgraph(node.path, **data))
        if name and not name.isidentifier():
            refused = f"{name!r} is no name in the code of a graph: letters, digits and _ are"
        if refused:
            raise ScheduleError(Problem(f"fuse: {refused}", node.path, caller_source()))
        return {"subgraph": data, "compiler": compiler} | ({"name": name} if name else {})


@register_primitive
class Decompose(Primitive):
    """Shows a linear as product and bias in the graph around it, so that a pattern can take the bias in.

    Call it before ``trace`` on a module around it. It composes with ``shard``: the bias of a column is the local
    one; that of a row is added after the reduction. A linear without bias is its product alone.

    Example: ``sch["transformer.h.0.mlp.c_fc"].decompose()``
    """

    name = "decompose"
    phase = "graph"
    of_definition = True

    def record(self, node: Node) -> Mapping[str, Any]:
        from megasched.graph.definition_graphs import trial_of

        if not is_linear(node.mod):
            what = f"decompose takes a Linear, and this is a {type(node.mod).__name__}"
            what += ", which computes or holds more" if is_linear_class(node.mod) else ""
            raise ScheduleError(Problem(what, node.path, caller_source()))
        trial = trial_of(node)
        around = [path for path in trial.graphs if node.path.startswith(path + ".") or not path]
        if around:
            remedy = "call decompose before trace"
            raise ScheduleError(Problem(f"{around[0]} is traced already", node.path, caller_source(), remedy))
        trial.decomposed.add(node.path)
        return {}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        from megasched.graph.edits import makes_one_call

        for record in node.root.records:
            if record.path == node.path and makes_one_call(node, record):
                what = f"is decomposed, and {record.primitive} at {record.source} makes it one call in a graph"
                return [Problem(what, node.path, source, "leave one of the two calls out")]
        for record in records_where(node.root.records, lambda primitive: primitive.makes_graph):
            prefix = record.path + "." if record.path else ""
            if node.path.startswith(prefix):
                inner = node.path.removeprefix(prefix)
                if not _is_within(inner, record.arguments["leaves"]):
                    return []
        return [Problem("decompose: no traced module shows this linear", node.path, source, "trace one around it")]


def _check_traces(node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """Checks that a module is traced once, by itself, as the definition computes it, and on one pipeline stage."""
    from megasched.graph.definition_graphs import replaced_by

    prefix = node.path + "." if node.path else ""
    others = records_where(node.root.records, lambda primitive: primitive.makes_graph)
    if sum(record.path == node.path for record in others) > 1:
        first = next(record for record in others if record.path == node.path)
        if first.source != source or first.arguments != arguments:
            return [Problem(f"is traced twice: at {first.source}, and again", node.path, source, "remove one")]
    for record in others:
        inner = record.path.removeprefix(prefix)
        if record.path == node.path or not record.path.startswith(prefix):
            continue
        if not _is_within(inner, arguments["leaves"]):
            remedy = f'trace one of the two, or keep the inner a call: leaves=["{inner}"]'
            return [Problem(f"is traced, and so is {record.path} inside it", node.path, source, remedy)]
    if (shard := replaced_by(node)) is not None:
        what = f"is traced, and sharded at {shard.source}: other code computes it in a run, which has no graph"
        remedy = "leave the trace out, or trace the module around it, in which it stays a call"
        return [Problem(what, node.path, source, remedy)]
    layout = node.root.layout
    if (layout.sp or layout.cp > 1) and _holds_layers(node, arguments["leaves"]):
        how = "sequence" if layout.sp else "context"
        what = f"holds layers, around which {how} parallelism adds what has no graph"
        return [Problem(what, node.path, source, "keep the layers calls, by trace_until; or trace the layers")]
    if layout.pp > 1 and _holds_layers(node):
        what = f"holds layers of several pipeline stages ({layout.pp}), and a graph can't be cut"
        return [Problem(what, node.path, source, "trace the layers, or modules in them")]
    return []


def _holds_layers(node: Node, leaves: Sequence[str] = ()) -> bool:
    """Returns whether a module may hold the layers: a list is in it, and it is in none.

    Args:
        leaves: submodules that do not count, nor what is in them.
    """
    below = (path for path, _ in node.mod.named_modules() if _is_listed(path))
    return not _is_listed(node.path) and any(not _is_within(path, leaves) for path in below)


def _is_listed(path: str) -> bool:
    """Returns whether the module at a path is in a list of modules."""
    return any(name.isdigit() for name in path.split("."))


def _is_within(path: str, modules: Sequence[str]) -> bool:
    """Returns whether a path is that of one of these modules, or of one in them."""
    return any(path == one or path.startswith(f"{one}.") for one in modules)


def _record_subgraph(primitive: Primitive, node: Node, value: Any) -> dict[str, Any]:
    from megasched.graph.edits import record_subgraph

    return record_subgraph(primitive, node, value)


def _check_edit(primitive: Primitive, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    from megasched.graph.edits import check_edit

    return check_edit(primitive, node, arguments, source)


def _replacement_trial(model: nn.Module) -> ReplacedModel:
    from megasched.graph.definition_graphs import replacement_trial

    return replacement_trial(model)


register_subgraph_rules(SubgraphRules(_record_subgraph, _check_edit))
register_replacement_trial(_replacement_trial)
