"""Defines what a labelled run on meta finds out about single tensors and about the whole definition.

Labels: ``R`` the same on all TP ranks; ``S`` split along the sequence; ``T`` split along features or heads; ``P``
the same on all TP ranks but inside of a TP region, where each rank has a part of the gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megasched.analysis.stages.hooked_outputs import LeafPath
from megasched.analysis.stages.output_refs import OutputRef
from megasched.analysis.tp.sliced_args import ArgRef, ArgSlice
from megasched.errors import Problem
from megasched.language.roles import Cut
from megasched.language.tensor_types import INVARIANT, ShardDim, TpType

if TYPE_CHECKING:
    from megasched.analysis.stages.layer_stack import LayerStack
    from megasched.analysis.tp.module_call import ModuleCall


@dataclass(frozen=True)
class TpSpec:
    """Describes how one tensor relates to the TP ranks.

    Attributes:
        type: what it is to the TP ranks.
        columns: paths of the column linears that a FEATURE_SHARD stems from, and a REPLICATE of one head.
        along: how a shard is cut; None where that could not be followed.
        rows: paths of the row linears that a whole or split tensor stems from, in their layer.
        params: replicated parameters that a tensor is made of, as long as it is made of no activation.
        active: whether it depends on the model's input through parameters, so that it carries a gradient.
        fed: whether it depends on the model's input.
    """

    type: TpType = INVARIANT
    columns: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()
    params: frozenset[str] = frozenset()
    active: bool = False
    fed: bool = False
    along: ShardDim | None = None


def written_to(own: TpSpec, written: TpSpec) -> TpSpec:
    """Returns the label of a tensor that was partly written to; its cut is known only if it was cut before."""
    if own.type == INVARIANT:
        type_, along = written.type, None
    else:
        type_, along = own.type, own.along if written.type in (INVARIANT, own.type) else None
    return TpSpec(
        type_,
        own.columns | written.columns,
        own.rows | written.rows,
        own.params | written.params,
        own.active or written.active,
        own.fed or written.fed,
        along,
    )


@dataclass(frozen=True)
class TpAssumptions:
    """Holds what a propagation starts from.

    Attributes:
        cuts: path -> how the linear or embedding there is cut.
        structure: where the layers are; None where that is not known.
        sequence_parallel: whether the hidden state is split along the sequence inside of the layers.
        gather: column linears whose output is gathered -> why.
        forked_by_user: modules with a ``fork_rng`` record.
        components: path of a column linear -> sizes of the projections packed into its output.
        heads: path of a column linear with heads that several ranks replicate -> see ``ShardDim``.
        regions: modules that must be TP regions as a whole.
        not_regions: modules that can't be TP regions.
        rows_inside: row linears whose output stays inside of a region.
        channels_whole: modules that take channels by themselves and are not cut with what they take.
        parts: arguments of modules that are constants, and of which each rank takes its part.
    """

    cuts: Mapping[str, Cut] = field(default_factory=dict)
    structure: LayerStack | None = None
    sequence_parallel: bool = False
    gather: Mapping[str, str] = field(default_factory=dict)
    forked_by_user: frozenset[str] = frozenset()
    components: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    regions: frozenset[str] = frozenset()
    not_regions: frozenset[str] = frozenset()
    rows_inside: frozenset[str] = frozenset()
    channels_whole: frozenset[str] = frozenset()
    parts: Mapping[ArgRef, ArgSlice] = field(default_factory=dict)


class Region(NamedTuple):
    """Describes where a TP region begins.

    Attributes:
        slots: arguments of the module that enter TP there: identity or all-gather along the sequence in the
            forward, all-reduce or reduce-scatter in the backward.
        columns: the column linears inside that read them.
    """

    slots: tuple[int | str, ...]
    columns: tuple[str, ...]


@dataclass
class TpFacts:
    """Holds what the labelled runs of a definition found.

    Attributes:
        gather: column linears whose output must be gathered -> why, and where, if the tape has lines.
        scatter: row linears whose input is whole and must be cut.
        whole_inputs: column linears of the split layers that read a tensor whole along the sequence.
        partial: replicated parameters whose gradient is partial because they meet FEATURE_SHARDs.
        sequence: replicated parameters whose gradient is partial because they meet SEQUENCE_SHARDs.
        complete: replicated parameters whose gradient is whole because they meet whole activations.
        regions: module path -> where a TP region begins for several columns, or for a whole module.
        needed_regions: regions without which the numbers would be wrong, as a whole tensor inside meets shards, or
            the whole sequence. Whole tensors inside have partial gradients.
        whole_slots: module path -> arguments of a region there that are not split along the sequence.
        exits: needed region -> leaves of its output that are whole tensors from inside -> how they are cut along
            the sequence outside; None for those that stay whole.
        recorded: module around the layers -> leaves of its output that are whole tensors from inside of a region,
            recorded there by HF's hooks.
        parts: constants that are whole on all TP ranks, and of which each takes its part.
        input_components: batch norms, grouped convolutions and row convolutions that take cut channels -> sizes of
            the components of these, each cut on its own; empty for a single one.
        inside: columns and rows that read a whole tensor inside of a needed region.
        rows_inside: rows whose output meets whole tensors inside of a needed region, and is one, too.
        rows_of_tokens: rows of the split layers that take whole features, of tokens that are split: to cut the
            features, too, would take the ranks' tokens together first.
        split_slots: layer path -> arguments beside the hidden state that come from before the layers, are made of
            the whole sequence, and are split along it.
        overwritten: cut modules whose output is changed in place.
        read_elsewhere: module that is cut, or has experts -> another module whose code reads its weights.
        without_rule: operator without a rule that took cut tensors whole -> modules whose code has it.
        cut_sizes: column -> sizes of the dimensions along which tensors that stem from it are cut; TP must divide
            them.
        by_heads: columns whose output is viewed as heads [b, s, heads, d] or transposed: the module that does so
            reads the length of the sequence off its own input.
        shared: columns in one module that read the very same tensor.
        logits: columns of which the loss takes shards over the vocabulary.
        forked: ``nn.Dropout`` modules on FEATURE_SHARDs.
        attention: attention module path -> (query heads, whether they are cut).
        experts: module of experts -> region of the tokens that it takes.
        stage_inputs: place of a tensor that later layers read beside the hidden state, if that is cut -> the
            dimension; None where that could not be followed.
        readers: parameter that operations have read -> modules in whose code they are.
        problems: why TP would be wrong.
        calls: path of a module whose own code works on shards -> its first call.
        called: modules that ran.
        other_calls: ``calls`` of each other way through the code.
    """

    gather: dict[str, str] = field(default_factory=dict)
    scatter: set[str] = field(default_factory=set)
    whole_inputs: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    sequence: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    regions: dict[str, Region] = field(default_factory=dict)
    needed_regions: set[str] = field(default_factory=set)
    whole_slots: dict[str, set[int | str]] = field(default_factory=dict)
    exits: dict[str, dict[int, ShardDim | None]] = field(default_factory=lambda: defaultdict(dict))
    recorded: dict[str, tuple[LeafPath, ...]] = field(default_factory=dict)
    parts: dict[ArgRef, ArgSlice] = field(default_factory=dict)
    input_components: dict[str, tuple[int, ...]] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    rows_inside: set[str] = field(default_factory=set)
    rows_of_tokens: set[str] = field(default_factory=set)
    split_slots: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    overwritten: set[str] = field(default_factory=set)
    read_elsewhere: dict[str, str] = field(default_factory=dict)
    without_rule: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    cut_sizes: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    by_heads: set[str] = field(default_factory=set)
    shared: list[tuple[str, ...]] = field(default_factory=list)
    logits: set[str] = field(default_factory=set)
    forked: set[str] = field(default_factory=set)
    attention: dict[str, tuple[int, bool]] = field(default_factory=dict)
    experts: dict[str, TpType] = field(default_factory=dict)
    stage_inputs: dict[OutputRef, int | None] = field(default_factory=dict)
    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    problems: list[Problem] = field(default_factory=list)
    calls: dict[str, ModuleCall] = field(default_factory=dict, compare=False, repr=False)
    called: set[str] = field(default_factory=set, compare=False, repr=False)
    other_calls: list[dict[str, ModuleCall]] = field(default_factory=list, compare=False, repr=False)
