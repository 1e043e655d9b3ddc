"""From shard records to placements: how each parameter lies, or why it can't."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from megasched.definition.embeddings import looks_up
from megasched.definition.expert_trials import why_not_apart
from megasched.definition.experts import has_form
from megasched.definition.linears import is_linear, output_axis
from megasched.errors import Problem
from megasched.language.lora import A, B
from megasched.language.records import Record
from megasched.language.roles import Cut
from megasched.language.schedule import Schedule
from megasched.plan.kv_heads import find_replicated_heads
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan


def place(
    schedule: Schedule, model: nn.Module, plan: Plan, shards: Sequence[Record], vocab_multiple: int
) -> list[Problem]:
    """Fills the plan's placements and cuts from these records; returns what can't be done."""
    problems: list[Problem] = []
    for name, parameter in model.named_parameters():
        plan.placements[name] = Placement(name, tuple(parameter.shape))
    found = [(record, model.get_submodule(record.path)) for record in shards]
    # Embeddings first: a head that is tied to one is padded as it is.
    for record, module in sorted(found, key=lambda pair: not isinstance(pair[1], nn.Embedding)):
        problems += _place_one(schedule, module, plan, record, vocab_multiple)
        _place_adapter(module, plan, record.path)
    return problems + _one_sided_ties(model, plan)


def leave_whole(plan: Plan, reasons: Mapping[str, str]) -> None:
    """Takes back what ``place`` did for these paths, for what is tied to them, and for their adapters.

    Args:
        reasons: path -> why it stays whole.
    """
    whole = {plan.canonical[f"{path}.weight"]: reason for path, reason in reasons.items()}
    for path in list(plan.cuts):
        reason = whole.get(plan.canonical[f"{path}.weight"])
        if reason is None:
            continue
        plan.left_whole[path] = reason
        for part in (path, f"{path}.{A}", f"{path}.{B}"):
            plan.cuts.pop(part, None)
            plan.replicated_heads.pop(part, None)
            for name in {f"{part}.weight", f"{part}.bias"} & plan.canonical.keys():
                placement = plan.placements[plan.canonical[name]]
                plan.placements[placement.name] = Placement(placement.name, placement.shape)


def _place_one(
    schedule: Schedule, module: nn.Module, plan: Plan, record: Record, vocab_multiple: int
) -> list[Problem]:
    path, tp = record.path, plan.layout.tp
    param, axis = record.arguments["param"], record.arguments["axis"]
    if param == "bias" and is_linear(module):
        return _check_bias(module, plan, record)
    if axis == 0 and has_form(module):
        return _place_experts(module, plan, record)
    cut = _cut_of(module, param, axis)
    if cut is None:
        return [_unsupported(module, record)]
    plan.cuts[path] = cut
    stated = record.arguments.get("components")
    if stated and cut != "column":
        what = f"components are given for the {'inputs of a linear' if cut == 'row' else 'rows of an embedding'}"
        return [Problem(what, path, record.source, "only the outputs of a linear are cut component by component")]
    components = (stated or schedule.roles.components.get(path, ())) if cut == "column" else ()
    heads = find_replicated_heads(schedule, path, components)
    if isinstance(heads, Problem):
        return [replace(heads, module=path, source=record.source)]
    if heads is not None:
        plan.replicated_heads[path] = heads
    tied = plan.placements[plan.canonical[f"{path}.{param}" if path else param]]
    head = schedule.role_of(path) == "head" or tied.padded is not None
    problems = []
    for name, parameter in module.named_parameters(recurse=False):
        try:
            placement = _placement(plan, path, name, parameter, module, cut, heads is not None, components)
        except ValueError as error:  # components that do not add up
            return [Problem(str(error), path, record.source, "the sizes of the packed projections")]
        if cut == "vocab" or (cut == "column" and head):
            length = placement.shape[placement.axis or 0]
            placement = replace(placement, padded=-(-length // vocab_multiple) * vocab_multiple)
        problems += _uneven(placement, name, tp, record) or _tied_otherwise(plan, placement, record)
        plan.placements[placement.name] = placement
    return problems


def _place_adapter(module: nn.Module, plan: Plan, path: str) -> None:
    """Of a cut linear's adapter, what meets the cut features is cut as they are; the rest is whole."""
    cut = plan.cuts.get(path)
    part = f"{path}.{B if cut == 'column' else A}"
    if not hasattr(module, A) or cut not in ("column", "row") or part in plan.cuts:
        return
    plan.cuts[part] = cut
    placement, base = plan.placement(part, "weight"), plan.placement(path, "weight")
    if path in plan.replicated_heads:
        plan.replicated_heads[part] = plan.replicated_heads[path]
        placement = replace(placement, tp_gradient="partial")
    else:
        axis = 0 if cut == "column" else 1
        placement = replace(placement, axis=axis, components=base.components, padded=base.padded)
    plan.placements[placement.name] = placement


def _place_experts(module: nn.Module, plan: Plan, record: Record) -> list[Problem]:
    """All parameters of a module of experts are shared out, whichever of them the record names."""
    path, ep = record.path, plan.layout.ep
    if ep == 1:
        return []
    if reason := why_not_apart(module):
        what = f"the experts of this {type(module).__name__} can't be shared out: {reason}"
        return [Problem(what, path, record.source, "leave them whole")]
    problems = []
    for name, parameter in module.named_parameters(recurse=False):
        placement = Placement(plan.canonical[f"{path}.{name}"], tuple(parameter.shape), axis=0, group="ep")
        plan.placements[placement.name] = placement
        problems += _uneven(placement, name, ep, record)
    plan.experts.add(path)
    return problems[:1]


def _check_bias(module: nn.Module, plan: Plan, record: Record) -> list[Problem]:
    """A bias follows its weight; to shard it says nothing new, and is wrong where the weight says otherwise."""
    weight = [r for r in plan.records_of("shard") if r.path == record.path and r.arguments["param"] == "weight"]
    cut = _cut_of(module, "weight", weight[0].arguments["axis"]) if weight else None
    if cut == "column" and record.arguments["axis"] == 0:
        return []
    what = "the bias of a row-parallel linear is whole on every rank" if cut else "a bias is sharded alone"
    remedy = f'shard("weight", axis={output_axis(module)}) cuts the outputs, and the bias with them'
    return [Problem(what, record.path, record.source, remedy)]


def _unsupported(module: nn.Module, record: Record) -> Problem:
    param, axis = record.arguments["param"], record.arguments["axis"]
    what = f"{type(module).__name__}.{param} can't be sharded along axis {axis}"
    remedy = "Linear and HF Conv1D along either axis, Embedding along axis 0 (the vocabulary) or 1 (its features)"
    if isinstance(module, nn.Linear):
        what += ": it computes or holds more than nn.Linear does"
        remedy = "replace it by an nn.Linear first"
    elif isinstance(module, nn.Embedding) and axis in (0, 1):
        what += ": a table that is cut is looked up in by nn.Embedding.forward alone, "
        what += "without max_norm, scale_grad_by_freq or sparse"
        remedy = "leave it whole"
    return Problem(what, record.path, record.source, remedy)


def _uneven(placement: Placement, name: str, size: int, record: Record) -> list[Problem]:
    uneven = [n for n in (placement.component_sizes if placement.sharded else ()) if n % size]
    if not uneven:
        return []
    what = f"{placement.group.upper()} {size} does not divide {name} {list(placement.shape)}"
    what += f" along axis {placement.axis}"
    what += f" (component of {uneven[0]})" if placement.components else ""
    return [
        Problem(
            what,
            record.path,
            record.source,
            f"a{' tensor' if placement.group == 'tp' else 'n expert'} parallel size that divides {uneven[0]}",
        )
    ]


def _cut_of(module: nn.Module, param: str, axis: int) -> Cut | None:
    if param == "weight" and is_linear(module):
        return "column" if axis == output_axis(module) else "row"
    if param == "weight" and axis == 0 and isinstance(module, nn.Embedding):
        return "vocab" if looks_up(module) else None
    if param == "weight" and axis == 1 and type(module) is nn.Embedding:
        return "features" if looks_up(module) else None
    return None


def _placement(
    plan: Plan,
    path: str,
    name: str,
    parameter: nn.Parameter,
    module: nn.Module,
    cut: Cut,
    replicated: bool,
    components: tuple[int, ...],
) -> Placement:
    full_name = plan.canonical[f"{path}.{name}" if path else name]
    placement = Placement(full_name, tuple(parameter.shape))
    transposed = output_axis(module) == 1 and parameter.dim() == 2
    if replicated:
        return replace(placement, tp_gradient="partial", transposed=transposed)
    if cut in ("vocab", "features"):
        return replace(placement, axis=0 if cut == "vocab" else 1)
    if name == "bias":
        return replace(placement, axis=0, components=components) if cut == "column" else placement
    axis = output_axis(module) if cut == "column" else 1 - output_axis(module)
    return replace(placement, axis=axis, components=components, transposed=transposed)


def _tied_otherwise(plan: Plan, placement: Placement, record: Record) -> list[Problem]:
    """A parameter that another module holds too, and cuts in another way."""
    before = plan.placements[placement.name]
    if not before.sharded or before == placement:
        return []
    what = f"{placement.name} is tied, and cut in another way at its other side: along axis {before.axis}"
    what += f" in components {before.components}" if before.components else ""
    return [Problem(what, record.path, record.source, "shard both sides alike")]


def _one_sided_ties(model: nn.Module, plan: Plan) -> list[Problem]:
    """Tied parameters must be cut on every side. A module under two names is one side."""
    first: dict[int, str] = {}
    every: Any = model.named_modules(remove_duplicate=False)
    path_of = {path: first.setdefault(id(module), path) for path, module in every}
    sides: dict[str, dict[str, None]] = defaultdict(dict)
    for name, canonical in plan.canonical.items():
        sides[canonical][path_of[name.rpartition(".")[0]]] = None
    problems = []
    sources = {record.path: record.source for record in plan.records_of("shard")}
    for canonical, paths in sides.items():
        cut = [path for path in paths if path in sources]
        if not cut or len(cut) == len(paths):
            continue
        whole = [path for path in paths if path not in sources]
        what = f"{canonical} is tied: {', '.join(cut)} shards it, {', '.join(whole)} does not"
        remedy = "shard both sides along the vocabulary, or neither"
        problems.append(Problem(what, cut[0], sources[cut[0]], remedy))
    return problems
