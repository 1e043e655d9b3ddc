"""Collects what the matrix shows of an architecture besides the numbers of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from megasched.language.parallel_dims import ParallelDims
from megasched.model_adapters.registry import has_roles

if TYPE_CHECKING:
    from megasched.trainer.session import Session


def facts(folder: str) -> dict[str, Any]:
    """Returns what decides on a model's linears at TP 2, and which of its modules Megatron's own can replace.

    It runs in a rank. ``whole`` maps linears that stay whole to the reason; ``tied`` tells if weights are tied.
    ``fused`` has ``block`` where Megatron's own layer can stand for the model's layers; elsewhere ``attention``,
    ``mixture`` and ``mlp`` where Megatron's can for these; ``joint`` where projections share one matrix product.
    """
    from megasched.plan.decisions import decisions_of
    from megasched.trainer.session import open_session

    session = open_session("auto", folder, ParallelDims(tensor_model_parallel_size=2))
    decisions = decisions_of(session.plan, by_user=False)
    inferred = [d.parameter for d in decisions if d.decided_by.startswith("inferred")]
    return {
        "class": type(session.definition).__name__,
        "plan": any(d.decided_by.startswith("HF's plan") for d in decisions if "layers" in d.parameter),
        "adapter": has_roles(session.definition.config.model_type),
        "inferred": [name for name in inferred if name.endswith(".weight")],
        "tied": any(name != canonical for name, canonical in session.plan.canonical.items()),
        "fused": [
            *(["joint"] if session.plan.fused_columns or session.plan.attentions else []),
            *_by_megatron(session),
        ],
        "whole": {d.parameter: d.declined for d in decisions if d.declined},
    }


def _by_megatron(session: Session) -> list[str]:
    """Returns which parts of a definition modules of Megatron's own can stand for, e.g. ``block``."""
    roles, structure = session.plan.roles, session.plan.structure
    if isinstance(roles.layer, LayerSpec):
        return ["block"]
    in_layers = [mlp for path, mlp in roles.mlps.items() if structure and structure.index_of(path) is not None]
    found = ["attention"] if isinstance(roles.attention, AttentionSpec) else []
    found += ["mixture"] if isinstance(roles.moe, MoeSpec) else []
    return [*found, "mlp"] if any(isinstance(mlp, MlpSpec) for mlp in in_layers) else found
