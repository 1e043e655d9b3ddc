"""Turns ``shard`` records into placements, or tells why a parameter can't be cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from megasched.definition.embeddings import looks_up
from megasched.definition.experts import expert_count, has_form, is_batched, returns_beyond, why_not_apart
from megasched.definition.images.convolutions import is_batch_norm, is_convolution
from megasched.definition.linears import is_linear, output_axis
from megasched.errors import Declined, Problem, indivisible
from megasched.language.lora import A, B
from megasched.language.parallel_dims import ParallelDims
from megasched.language.records import Record
from megasched.language.roles import Cut, Roles
from megasched.plan.images.channels import cut_asked, placements_of
from megasched.plan.placement import Placement, ReplicatedHeads
from megasched.plan.plan import Plan


@dataclass
class _Decided:
    """Collects what the records up to now have decided."""

    layout: ParallelDims
    roles: Roles
    canonical: Mapping[str, str]
    placements: dict[str, Placement]
    weights: Mapping[str, Record]
    cuts: dict[str, Cut] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)
    returning: set[str] = field(default_factory=set)
    replicated_heads: dict[str, ReplicatedHeads] = field(default_factory=dict)

    def placement(self, path: str, param: str) -> Placement:
        return self.placements[self.canonical[f"{path}.{param}" if path else param]]


def apply_shards(
    model: nn.Module, plan: Plan, shards: Sequence[Record], vocab_multiple: int
) -> tuple[Plan, list[Problem]]:
    """Returns the plan with the placements and cuts that these records ask for, and the problems."""
    problems: list[Problem] = []
    weights = {r.path: r for r in reversed(plan.records_of("shard")) if r.arguments["param"] == "weight"}
    whole = {name: Placement(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    made = _Decided(plan.layout, plan.roles, plan.canonical, whole, weights)
    pairs = [(record, model.get_submodule(record.path)) for record in shards]
    # Embeddings first: a head that is tied to one is padded as it is.
    for record, module in sorted(pairs, key=lambda pair: not isinstance(pair[1], nn.Embedding)):
        problems += _apply_one(module, made, record, vocab_multiple)
        _cut_adapter(module, made, record.path)
    plan = replace(
        plan,
        placements=made.placements,
        cuts=made.cuts,
        experts=made.experts,
        returning=frozenset(made.returning),
        replicated_heads=made.replicated_heads,
    )
    return plan, problems + _one_sided_ties(model, plan)


def leave_whole(plan: Plan, reasons: Mapping[str, str]) -> Plan:
    """Returns the plan with these modules, modules that are tied to them and their adapters left whole.

    Args:
        reasons: path -> why it stays whole.
    """
    whole = {plan.canonical[f"{path}.weight"]: reason for path, reason in reasons.items()}
    declined, gone, placements = dict(plan.left_whole), set[str](), dict(plan.placements)
    for path in plan.cuts:
        reason = None if path in gone else whole.get(plan.canonical[f"{path}.weight"])
        if reason is None:
            continue
        declined[path] = Declined(reason, path)
        for inner in (path, f"{path}.{A}", f"{path}.{B}"):
            gone.add(inner)
            for name in {f"{inner}.weight", f"{inner}.bias"} & plan.canonical.keys():
                placement = placements[plan.canonical[name]]
                placements[placement.name] = Placement(placement.name, placement.shape)
    return replace(
        plan,
        left_whole=declined,
        placements=placements,
        cuts={path: cut for path, cut in plan.cuts.items() if path not in gone},
        replicated_heads={path: heads for path, heads in plan.replicated_heads.items() if path not in gone},
    )


def _apply_one(module: nn.Module, made: _Decided, record: Record, vocab_multiple: int) -> list[Problem]:
    path, tp = record.path, made.layout.tp
    param, axis = record.arguments["param"], record.arguments["axis"]
    if is_convolution(module) or is_batch_norm(module):
        return _cut_image_module(module, made, record)
    if param == "bias" and is_linear(module):
        return _check_bias(module, made, record)
    if axis == 0 and has_form(module):
        return _share_out_experts(module, made, record)
    cut = _cut_of(module, param, axis)
    if cut is None:
        return [_unsupported(module, record)]
    made.cuts[path] = cut
    stated = record.arguments.get("components")
    if stated and cut != "column":
        what = f"components are given for the {'inputs of a linear' if cut == 'row' else 'rows of an embedding'}"
        return [Problem(what, path, record.source, "only the outputs of a linear are cut component by component")]
    components = (stated or made.roles.components.get(path, ())) if cut == "column" else ()
    heads = _replicated_heads(made.layout.tp, made.roles, path, components)
    if isinstance(heads, Problem):
        return [replace(heads, module=path, source=record.source)]
    if heads is not None:
        made.replicated_heads[path] = heads
    tied = made.placements[made.canonical[f"{path}.{param}" if path else param]]
    head = made.roles.role.get(path) == "head" or tied.padded is not None
    problems = []
    for name, parameter in module.named_parameters(recurse=False):
        try:
            placement = _placement(made, path, name, parameter, module, cut, heads is not None, components)
        except ValueError as error:  # components that do not add up
            return [Problem(str(error), path, record.source, "the sizes of the packed projections")]
        if cut == "vocab" or (cut == "column" and head):
            length = placement.shape[placement.axis or 0]
            placement = replace(placement, padded=-(-length // vocab_multiple) * vocab_multiple)
        problems += _uneven(placement, name, tp, record) or _tied_otherwise(made, placement, record)
        made.placements[placement.name] = placement
    return problems


def _cut_image_module(module: nn.Module, made: _Decided, record: Record) -> list[Problem]:
    """Cuts a convolution or a batch norm; one that takes channels by itself follows what it takes."""
    cut = cut_asked(module, record)
    if isinstance(cut, Problem):
        return [cut]
    made.cuts[record.path] = cut
    if cut == "channels":
        return []
    problems = []
    for full, placement in placements_of(record.path, module, cut, made.canonical).items():
        name = full.rpartition(".")[2]
        problems += _uneven(placement, name, made.layout.tp, record) or _tied_otherwise(made, placement, record)
        made.placements[placement.name] = placement
    return problems


def _cut_adapter(module: nn.Module, made: _Decided, path: str) -> None:
    """Cuts the part of a cut linear's adapter that meets the cut features; the other part stays whole."""
    cut = made.cuts.get(path)
    part = f"{path}.{B if cut == 'column' else A}"
    if not hasattr(module, A) or cut not in ("column", "row") or part in made.cuts:
        return
    made.cuts[part] = cut
    placement, base = made.placement(part, "weight"), made.placement(path, "weight")
    if path in made.replicated_heads:
        made.replicated_heads[part] = made.replicated_heads[path]
        placement = replace(placement, tp_gradient="partial")
    else:
        axis = 0 if cut == "column" else 1
        placement = replace(placement, axis=axis, components=base.components, padded=base.padded)
    made.placements[placement.name] = placement


def _share_out_experts(module: nn.Module, made: _Decided, record: Record) -> list[Problem]:
    """Shares out all parameters of a module of experts over EP, whichever of them the record names."""
    path, ep = record.path, made.layout.ep
    if ep == 1:
        return []
    if reason := why_not_apart(module):
        what = f"the experts of this {type(module).__name__} can't be shared out: {reason}"
        return [Problem(what, path, record.source, "leave them whole")]
    problems, count = [], expert_count(module)
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape)
        # Some have entries for experts without parameters, too, which the model holds and does not read.
        beyond = (count, shape[0] - count) if shape[0] > count else ()
        full = made.canonical[f"{path}.{name}"]
        placement = Placement(full, shape, axis=0, components=beyond, group="ep")
        made.placements[placement.name] = placement
        problems += _uneven(placement, name, ep, record)
    made.experts[path] = count if is_batched(module) else 1
    made.returning |= {path} if returns_beyond(module) else set()
    return problems[:1]


def _check_bias(module: nn.Module, made: _Decided, record: Record) -> list[Problem]:
    """Returns a problem where a bias is not sharded with the outputs of its weight, which it always follows."""
    weight = made.weights.get(record.path)
    cut = None if weight is None else _cut_of(module, "weight", weight.arguments["axis"])
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
    elif isinstance(module, _ConvNd | _BatchNorm):
        what += ": it computes or holds more than torch's module of its kind does"
        remedy = "leave it whole, or replace it by torch's first"
    elif isinstance(module, nn.Embedding) and axis in (0, 1):
        what += ": a table that is cut is looked up in by nn.Embedding.forward alone, "
        what += "without max_norm, scale_grad_by_freq or sparse"
        remedy = "leave it whole"
    return Problem(what, record.path, record.source, remedy)


def _uneven(placement: Placement, name: str, size: int, record: Record) -> list[Problem]:
    uneven = [n for n in (placement.component_sizes if placement.sharded else ()) if n % size]
    if not uneven:
        return []
    whole = f"{name} {list(placement.shape)} along axis {placement.axis}"
    whole += f" (component of {uneven[0]})" if placement.components else ""
    divisor = f"{placement.group.upper()} {size}"
    return [indivisible(divisor, whole, uneven[0], module=record.path, source=record.source)]


def _cut_of(module: nn.Module, param: str, axis: int) -> Cut | None:
    if param == "weight" and is_linear(module):
        return "column" if axis == output_axis(module) else "row"
    if param == "weight" and axis == 0 and isinstance(module, nn.Embedding):
        return "vocab" if looks_up(module) else None
    if param == "weight" and axis == 1 and type(module) is nn.Embedding:
        return "features" if looks_up(module) else None
    return None


def _placement(
    made: _Decided,
    path: str,
    name: str,
    parameter: nn.Parameter,
    module: nn.Module,
    cut: Cut,
    replicated: bool,
    components: tuple[int, ...],
) -> Placement:
    full_name = made.canonical[f"{path}.{name}" if path else name]
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


def _tied_otherwise(made: _Decided, placement: Placement, record: Record) -> list[Problem]:
    """Returns a problem where another module holds the parameter, too, and cuts it in another way."""
    before = made.placements[placement.name]
    if not before.sharded or before == placement:
        return []
    what = f"{placement.name} is tied, and cut in another way at its other side: along axis {before.axis}"
    what += f" in components {before.components}" if before.components else ""
    return [Problem(what, record.path, record.source, "shard both sides alike")]


def _one_sided_ties(model: nn.Module, plan: Plan) -> list[Problem]:
    """Returns a problem for each tied parameter that is not cut on every side; a module is one side."""
    first: dict[int, str] = {}
    every: Any = model.named_modules(remove_duplicate=False)
    path_of = {path: first.setdefault(id(module), path) for path, module in every}
    stage_inputs: dict[str, dict[str, None]] = defaultdict(dict)
    for name, canonical in plan.canonical.items():
        stage_inputs[canonical][path_of[name.rpartition(".")[0]]] = None
    problems = []
    sources = {record.path: record.source for record in plan.records_of("shard")}
    for canonical, paths in stage_inputs.items():
        cut = [path for path in paths if path in sources]
        if not cut or len(cut) == len(paths):
            continue
        whole = [path for path in paths if path not in sources]
        what = f"{canonical} is tied: {', '.join(cut)} shards it, {', '.join(whole)} does not"
        remedy = "shard both sides along the vocabulary, or neither"
        problems.append(Problem(what, cut[0], sources[cut[0]], remedy))
    return problems


def _replicated_heads(
    tp: int, roles: Roles, path: str, components: tuple[int, ...]
) -> ReplicatedHeads | Problem | None:
    """Returns how the KV heads of a projection are replicated; None where TP divides them; else a problem."""
    role, heads = roles.role.get(path), roles.heads.get(path)
    if heads is None or heads % tp == 0:
        return None
    # Heads of an inferred column are told where it was seen that they can be replicated.
    packed = role in ("qkv.packed", "column") and len(components) == 3
    if heads < tp and tp % heads == 0 and (role in ("qkv.k", "qkv.v", "column") or packed):
        uneven = _uneven_queries(components, heads, tp)
        return uneven or ReplicatedHeads(heads, components)
    problem = indivisible(f"TP {tp}", f"{heads} heads of {role}", heads, module=path)
    if role in ("qkv.k", "qkv.v") or packed:
        return replace(problem, remedy=f"{problem.remedy}, or that is a multiple of it (heads are replicated)")
    return problem


def _uneven_queries(components: tuple[int, ...], heads: int, tp: int) -> Problem | None:
    """Returns a problem where TP does not divide the query heads that are packed with k and v."""
    if not components:
        return None
    queries = components[0] // (components[1] // heads)
    if queries % tp == 0:
        return None
    return indivisible(f"TP {tp}", f"{queries} query heads", queries)
