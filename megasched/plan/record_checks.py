"""Checks single records and the definition, and whether TP and EP divide what is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.stock import is_theirs
from megasched.analysis.tp.replay import local_count
from megasched.definition.experts import find_experts, not_apart
from megasched.definition.linears import may_be_replaced
from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.errors import Problem, indivisible
from megasched.language.records import Record
from megasched.language.registry import check_call, get_primitive, has_lowering, records_where
from megasched.language.replacements import ReplacedNames, replacements
from megasched.language.roles import owner_of
from megasched.language.schedule import Schedule, schedule_of
from megasched.plan.plan import Plan


def follow(schedule: Schedule, replaced: ReplacedNames, model: nn.Module) -> Iterator[Record]:
    """Yields the records, each on the module that it is about after the replacements.

    A call on weights goes where they are, unless it is about the module that took the place. Any other call stays
    where a module stands, or goes to where its own stands inside of another.

    Args:
        model: the model after replacements.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    new_at: set[str] = set()
    for record in schedule.records:
        new_at.update(path for _, path in replacements([record], schedule.root))
        primitive, standing = get_primitive(record.primitive), modules.get(record.path)
        home = replaced.moved.get(record.path, record.path)
        if primitive.of_weights:
            of_new = standing is not None and _is_about(record, standing, after=record.path in new_at)
            home = record.path if of_new else replaced.home(record.path)
        elif standing is not None or primitive.phase not in ("plan", "lowered") or primitive.survives_replacement:
            home = record.path
        yield record if home == record.path else replace(record, path=home)


def _is_about(record: Record, module: nn.Module, *, after: bool) -> bool:
    """Returns whether a call on weights is about this module, and not about one inside that it has replaced.

    Args:
        after: whether the call came after the replacement.
    """
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return record.arguments["param"] in own if "param" in record.arguments else after or bool(own)


def check_records(schedule: Schedule, plan: Plan, model: nn.Module) -> tuple[list[Problem], list[Record]]:
    """Returns the problems of each record by itself, and the ``shard`` records that have none.

    Args:
        plan: has the records.
        model: the model after replacements, on whose modules they are checked.
    """
    problems: list[Problem] = []
    sound: dict[tuple[str, str], Record] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for record in plan.records:
        found = _check_record(schedule, record, modules)
        if record.primitive == "shard" and not found:
            key = (record.path, record.arguments["param"])
            first = sound.setdefault(key, record)
            if first is not record:
                axis = first.arguments["axis"]
                what = f"{key[1]} is sharded twice: along axis {axis} at {first.source}, and again"
                found = [Problem(what, record.path, record.source, "remove one of the two calls")]
        problems += found
    return problems, list(sound.values())


def _check_record(schedule: Schedule, record: Record, modules: Mapping[str, nn.Module]) -> list[Problem]:
    primitive = get_primitive(record.primitive)
    if not has_lowering(primitive):
        remedy = f'register one with @megasched.register_lowering("{record.primitive}")'
        return [Problem(f"primitive {record.primitive!r} has no lowering", record.path, record.source, remedy)]
    standing = modules.get(record.path)
    if standing is None and not primitive.survives_replacement:
        what = f"{record.primitive}: there is no such module any more after the replacements"
        return [Problem(what, record.path, record.source, "call it on a module that stays")]
    if problem := _acts_on_no_call(record, standing):
        return [problem]
    if (
        "subgraph" in record.arguments
        and record.path in schedule.root
        and (problem := _edit_of_replaced(schedule, record, modules))
    ):
        return [problem]
    if standing is None or primitive.phase in ("edit", "graph"):  # which are about the definition's modules
        if record.path not in schedule.root:
            return []
        node = schedule.root[record.path]
        traces = primitive.phase == "graph" and not primitive.takes_subgraph
        if traces and type(standing) is not type(node.mod):
            what = f"{record.primitive}: its graph is of the definition's {type(node.mod).__name__}, which "
            what += f"{type(standing).__name__} replaces"
            return [Problem(what, record.path, record.source, "leave one of the two calls out")]
        return check_call(node, record)
    problems = check_call(schedule_of(schedule, record.path, standing), record)
    if problems and primitive.survives_replacement and record.path in schedule.root:
        return check_call(schedule.root[record.path], record)
    return problems


def _acts_on_no_call(record: Record, standing: nn.Module | None) -> Problem | None:
    """Returns a problem if a call is about the calls of a module that nobody can call."""
    acts = get_primitive(record.primitive).acts_on_calls and "subgraph" not in record.arguments
    if not acts or standing is None or getattr(standing.forward, "__func__", None) is not nn.Module.forward:
        return None
    what = f"{record.primitive}: {type(standing).__name__} has no forward, so that nothing would come of it"
    remedy = f'call it on what is in it, e.g. sch["{record.path}.*"].{record.primitive}(...)'
    return Problem(what, record.path, record.source, remedy)


def _edit_of_replaced(schedule: Schedule, record: Record, modules: Mapping[str, nn.Module]) -> Problem | None:
    """Returns a problem if a sub-graph has operations of a module inside of the traced one that is another now.

    A run's graph has those of the new module, or one call of it, if it is a leaf.
    """
    traced = schedule.root[record.path]
    if type(modules.get(record.path)) is not type(traced.mod):  # which is a problem of its trace
        return None
    prefix, inside = (f"{record.path}." if record.path else ""), traced.below()
    traces = records_where(schedule.records, lambda primitive: primitive.makes_graph)
    leaves = next((trace.arguments["leaves"] for trace in traces if trace.path == record.path), ())
    for inner, node in inside.items():
        old, new = type(node.mod).__name__, modules.get(prefix + inner)
        if type(new) is type(node.mod):
            continue
        stays = inner in leaves or (new is not None and may_be_replaced(new))
        held = [
            name
            for name in record.arguments["subgraph"]["nodes"]
            if name.startswith(f"{inner}.") or (not stays and _is_call_of(inner, name, inside))
        ]
        if held:
            what = f"{record.primitive}: {', '.join(held)} is of the definition's {old}, which "
            what += f"{type(new).__name__} replaces" if new is not None else "is gone after the replacements"
            return Problem(what, record.path, record.source, "leave it out of the sub-graph, or don't replace it")
    return None


def _is_call_of(path: str, name: str, modules: Collection[str]) -> bool:
    """Returns whether an operation of a graph is the call of a module; later ones have a number behind."""
    return name == path or (name not in modules and re.fullmatch(rf"{re.escape(path)}_\d+", name) is not None)


def check_expert_parallel(plan: Plan, model: nn.Module) -> list[Problem]:
    """Returns a problem where expert parallelism is on and no experts are shared out."""
    ep, experts = plan.layout.ep, find_experts(model)
    if ep == 1 or plan.experts:
        return []
    what = f"EP {ep}, and no experts are shared out"
    if not experts and (alike := not_apart(model)):
        path, reason = next(iter(alike.items()))
        what += (
            f": this {type(model.get_submodule(path)).__name__} has the form that HF gives experts, but {reason}"
        )
        return [Problem(what, path, remedy="leave --expert-model-parallel-size at 1")]
    if not experts:
        what += ": the model has no module of the form that HF gives experts"
        return [Problem(what, remedy="leave --expert-model-parallel-size at 1")]
    first = next(iter(experts))
    name = next(name for name, _ in model.get_submodule(first).named_parameters())
    return [Problem(what, first, remedy=f'sch["{first}"].shard("{name}", axis=0), for every layer')]


def hooked_parameters(plan: Plan, model: nn.Module, *, by_trainer: bool) -> list[Problem]:
    """Returns a problem for each parameter on which the definition registered a gradient hook when it was made.

    Such a hook would see a rank's gradient, or none in the trainer, which has parameters of its own.
    """
    if not by_trainer and plan.layout.tp == 1:
        return []
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    what = "a hook on the gradient of its parameter {}, which a run has another tensor for"
    remedy = "have the forward do the same, by an autograd function on what it makes of the parameter"
    return [
        Problem(what.format(name.rpartition(".")[2]), name.rpartition(".")[0], remedy=remedy) for name in hooked
    ]


def hooks_on_all_modules() -> list[Problem]:
    """Returns a problem where code has registered hooks on all modules of the process: a run has other modules."""
    tables = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = [hook for table in tables for hook in getattr(torch.nn.modules.module, f"_global_{table}").values()]
    names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks if not is_theirs(hook)]
    if not names:
        return []
    what = f"a hook on all modules of the process is registered ({', '.join(names)}), and a run has others"
    return [Problem(what, remedy="register it on the modules of the definition that it is for")]


def check_complete(plan: Plan, model: nn.Module) -> list[Problem]:
    """Returns a problem for each parameter whose placement or kind of gradient no phase has decided.

    The gradient of a whole parameter is complete on each rank, or partial. Of a cut parameter a rank has the
    gradient of its shard. A parameter that no run has reached, and that values might choose, is refused where the
    cuts are followed.
    """
    problems = []
    for name, parameter in model.named_parameters():
        path, placement, what = name.rpartition(".")[0], plan.placements.get(name), ""
        if placement is None:
            what = f"{name} has no placement"
        elif placement.shape != tuple(parameter.shape):
            what = f"{name} is {list(parameter.shape)}, and its placement is of {list(placement.shape)}"
        elif placement.sharded and placement.tp_gradient == "partial":
            what = f"{name} is cut, and its gradient would be summed over ranks that have other shards of it"
        if what:
            remedy = "that is a fault of megasched: please report it with the schedule"
            problems.append(Problem(f"the plan is not complete: {what}", path, remedy=remedy))
    return problems


def check_sliced_args(plan: Plan) -> list[Problem]:
    """Returns a problem for each argument that ranks can't take equal parts of."""
    problems: list[Problem] = []
    for (path, slot), part in plan.tp_facts.parts.items():
        if part.count % plan.layout.tp:
            whole = f"the {part.count} heads or features of argument {slot!r}"
            problems.append(indivisible(f"TP {plan.layout.tp}", whole, part.count, module=path))
    return problems


def check_local_attributes(plan: Plan, model: nn.Module) -> list[Problem]:
    """Returns a problem for each attribute that the adapter names and that can't be divided by TP.

    A module that a replacement put in another's place may count in its own way and lack them.
    """
    problems = []
    modules = dict(model.named_modules())
    replaced = [record.path for record in plan.records_where(lambda primitive: primitive.replaces_modules)]
    sharded = sharded_attention(plan)
    for path, names in plan.roles.local_attributes.items():
        if not sharded(path) or path not in modules:
            continue
        for name in names:
            owner, field = owner_of(modules[path], name)
            whole = getattr(owner, field, None)
            if whole is None and not any(path.startswith(prefix) for prefix in replaced):
                what = f"has no attribute {name}, which its adapter divides by TP"
                problems.append(Problem(what, path, remedy="name the attribute that it counts by now"))
            if whole is not None and local_value(plan, path, whole) is None:
                problems.append(indivisible(f"TP {plan.layout.tp}", f"{name} = {whole}", whole, module=path))
    return problems


def local_value(plan: Plan, path: str, whole: int) -> int | None:
    """Returns one rank's part of a count in the module at a path; None where it can't be divided."""
    inside = (heads.heads for inner, heads in plan.replicated_heads.items() if inner.startswith(path + "."))
    return local_count(whole, plan.layout.tp, inside)


def sharded_attention(plan: Plan) -> Callable[[str], bool]:
    """Returns a predicate on paths: whether the heads of the attention there are cut.

    An attention that no run has reached counts as cut where a column inside it hands out shards.
    """
    cutting = {
        parent
        for path, cut in plan.cuts.items()
        if cut == "column" and path not in plan.tp_facts.gather
        for parent in _parents(path)
    }
    return lambda path: plan.tp_facts.attention.get(path, (0, path in cutting))[1]


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def whole_logits(plan: Plan, model: Any) -> list[Problem]:
    """Returns a problem where ``parallel_output`` asks for logits that can't stay cut over the vocabulary."""
    if not plan.layout.parallel_output or plan.layout.tp == 1 or plan.structure is None:
        return []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    path = next((path for path, module in model.named_modules() if module is head), "")
    if head is None or not plan.structure.calls_loss or objective_of(model) is not CAUSAL_LM:
        why = "it is no causal language model whose loss is transformers' loss_function"
    elif plan.structure.loss.another:
        why = plan.structure.loss.another
    elif plan.tp_facts.logits:
        return []
    elif plan.cuts.get(path) != "column":
        declined = plan.left_whole.get(path)
        why = "the schedule does not cut the head by its rows (axis 0)" if declined is None else declined.reason
    else:
        why = plan.tp_facts.gather.get(path, "how its output is cut could not be followed")
    return [
        Problem(f"parallel_output: logits can't stay cut: {why}", path, remedy="build it without parallel_output")
    ]


def undecomposable(plan: Plan) -> list[Problem]:
    """Returns a problem for each linear that can't be decomposed as it is cut, or as it is computed."""
    gathered = {path for path in plan.tp_facts.gather if plan.cuts.get(path) == "column"} - plan.tp_facts.inside
    found = []
    for record in plan.records_of("decompose"):
        if record.path in plan.te_linears:
            what = "can't be decomposed: Transformer Engine computes it in 8 bits, bias and all"
        elif record.path in plan.replicated_heads or record.path in gathered:
            what = "can't be decomposed as it is cut: its bias is not added to what each rank returns"
        else:
            continue
        found.append(Problem(what, record.path, record.source, "leave the decompose call out"))
    return found
