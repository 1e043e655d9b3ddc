"""The plan: what ``build`` will do, parameter by parameter. Made by ``make_plan``, read by everything after it."""

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
from megasched.language.roles import Cut
from megasched.plan.placement import Placement, ReplicatedHeads


@dataclass(frozen=True)
class Plan:
    """What ``build`` will do. ``make_plan`` alone makes one; what changes one makes another.

    Attributes:
        layout: how the job is spread.
        cuts: module path -> column, row or vocab.
        experts: paths of modules of experts (``megasched.definition.experts``) that are shared out over EP.
        replicated_heads: path of a projection to k or v with fewer heads than TP ranks -> how its heads are
            replicated; such a projection stays whole.
        left_whole: linears and embeddings that the schedule shards and that stay whole -> why.
        placements: canonical parameter name -> placement; total over the definition.
        canonical: every parameter name (ties have several) -> canonical name.
        structure: where the layers are; None for a model that is not a causal language model.
        derived: what follows from the placements.
        sequence: what context parallelism does; None without.
        packed: what packed sequences do; None without.
        blocks: decoder layers that Megatron's ``TransformerLayer`` computes; nothing inside them is lowered
            by itself.
        attentions: modules outside of ``blocks`` that Megatron's ``SelfAttention`` computes; the same holds.
        mixtures: modules of router and experts, outside of ``blocks``, that its ``MoELayer`` computes; the same
            holds.
        mlps: modules outside of both that its ``MLP`` computes -> what they are; the same holds.
        not_blocks: layers, attention, mixtures and MLPs that were to be Megatron's if possible -> why not.
        te_linears: linears whose product is Transformer Engine's, in 8 bits; those in ``blocks`` are not named.
        weights_in_8_bits: parameters of the model that are multiplied in 8 bits, by canonical names; those of
            experts among them.
        joint: columns that are computed by one matrix product; paths in the order of their calls.
    """

    layout: ParallelDims
    records: tuple[Record, ...]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    replicated_heads: Mapping[str, ReplicatedHeads] = field(default_factory=dict)
    left_whole: Mapping[str, Declined] = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    canonical: Mapping[str, str] = field(default_factory=dict)
    structure: LayerStack | None = None
    derived: TpFacts = field(default_factory=TpFacts)
    sequence: CpFacts | None = None
    packed: PackedFacts | None = None
    blocks: frozenset[str] = frozenset()
    attentions: frozenset[str] = frozenset()
    mixtures: frozenset[str] = frozenset()
    mlps: Mapping[str, MlpSpec] = field(default_factory=dict)
    not_blocks: Mapping[str, Declined] = field(default_factory=dict)
    te_linears: frozenset[str] = frozenset()
    weights_in_8_bits: frozenset[str] = frozenset()
    joint: tuple[tuple[str, ...], ...] = ()

    def placement(self, path: str, param: str) -> Placement:
        """The placement of the parameter ``param`` of the module at ``path``."""
        return self.placements[self.canonical[f"{path}.{param}" if path else param]]

    def local_shape(self, placement: Placement) -> tuple[int, ...]:
        """Shape of what a rank holds of a parameter."""
        return placement.local_shape(self.layout.size_of(placement.group))

    def holds_parameters(self, path: str) -> bool:
        """Whether there are parameters in the module at ``path``."""
        return any(name.startswith(f"{path}.") for name in self.canonical)

    @property
    def by_megatron(self) -> frozenset[str]:
        """Paths of all that is computed by modules of Megatron's own."""
        return self.blocks | self.attentions | self.mixtures | self.mlps.keys()

    def in_block(self, path: str) -> bool:
        """Whether the module at ``path`` is inside one of ``by_megatron``."""
        ours = (self.blocks, self.attentions, self.mixtures, self.mlps)
        while path and any(ours):
            path = path.rpartition(".")[0]
            if any(path in own for own in ours):
                return True
        return False

    def splits_sequence(self, path: str) -> bool:
        """Whether activations around the module at ``path`` are split along the sequence over the TP ranks."""
        if not self.layout.sp or self.structure is None or path in self.derived.whole_inputs:
            return False
        return self.structure.index_of(path) is not None

    def in_8_bits(self, path: str) -> bool:
        """Whether the module at ``path`` is a layer, or in one, that 8-bit training covers."""
        fp8, structure = self.layout.fp8, self.structure
        if fp8 is None or structure is None:
            return False
        index = structure.index_of(path)
        return index is not None and fp8.covers(index, structure.count)

    def records_of(self, primitive: str) -> list[Record]:
        """The calls of one primitive."""
        return [record for record in self.records if record.primitive == primitive]

    def records_where(self, holds: Callable[[Primitive], bool]) -> list[Record]:
        """The calls of all primitives that are such."""
        return records_where(self.records, holds)
