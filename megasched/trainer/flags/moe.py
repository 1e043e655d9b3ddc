"""Derives the arguments that Megatron needs for mixtures of experts, and checks the flags that it honours.

A mixture itself (how many experts, how they are chosen) stays as the HF definition makes it. Megatron's own layers
honour flags of balancing, of how tokens are sent, and of fusions.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megasched.definition.experts import find_experts
from megasched.definition.objectives import Objective
from megasched.trainer.flags.model_shape import build_on_meta
from megasched.trainer.flags.model_sizes import SourcedValue

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# `args` attribute -> its value where nothing is asked for.
NOTHING_ASKED = {
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_dtype": None,
    "moe_router_fusion": False,
    "moe_router_padding_for_quantization": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_enable_deepep": False,
    "moe_shared_expert_overlap": False,
}
# These say more of one of those, and nothing by themselves.
_BESIDE = (
    *("moe_router_load_balancing_type", "moe_router_bias_update_rate", "moe_per_layer_logging"),
    *("moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
    *("moe_hybridep_num_sms_preprocessing", "moe_hybridep_num_blocks_permute"),
    *("moe_hybridep_num_blocks_unpermute", "moe_hybridep_pad_uneven_dispatch_inputs"),
)
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def is_mixture_flag(dest: str) -> bool:
    """Returns whether Megatron's own layers honour the flag with this ``args`` attribute."""
    return dest in NOTHING_ASKED or dest in _BESIDE


def mixture_flags_asked(args: Namespace) -> tuple[str, ...]:
    """Returns the given flags of mixtures whose effects need Megatron's own mixtures."""
    asked = []
    for dest, nothing in NOTHING_ASKED.items():
        value = getattr(args, dest)
        value = max(value) if isinstance(value, list) else value
        if value != nothing:
            asked.append(f"--{dest.replace('_', '-')}")
    return tuple(asked)


def moe_conflicts(args: Namespace) -> list[str]:
    """Returns a line for each flag of mixtures that can't be used, whatever the model is."""
    kinds = args.moe_router_load_balancing_type
    lines = [
        f"--moe-router-load-balancing-type {kind}: it chooses other experts than the definition's router; there "
        f"are {', '.join(BALANCING)}"
        for kind in (kinds if isinstance(kinds, list) else [kinds])
        if kind not in BALANCING
    ]
    if args.moe_token_dispatcher_type == "alltoall_seq":
        lines.append("--moe-token-dispatcher-type alltoall_seq: there are alltoall and flex")
    return lines


def expert_conflicts(args: Namespace) -> list[str]:
    """Returns a line for each flag of expert parallelism that can't be used, validated by Megatron or not."""
    ep, given = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    lines = []
    if (given or 1) > 1:
        lines.append(
            f"--expert-tensor-parallel-size {given}: experts are shared out whole, not cut by features; leave it "
            "out"
        )
    stages = args.pipeline_model_parallel_size
    ranks = args.world_size // stages
    if ranks % ep:
        lines.append(
            f"--expert-model-parallel-size {ep}: each of the {stages} pipeline stages has {ranks} ranks, "
            f"which is no multiple of {ep}"
        )
    return lines


def expert_arguments(
    args: Namespace, config: PretrainedConfig, objective: Objective, tp_facts: Mapping[str, SourcedValue]
) -> dict[str, SourcedValue]:
    """Returns the ``args`` of experts that Megatron needs; empty where the model has no experts.

    Its own checks want them for expert parallelism (``training/arguments.py:1600``), its schedules to scale losses
    of its routers (``core/pipeline_parallel/schedules.py:353``), and its log to report these losses. For its FLOPs
    count there is one expert as wide as all that a token goes through, as without expert parallelism
    (``model_shape.py``). Megatron's layers get the real mixture (``layers/megatron/layer.py``).
    """
    experts = find_experts(build_on_meta(config, objective, trust_remote_code=bool(args.trust_remote_code)))
    if not experts:  # the plan says so, with the reason
        return {}
    path, count = next(iter(experts.items()))
    layers = {int(part) for name in experts for part in [p for p in name.split(".") if p.isdigit()][:1]}
    pattern = [int(layer in layers) for layer in range(tp_facts["num_layers"].value)]
    found = {
        "num_experts": SourcedValue(count, f"{path} has {count}"),
        "moe_layer_freq": SourcedValue(pattern, "the HF config says which layers have experts"),
        "moe_router_topk": SourcedValue(1, "FLOPs are counted as of one expert"),
        "moe_router_pre_softmax": SourcedValue(True, "Megatron wants it with one expert"),
    }
    if not args.moe_aux_loss_coeff:
        found["moe_router_load_balancing_type"] = SourcedValue("none", "--moe-aux-loss-coeff is not given")
    if args.moe_router_enable_expert_bias:  # the plan refuses it where the model's routers have none
        found["moe_router_score_function"] = SourcedValue("sigmoid", "Megatron wants it with an expert bias")
    if "ffn_hidden_size" in tp_facts:
        found["moe_ffn_hidden_size"] = tp_facts["ffn_hidden_size"]
    return found
