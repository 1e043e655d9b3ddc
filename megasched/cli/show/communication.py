"""Finds what each module sends over the TP group because of the shards, from the plan and the lowering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from megasched.cli.output import BYTES_16_BITS
from megasched.language.module_specs import MlaSpec
from megasched.language.tensor_types import INVARIANT, REPLICATE, TpType
from megasched.plan.communication import derived_syncs, shared_regions
from megasched.plan.plan import Plan


@dataclass(frozen=True)
class Transfer:
    """Represents one operation over the TP group.

    Attributes:
        phase: ``forward`` or ``backward``.
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``scatter``.
        tensor: ``input`` or ``output`` of the module; in the backward pass, the gradient of it. ``loss``: numbers
            of each label, of logits that are cut over the vocabulary.
        shared_by: paths, below the module, of the linears that one operation serves together; mostly empty.
        features: width of what is sent, where no weight of the module's or of these linears has it; else None.
        value_bytes: bytes of a value.
        of_sequences: whether it is of whole sequences, which the module gets from the CP ranks.
    """

    phase: Literal["forward", "backward"]
    op: str
    tensor: Literal["input", "output", "loss"]
    shared_by: tuple[str, ...] = ()
    features: int | None = None
    value_bytes: int = BYTES_16_BITS
    of_sequences: bool = False


# The largest logit, the label's, and the sum of exponentials: ``core/tensor_parallel/cross_entropy.py``.
_OF_LOSS = 3 * [Transfer("forward", "all_reduce", "loss", features=1, value_bytes=4)]


def transfers(
    plan: Plan, *, hidden_size: int | None = None, latent: MlaSpec | None = None, head: str | None = None
) -> dict[str, list[Transfer]]:
    """Returns the operations of each module over the TP group, by module path; empty at TP 1.

    Linears that read the same activation inside one module share one operation for it, which is listed at that
    module (see ``layers/regions.py`` and ``layers/fused_columns.py``).

    Args:
        hidden_size: width of the hidden state; None where it is not known.
        latent: form of the layers' attention, if that is latent.
        head: path of the module whose output is the logits; None without one.
    """
    if plan.layout.tp == 1:
        return {}
    apart = _latent_attention(plan, latent)
    shared = shared_regions(plan).items()
    kept = {path: columns for path, (_, columns) in shared if apart.keys().isdisjoint(columns)}
    regions = kept | _joined_columns(plan, kept, apart)
    entered = {column for columns in regions.values() for column in columns}
    found = {path: _of_cut(plan, path, path in entered) for path in plan.cuts}
    order = {name.rpartition(".")[0]: place for place, name in enumerate(plan.canonical)}
    for path, columns in regions.items():
        # Where operations read the input of a region beside columns, columns may read another tensor.
        features = hidden_size if path in plan.tp_facts.needed_regions else None
        if not columns:  # what is whole inside reads the sequence of all ranks, as experts do
            entering = 0 if plan.in_block(path) else _entering(plan, path)
            found[path] = _of_whole_region(plan, path, features) * entering
            continue
        # They are found in the order in which a set has them, which differs between layers and runs.
        names = tuple(column[len(path) + 1 :] for column in sorted(columns, key=order.__getitem__))
        again = (path not in kept or plan.in_block(path)) and _gathers_again(plan, columns[0])
        found[path] = _of_input(derived_syncs(plan, columns[0]), names, again, features) * _entering(plan, path)
    for path in apart.values() if latent is not None else ():
        rotated = partial(Transfer, tensor="output", features=latent.qk_rope_head_dim)
        found[path] = [rotated("forward", "all_gather"), rotated("backward", "reduce_scatter")]
    for path, rows in plan.experts.items():
        if not plan.in_block(path):
            features = hidden_size and rows * hidden_size
            found[path] = _of_experts(plan.tp_facts.experts.get(path, INVARIANT), features)
    if head is not None and _cuts_logits(plan, head):
        found[head] = found[head] + _OF_LOSS
    return {path: _as_long_as_inside(plan, path, sent) for path, sent in found.items() if sent}


def _joined_columns(
    plan: Plan, regions: Mapping[str, tuple[str, ...]], apart: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Returns further columns that one matrix product computes, by the module around them.

    Args:
        regions: columns of regions, by path.
        apart: columns of latent attention, whose projections are not joined.
    """
    found = {}
    for path in plan.attentions | plan.mixtures | plan.mlps.keys():  # whose projections are several together
        alone = plan.tp_facts.regions.get(path)
        if alone is not None and len(alone.columns) > 1 and apart.keys().isdisjoint(alone.columns):
            found[path] = alone.columns
    together = {column for columns in [*regions.values(), *found.values()] for column in columns}
    for columns in plan.fused_columns:  # one product communicates once
        if columns[0] not in together:
            found[columns[0].rpartition(".")[0]] = columns
    return found


def _entering(plan: Plan, path: str) -> int:
    """Returns how many tensors enter a region; what linears alone read is one, in however many arguments."""
    return len(plan.tp_facts.regions[path].slots) if path in plan.tp_facts.needed_regions else 1


def _of_whole_region(plan: Plan, path: str, features: int | None) -> list[Transfer]:
    """Returns the operations of a module that is a region without columns in it (``layers/regions.py``)."""
    split = plan.splits_sequence(path)
    syncs = {"fwd_pre": "all_gather", "bwd_post": "reduce_scatter"} if split else {"bwd_post": "all_reduce"}
    return _of_input({"fwd_pre": None, **syncs}, features=features)


def _of_experts(tokens: TpType, features: int | None) -> list[Transfer]:
    """Returns the operations of experts that are shared out over EP (``layers/experts.py``).

    Where the TP ranks have the same tokens, each sends its share of them to the experts.

    Args:
        tokens: what these are to the TP ranks.
        features: width of the rows that the experts take of a token.
    """
    if tokens not in (INVARIANT, REPLICATE):
        return []
    found = [Transfer("forward", "all_gather", "output", features=features)]
    if tokens == INVARIANT:
        return [*found, Transfer("backward", "all_gather", "input", features=features)]
    return [*found, Transfer("backward", "reduce_scatter", "output", features=features)]


def _as_long_as_inside(plan: Plan, path: str, sent: list[Transfer]) -> list[Transfer]:
    """Returns the operations of a module with what is true of its sequences: whole ones inside of CP regions.

    Those regions themselves are inside of TP regions of the same modules (``lowering/lower.py``).
    """
    regions = () if plan.cp_facts is None else plan.cp_facts.regions
    whole = any(path.startswith(f"{region}.") for region in regions)
    return [replace(one, of_sequences=True) for one in sent] if whole else sent


def _gathers_again(plan: Plan, column: str) -> bool:
    """Returns whether a column that gathers its input's sequence does so once more for its weight's gradient.

    Megatron's do (``core/tensor_parallel/layers.py``), so as not to keep the whole. A region keeps it for all that
    read it, as does ``layers/te/linear.py``.
    """
    return column not in plan.te_linears


def _of_input(
    syncs: dict[str, str | None],
    shared_by: tuple[str, ...] = (),
    again: bool = False,
    features: int | None = None,
) -> list[Transfer]:
    entering = partial(Transfer, tensor="input", shared_by=shared_by, features=features)
    found = []
    if syncs["fwd_pre"]:
        found.append(entering("forward", syncs["fwd_pre"]))
    if again and syncs["fwd_pre"] == "all_gather":
        found.append(entering("backward", "all_gather"))
    if syncs["bwd_post"]:
        found.append(entering("backward", syncs["bwd_post"]))
    return found


def _of_cut(plan: Plan, path: str, entered: bool) -> list[Transfer]:
    syncs = derived_syncs(plan, path)
    found = [] if entered else _of_input(syncs, again=_gathers_again(plan, path))
    if syncs["fwd_post"]:
        found.append(Transfer("forward", syncs["fwd_post"], "output"))
        back = _of_gradient(plan, path, syncs["fwd_post"])
        found += [Transfer("backward", back, "output")] if back else []
    return sorted(found, key=lambda transfer: transfer.phase != "forward")


def _of_gradient(plan: Plan, path: str, op: str) -> str | None:
    """Returns the operation on the gradient of an output on which ``op`` was done; None where it sends nothing."""
    if op == "reduce_scatter":  # it comes back as parts of the sequence
        return "all_gather"
    facts = plan.tp_facts
    inside = path in (facts.inside if plan.cuts[path] == "column" else facts.rows_inside)
    if not inside or plan.in_block(path):  # every rank has the whole gradient
        return None
    return {"all_gather": "reduce_scatter", "all_reduce": "all_reduce"}[op]


def _latent_attention(plan: Plan, latent: MlaSpec | None) -> dict[str, str]:
    """Returns, of Megatron's latent attention, the projection from the compressed form of k and v -> that to it.

    Its columns read different compressed forms, each cut along the sequence. Sequences of the rotated part of k,
    which all heads share, are gathered as well (``multi_latent_attention.py`` of Megatron).
    """
    if latent is None or plan.structure is None:
        return {}
    layers = plan.structure.layer_paths()
    found = {f"{layer}.{latent.kv_up}": f"{layer}.{latent.kv_down}" for layer in layers}
    return {up: down for up, down in found.items() if plan.in_block(up)}


def _cuts_logits(plan: Plan, head: str) -> bool:
    """Returns whether the loss takes logits that are cut over the vocabulary."""
    takes_labels = plan.structure is not None and plan.structure.loss_labels is not None
    return plan.cuts.get(head) == "column" and head not in plan.tp_facts.gather and not takes_labels
