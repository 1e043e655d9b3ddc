"""Infers roles for linears that neither an adapter nor HF's plan cuts.

Candidates come from the flow of data. They are kept where a labelled run proves that they need no communication
which cutting them would not save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megasched.analysis.find_layer_stack import record_definition
from megasched.analysis.recording.meta_call import meta_copy
from megasched.analysis.recording.tape import Tape
from megasched.analysis.roles.head_counts import find_counts
from megasched.analysis.roles.kv_heads import few_heads, is_uneven
from megasched.analysis.roles.linear_flow import Flow, Group, find_groups, linear_flow, linears_in
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.tp.facts import TpAssumptions, TpFacts
from megasched.analysis.tp.propagate import propagate
from megasched.analysis.tp.sliced_args import ArgRef, ArgSlice
from megasched.analysis.trials.choices import counterparts
from megasched.definition.linears import output_axis
from megasched.language.roles import ROLES, Cut, Roles

if TYPE_CHECKING:
    from torch import nn


def infer_roles(
    model: nn.Module, roles: Roles, structure: LayerStack | None, *, tp: int, sequence_parallel: bool = False
) -> Roles:
    """Returns the roles, with ``column`` and ``row`` added for other linears inside the layers that can be cut.

    Args:
        model: the definition, parameters on meta.
        roles: known roles of its modules.
        structure: how it runs; without one there are no layers to look into.
        tp: tensor parallel size that they are to be cut for.
        sequence_parallel: whether the run uses sequence parallelism.
    """
    if structure is None or all(path in roles.role for path in linears_in(model, structure)):
        return roles
    tape = structure.tape or record_definition(meta_copy(model), structure)
    flow = linear_flow(tape, structure)
    known = set(roles.role)
    groups = find_groups(flow, lambda path: path in known)
    chosen = {path for path in flow.feeds if _is_chosen(model, structure, flow, path)}
    groups = [group for group in groups if not chosen.intersection(group.members)]
    declined = {
        path: "no other linear was found that it could be cut with"
        for path in flow.feeds
        if path not in known and all(path not in group.members for group in groups)
    }
    declined |= dict.fromkeys(chosen - known, "values choose among those like it, and not all were met")
    proven = _proven(tape, roles, structure, flow, groups, tp, sequence_parallel, declined)
    groups, heads = proven.groups, proven.heads
    # Of a column of one head, which every rank has, no parts are cut.
    single = {path for path, found in heads.items() if found == (1,)}
    packed = {path: sizes for path, sizes in flow.components.items() if path not in known | single}
    components = {**packed, **roles.components}
    inferred = {path for group in groups for path in group.members}
    assume = TpAssumptions(_cuts(roles, groups), structure, components=components, heads=heads, parts=proven.parts)
    counts, uncounted = find_counts(tape, structure, assume, tp, inferred)
    for group in groups:
        if uncounted & group.members:
            declined |= dict.fromkeys(group.members, "no attribute was found that makes its heads come out right")
    groups = [group for group in groups if not uncounted & group.members]
    found = {path: name for group in groups for path, name in _roles_of(group).items()}
    role = {path: found[path] for path in flow.feeds if path in found}  # as they run, on every rank
    return replace(
        roles,
        role={**roles.role, **role},
        components={
            path: sizes for path, sizes in components.items() if path in known or role.get(path) == "column"
        },
        heads={**{path: max(found) for path, found in heads.items() if path in role}, **roles.heads},
        local_attributes={**counts, **roles.local_attributes},
        origin={**roles.origin, **_origins(groups)},
        declined={**declined, **roles.declined},
    )


def _is_chosen(model: nn.Module, structure: LayerStack, flow: Flow, path: str) -> bool:
    """Returns whether a list of the layer has others of its kind that were not called."""
    return any(
        structure.index_of(around) is not None and other.rpartition(".")[0] not in flow.feeds
        for around, other in counterparts(model, f"{path}.weight")
    )


class _Proven(NamedTuple):
    """Holds groups that can be cut, their columns with fewer heads than ranks, and arguments cut with them."""

    groups: list[Group]
    heads: Mapping[str, tuple[int, ...]]
    parts: Mapping[ArgRef, ArgSlice]


def _proven(
    tape: Tape,
    roles: Roles,
    structure: LayerStack,
    flow: Flow,
    groups: list[Group],
    tp: int,
    sequence_parallel: bool,
    declined: dict[str, str],
) -> _Proven:
    """Returns the groups that can be cut, some columns left whole; puts reasons for others into ``declined``."""
    components = {**flow.components, **roles.components}
    heads: dict[str, tuple[int, ...]] = {}
    tried: set[str] = set()
    while groups:
        assume = TpAssumptions(
            _cuts(roles, groups),
            structure,
            sequence_parallel=sequence_parallel,
            components=components,
            heads=heads,
        )
        tp_facts = propagate(tape, assume, loss_takes_shards=True)
        failed = [column for column in heads if column in tp_facts.gather or is_uneven(column, tp_facts, tp)]
        asked = [few_heads(_features(tape.model, group), tp_facts, components, tp) for group in groups]
        more = {column: found for one in asked for column, found in one.items() if column not in tried}
        if failed or more:
            heads = {**{column: found for column, found in heads.items() if column not in failed}, **more}
            tried |= more.keys()
            continue
        kept = [group for group in (_left_of(g, tp_facts, tp, declined) for g in groups) if group is not None]
        if kept == groups:
            return _Proven(groups, heads, tp_facts.parts)
        groups = kept
    return _Proven([], {}, {})


def _features(model: nn.Module, group: Group) -> dict[str, int]:
    """Returns the number of output features of each column in a group."""
    columns = {path: model.get_submodule(path) for path in sorted(group.columns)}
    return {path: module.weight.shape[output_axis(module)] for path, module in columns.items()}


def _left_of(group: Group, tp_facts: TpFacts, tp: int, declined: dict[str, str]) -> Group | None:
    """Returns the part of a group that can be cut after a run that had it cut; None where there is none."""
    for problem in tp_facts.problems:
        around = problem.module + "."
        if any(path == problem.module or path.startswith(around) for path in group.members):
            declined |= dict.fromkeys(group.members, problem.what)
            return None
    for column in group.columns & tp_facts.gather.keys():
        declined[column] = "what follows needs the whole of its output"
    for column in group.columns:
        uneven = [size for size in tp_facts.cut_sizes.get(column, ()) if size % tp]
        if uneven:
            declined[column] = f"TP {tp} does not divide {min(uneven)} heads or features of its output"
    columns = {column for column in group.columns if column not in declined}
    if not columns or group.row in tp_facts.scatter:
        for path in group.members:
            declined.setdefault(path, "the other side of it stays whole")
        return None
    return Group(columns, group.row)


def _origins(groups: list[Group]) -> dict[str, str]:
    """Returns the origin text of each linear in the groups, which says what it feeds or takes."""
    found = {}
    for group in groups:
        columns = ", ".join(sorted(path.rpartition(".")[2] for path in group.columns))
        found[group.row] = f"inferred: takes what stems from {columns}"
        found.update(dict.fromkeys(group.columns, f"inferred: feeds {group.row.rpartition('.')[2]}"))
    return found


def _roles_of(group: Group) -> dict[str, str]:
    return {**dict.fromkeys(group.columns, "column"), group.row: "row"}


def _cuts(roles: Roles, groups: list[Group]) -> dict[str, Cut]:
    cuts: dict[str, Any] = {path: ROLES[name] for path, name in roles.role.items() if ROLES[name] is not None}
    for group in groups:
        cuts.update(_roles_of(group))
    return cuts
