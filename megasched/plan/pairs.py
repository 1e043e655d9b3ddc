"""Derives communication without example inputs: only from pairs of a column and a row linear in one module.

The module's own forward shows that it hands each column's output on to a row, and to nothing else that would need
the whole of it. It is run by itself, on one tensor as wide as the columns take it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from functools import cache
from typing import Any

import torch
from torch import nn

from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.tp.facts import TpAssumptions, TpFacts
from megasched.analysis.tp.replay import Rank
from megasched.errors import Problem, ScheduleError
from megasched.language.records import Record
from megasched.plan.plan import Plan

_REMEDY = "pass build(..., inputs={...}) to have it derived, or call "


def take_pairs(plan: Plan, model: nn.Module) -> tuple[TpFacts, list[Problem]]:
    """Returns the facts that column and row pairs and ``sync`` calls state, and a problem for each other cut."""
    tp_facts, problems = TpFacts(), list[Problem]()
    families: dict[str, dict[str, list[Record]]] = defaultdict(lambda: {"column": [], "row": []})
    for record in plan.records_of("shard"):
        cut = plan.cuts.get(record.path) if record.arguments["param"] == "weight" else None
        reader = None if cut is None else reads_tensors_of(model, record.path)
        if reader is not None:
            what = f"its weight is read by code other than its own, of {reader or 'the model'}"
            problems.append(Problem(what, record.path, record.source, "leave it whole"))
        elif cut in ("column", "row") and not _stated(plan, record, cut, tp_facts):
            families[record.path.rpartition(".")[0]][cut].append(record)
    for parent, family in families.items():
        module = model.get_submodule(parent)
        between = _between(plan, module, parent)
        unlike = "" if between or not (family["row"] and family["column"]) else _unlike_pairs(plan, module, parent)
        for record in family["column"]:
            what = "nothing tells where the sharded output goes: no row-parallel linear stands beside it"
            if family["row"]:
                what = f"{between} stands beside it, and nothing tells whether it meets the sharded output"
            if unlike:
                what = f"nothing tells that its output goes to a row-parallel linear alone: {unlike}"
            if not family["row"] or between or unlike:
                remedy = _REMEDY + '.sync("fwd_post", "all_gather")'
                problems.append(Problem(what, record.path, record.source, remedy))
        for record in family["row"] if not family["column"] else ():
            what = "nothing tells whether its input is sharded: no column-parallel linear stands beside it"
            problems.append(Problem(what, record.path, record.source, _REMEDY + '.sync("fwd_pre", "scatter")'))
    return tp_facts, problems


def _stated(plan: Plan, record: Record, cut: str, tp_facts: TpFacts) -> bool:
    """Returns whether a ``sync`` gathers a column's output or scatters a row's input; notes it in ``tp_facts``."""
    records = [one for one in plan.records_of("sync") if one.path == record.path]
    syncs = {(one.arguments["mode"], one.arguments["op"]): one.source for one in records}
    if cut == "column" and ("fwd_post", "all_gather") in syncs:
        tp_facts.gather[record.path] = f"the schedule asks for it, {syncs['fwd_post', 'all_gather']}"
        return True
    if cut == "row" and ("fwd_pre", "scatter") in syncs:
        tp_facts.scatter.add(record.path)
        return True
    return False


def reads_tensors_of(model: nn.Module, path: str, *, of_torch: bool = False) -> str | None:
    """Returns the path of a module around a cut one whose code reads the weight or bias of that; None without one.

    Such code would meet one rank's part. No run tells of it without inputs: torch's ``MultiheadAttention`` never
    calls its ``out_proj``. Nor does a run with gradients of the ways that torch's own modules take without.

    Args:
        of_torch: whether the code of torch's own classes alone counts.
    """
    *around, name = path.split(".")
    for length in range(len(around) + 1):
        outer = ".".join(around[:length])
        classes: Any = type(model.get_submodule(outer)).__mro__
        for cls in classes:
            counts = cls is not nn.Module and issubclass(cls, nn.Module)
            if counts and (cls.__module__.startswith("torch.nn.") or not of_torch) and name in _read_by(cls):
                return outer
    return None


@cache
def _read_by(cls: Any) -> frozenset[str]:
    """Returns the names of modules of which a class's code reads ``NAME.weight`` or ``NAME.bias`` itself.

    Code that initializes them has run before.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # without source there is nothing to be read
        return frozenset()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    running = [function for function in functions if not {"init", "reset"} & {*function.name.split("_")}]
    nodes = [node for function in running for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    kinds = {id(node.value) for node in nodes if node.attr in ("dtype", "device")}  # alike on every rank
    return frozenset(
        node.value.attr
        for node in nodes
        if node.attr in ("weight", "bias") and isinstance(node.value, ast.Attribute) and id(node) not in kinds
    )


def _unlike_pairs(plan: Plan, module: nn.Module, path: str) -> str:
    """Returns why the cuts in a module are not known to be pairs; empty where its forward shows that they are."""
    inside = {name: f"{path}.{name}" if path else name for name, _ in module.named_modules() if name}
    cuts = {name: plan.cuts[full] for name, full in inside.items() if full in plan.cuts}
    components = {
        name: plan.placement(inside[name], "weight").components for name, cut in cuts.items() if cut != "row"
    }
    columns = [module.get_submodule(name) for name, cut in cuts.items() if cut == "column"]
    widths = {int(getattr(column, "in_features", 0)) for column in columns}
    arguments = inspect.signature(module.forward).parameters.values()
    needed = [one.name for one in arguments if one.default is one.empty and one.kind not in _ANY_NUMBER]
    if len(needed) != 1 or len(widths) != 1:
        return f"the forward of {type(module).__name__} takes more than one tensor"
    runs = AnalysisCache()
    given = {needed[0]: torch.empty(2, 5, widths.pop(), device="meta")}
    try:
        assume = TpAssumptions(cuts, components=components)
        tp_facts = runs.propagate(module, given, assume, loss_takes_shards=False)
        sizes = runs.unproven_sizes(tp_facts, Rank(max(2, plan.layout.tp), cuts, components, {}), cuts, {})
    except ScheduleError as error:
        return error.problems[0].what
    if tp_facts.problems:
        return tp_facts.problems[0].what
    whole = [*sorted({*tp_facts.gather, *sizes}), *sorted({*tp_facts.scatter, *tp_facts.partial})]
    return f"the forward of {type(module).__name__} needs {whole[0]} otherwise" if whole else ""


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _between(plan: Plan, parent: nn.Module, path: str) -> str:
    """Describes a module in ``parent`` that is not cut and has weights or draws random numbers; or empty."""
    for name, module in parent.named_modules():
        full = f"{path}.{name}" if path and name else path or name
        draws = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if full not in plan.cuts and (draws or next(module.parameters(recurse=False), None) is not None):
            return f"{type(module).__name__} {name!r}" if name else f"a parameter of {type(module).__name__}"
    return ""
