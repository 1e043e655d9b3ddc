"""Megatron's flags of mixtures of experts that its own layers honour: balancing, how tokens are sent, fusions.

What a mixture is (how many experts, how they are chosen) stays what the HF definition makes it.
"""

from __future__ import annotations

from argparse import Namespace
from fnmatch import fnmatchcase

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
    *("moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_*"),
)
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def is_mixture_flag(dest: str) -> bool:
    """Whether Megatron's own layers honour the flag with this ``args`` attribute."""
    return dest in NOTHING_ASKED or any(fnmatchcase(dest, pattern) for pattern in _BESIDE)


def mixture_flags_asked(args: Namespace) -> tuple[str, ...]:
    """Those flags that ask for something, which a model without Megatron's own mixtures does not do."""
    asked = []
    for dest, nothing in NOTHING_ASKED.items():
        value = getattr(args, dest)
        value = max(value) if isinstance(value, list) else value
        if value != nothing:
            asked.append(f"--{dest.replace('_', '-')}")
    return tuple(asked)


def moe_conflicts(args: Namespace) -> list[str]:
    """What speaks against these flags whatever the model is."""
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
