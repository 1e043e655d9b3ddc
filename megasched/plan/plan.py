"""Defines the plan of what ``build`` will do; ``make_plan`` makes it, and everything after it reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megasched.analysis.cp.facts import CpFacts
from megasched.analysis.cp.packed_sequences import PackedFacts
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.tp.facts import TpFacts
from megasched.errors import Declined
from megasched.language.module_specs import MlpSpec
from megasched.language.parallel_dims import ParallelDims
from megasched.language.records import Record
from megasched.language.registry import Primitive, records_where
from megasched.language.replacements import ReplacedNames
from megasched.language.roles import Cut, Roles
from megasched.plan.placement import Placement, ReplicatedHeads


@dataclass(frozen=True)
class Plan:
    """Describes what ``build`` will do; only ``make_plan`` makes it, and a change makes a new one.

    Attributes:
        layout: how the job is spread.
        records: the schedule's calls; those on modules that replacements put inside of others are on these there.
        roles: facts of an adapter about the model's modules, by the paths where they stand after replacements.
        cuts: module path -> column, row, vocab or features.
        experts: path of a module of experts (``megasched.definition.experts``) that is shared out over EP -> how
            many rows it takes of each token: one for each expert of batched ones, otherwise 1.
        returning: those of ``experts`` of which numbers beyond them choose ones that return their input.
        replicated_heads: path of a projection to k or v with fewer heads than TP ranks -> how its heads are
            replicated; such a projection stays whole.
        left_whole: linears and embeddings that the schedule shards and that stay whole -> why.
        placements: canonical parameter name -> placement; total over the definition.
        canonical: every parameter name (ties have several) -> canonical name.
        replaced: what replacements have made of the definition's names.
        ends: names of the tables of the embedding of tokens and of the head over the vocabulary after
            replacements; None for one that there is not, or that a function made under another name.
        structure: the layer stack; None for a model that is not a causal language model.
        tp_facts: facts that follow from the placements.
        cp_facts: facts of context parallelism; None without.
        packed: facts of packed sequences; None without.
        blocks: decoder layers that Megatron's ``TransformerLayer`` computes; no module inside is lowered by
            itself.
        attentions: modules outside ``blocks`` that Megatron's ``SelfAttention`` computes; the same holds inside.
        mixtures: modules of router and experts outside ``blocks`` that its ``MoELayer`` computes; the same holds.
        mlps: modules outside both that its ``MLP`` computes -> their specs; the same holds inside.
        declined: layers, attention, mixtures and MLPs that were to be Megatron's if possible -> why not.
        te_linears: linears whose product is Transformer Engine's, in 8 bits; those in ``blocks`` are not named.
        weights_in_8_bits: canonical names of parameters that are multiplied in 8 bits, those of experts included.
        fused_columns: groups of columns that one matrix product computes; paths in the order of their calls.
    """

    layout: ParallelDims
    records: tuple[Record, ...]
    roles: Roles = field(default_factory=Roles)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    returning: frozenset[str] = frozenset()
    replicated_heads: Mapping[str, ReplicatedHeads] = field(default_factory=dict)
    left_whole: Mapping[str, Declined] = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    canonical: Mapping[str, str] = field(default_factory=dict)
    replaced: ReplacedNames = field(default_factory=ReplacedNames)
    ends: tuple[str | None, str | None] = (None, None)
    structure: LayerStack | None = None
    tp_facts: TpFacts = field(default_factory=TpFacts)
    cp_facts: CpFacts | None = None
    packed: PackedFacts | None = None
    blocks: frozenset[str] = frozenset()
    attentions: frozenset[str] = frozenset()
    mixtures: frozenset[str] = frozenset()
    mlps: Mapping[str, MlpSpec] = field(default_factory=dict)
    declined: Mapping[str, Declined] = field(default_factory=dict)
    te_linears: frozenset[str] = frozenset()
    weights_in_8_bits: frozenset[str] = frozenset()
    fused_columns: tuple[tuple[str, ...], ...] = ()

    @property
    def stack(self) -> LayerStack:
        """Returns the layer stack of a model that has one."""
        assert self.structure is not None
        return self.structure

    @property
    def renamed(self) -> Mapping[str, str]:
        """Maps each parameter or buffer to which replacements have given another name to its first before."""
        return self.replaced.renamed

    def placement(self, path: str, param: str) -> Placement:
        """Returns the placement of the parameter ``param`` of the module at ``path``."""
        return self.placements[self.canonical[f"{path}.{param}" if path else param]]

    def local_shape(self, placement: Placement) -> tuple[int, ...]:
        """Returns the shape of a parameter on one rank."""
        return placement.local_shape(self.layout.size_of(placement.group))

    def holds_parameters(self, path: str) -> bool:
        """Returns whether there are parameters in the module at ``path``."""
        return any(name.startswith(f"{path}.") for name in self.canonical)

    @property
    def by_megatron(self) -> frozenset[str]:
        """Returns the paths of all modules that Megatron's own modules compute."""
        return self.blocks | self.attentions | self.mixtures | self.mlps.keys()

    @property
    def head(self) -> str | None:
        """Returns the path of the head over the vocabulary; None without one."""
        return None if self.ends[1] is None else self.ends[1].rpartition(".")[0]

    @property
    def vocabulary(self) -> frozenset[str]:
        """Returns the names of the tensors whose rows are a vocabulary, which another run may pad."""
        ends = {name.rpartition(".")[0] for name in self.ends if name is not None}
        of_ends = {name for own, name in self.canonical.items() if own.rpartition(".")[0] in ends}
        placed = self.placements.items()
        return frozenset(one.name for name, one in placed if one.padded is not None or name in of_ends)

    def in_block(self, path: str) -> bool:
        """Returns whether the module at ``path`` is inside one of ``by_megatron``."""
        ours = (self.blocks, self.attentions, self.mixtures, self.mlps)
        while path and any(ours):
            path = path.rpartition(".")[0]
            if any(path in own for own in ours):
                return True
        return False

    def splits_sequence(self, path: str) -> bool:
        """Returns whether activations around the module at ``path`` are split along the sequence over TP."""
        if not self.layout.sp or self.structure is None or path in self.tp_facts.whole_inputs:
            return False
        return self.structure.index_of(path) is not None

    def in_8_bits(self, path: str) -> bool:
        """Returns whether 8-bit training covers the layer that the module at ``path`` is or is in."""
        fp8, structure = self.layout.fp8, self.structure
        if fp8 is None or structure is None:
            return False
        index = structure.index_of(path)
        return index is not None and fp8.covers(index, structure.count)

    def records_of(self, primitive: str) -> list[Record]:
        """Returns the calls of one primitive."""
        return [record for record in self.records if record.primitive == primitive]

    def records_where(self, holds: Callable[[Primitive], bool]) -> list[Record]:
        """Returns the calls of all primitives for which ``holds`` is true."""
        return records_where(self.records, holds)
