"""What the matrix tells of an architecture beside the numbers of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from megasched.language.parallel_dims import ParallelDims
from megasched.model_adapters.registry import has_roles

if TYPE_CHECKING:
    from megasched.trainer.session import Session


def facts(folder: str) -> dict[str, Any]:
    """In a rank: what is cut of a model at TP 2, by what, what of its linears stays whole, whether it ties
    weights, and what of it is fused: ``block`` where Megatron's own layer can stand for its layers; elsewhere
    ``attention``, ``mixture`` and ``mlp`` where Megatron's can for these alone; ``joint`` where projections share
    one matrix product."""
    from megasched.plan.decisions import decisions_of
    from megasched.trainer.session import open_session

    session = open_session("auto", folder, ParallelDims(tensor_model_parallel_size=2))
    decisions = decisions_of(session.plan, session.schedule.roles, by_user=False)
    inferred = [d.parameter for d in decisions if d.decided_by.startswith("inferred")]
    return {
        "class": type(session.definition).__name__,
        "plan": any(d.decided_by.startswith("HF's plan") for d in decisions if "layers" in d.parameter),
        "adapter": has_roles(session.definition.config.model_type),
        "inferred": [name for name in inferred if name.endswith(".weight")],
        "tied": any(name != canonical for name, canonical in session.plan.canonical.items()),
        "fused": [*(["joint"] if session.plan.joint or session.plan.attentions else []), *_by_megatron(session)],
        "whole": {d.parameter: d.declined for d in decisions if d.declined},
    }


def _by_megatron(session: Session) -> list[str]:
    """What of a definition modules of Megatron's own can stand for."""
    roles, structure = session.schedule.roles, session.plan.structure
    if isinstance(roles.layer, LayerSpec):
        return ["block"]
    in_layers = [mlp for path, mlp in roles.mlps.items() if structure and structure.index_of(path) is not None]
    found = ["attention"] if isinstance(roles.attention, AttentionSpec) else []
    found += ["mixture"] if isinstance(roles.moe, MoeSpec) else []
    return [*found, "mlp"] if any(isinstance(mlp, MlpSpec) for mlp in in_layers) else found
