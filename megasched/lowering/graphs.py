"""Traces modules of a lowered model and edits their graphs.

The definition's code is traced; the modules that lowering put in stay out of the graphs, as live calls. Tracing
waits for the first call, which has the shapes and types that training uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.graph.compilers import get_compiler
from megasched.graph.definition_graphs import standing_leaves
from megasched.graph.edits import replacement_problem
from megasched.graph.intercept import Limits
from megasched.graph.partition import Edit, ExtractedSubgraph
from megasched.graph.traced import TracedModule, trace_module
from megasched.language.module_paths import is_within
from megasched.language.records import Record
from megasched.language.subgraph import Subgraph
from megasched.layers.build_context import BuildContext
from megasched.layers.linear import RowLinear
from megasched.layers.recompute.recompute import recompute, tracker_states
from megasched.layers.wrap import waits_for_parameters
from megasched.plan.plan import Plan


def traced_modules(plan: Plan) -> set[str]:
    """Returns the paths of the modules whose forwards become graphs."""
    return {record.path for record in plan.records_where(lambda primitive: primitive.makes_graph)}


def traced_paths(plan: Plan) -> Callable[[str], bool]:
    """Returns a predicate on paths: whether a module is to be traced or is inside of one that is.

    Its code must stay the definition's.
    """
    traced = traced_modules(plan)
    return lambda path: any(is_within(path, around) for around in traced)


def trace_modules(model: nn.Module, context: BuildContext, here: Callable[[str], bool]) -> None:
    """Puts graphs in the place of the forwards that the records ask for."""
    plan = context.plan
    decomposed = {record.path for record in plan.records_of("decompose") if here(record.path)}
    traced: dict[str, TracedModule] = {}
    for record in plan.records_where(lambda primitive: primitive.makes_graph):
        if not here(record.path) or record.path in traced:
            continue
        module = model.get_submodule(record.path)
        prefix = record.path + "." if record.path else ""
        parallel = {path.removeprefix(prefix) for path in plan.cuts if path.startswith(prefix)}
        parallel |= {path.removeprefix(prefix) for path in plan.replicated_heads if path.startswith(prefix)}
        parallel |= {path.removeprefix(prefix) for path in plan.by_megatron if path.startswith(prefix)}
        leaves = frozenset({*record.arguments["leaves"], *standing_leaves(module), *parallel})
        apart = {p.removeprefix(prefix): _decompose(model, p) for p in decomposed if p.startswith(prefix)}
        traced[record.path] = trace_module(
            module,
            Limits(leaves, apart, waits_for_parameters),
            path=record.path,
            source=record.source,
            probe=_random_states_kept,
        )
    for record in plan.records_where(lambda primitive: primitive.takes_subgraph):
        if "subgraph" in record.arguments and record.path in traced:
            traced[record.path].edits.append(_edit(record, traced[record.path]))


def _decompose(model: nn.Module, path: str) -> bool:
    """Returns whether the product stays a call of the layer, which then leaves its bias to the graph."""
    layer: Any = model.get_submodule(path)
    if not hasattr(layer, "skip_bias_add"):
        return False
    layer.skip_bias_add = True
    if isinstance(layer, RowLinear):
        layer.bias_in_product = False
    return True


def _edit(record: Record, traced: TracedModule) -> Edit:
    subgraph = Subgraph(record.path, **record.arguments["subgraph"])
    if record.primitive == "fuse":
        make, title = get_compiler(record.arguments["compiler"]).make, record.arguments.get("name", "")
        return Edit(subgraph, make, record.source, inlined=True, title=title)
    if record.primitive == "checkpoint":
        return Edit(subgraph, partial(_recomputed, traced.root), record.source)
    if record.primitive == "replace":
        return Edit(subgraph, partial(_replaced, record), record.source)
    what = f"{record.primitive} can't be carried out on a sub-graph"
    raise ScheduleError(Problem(what, record.path, record.source, "replace, checkpoint or fuse it"))


def _recomputed(root: nn.Module, part: ExtractedSubgraph) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor) -> Any:
        if root.training and torch.is_grad_enabled():
            return recompute(part.graph, *tensors)
        return part.graph(*tensors)

    return run


def _replaced(record: Record, part: ExtractedSubgraph) -> Callable[..., Any]:
    factory = record.arguments["factory"]
    new = factory if isinstance(factory, nn.Module) else factory(part.graph)
    if problem := replacement_problem(new, part.subgraph.inputs, record.path, record.source):
        raise ScheduleError(problem)
    return new


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Runs its body, a run that is not to count, and then puts every random state back as it was."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with tracker_states(), torch.random.fork_rng(devices):
        yield
