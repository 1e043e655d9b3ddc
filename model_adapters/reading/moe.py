"""Architectures whose mixtures of experts Megatron's own ``MoELayer`` can compute, and when it can."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from megasched.definition.build import text_config
from megasched.definition.experts import find_experts
from megasched.language.module_specs import ExpertSpec, MoeSpec
from megasched.model_adapters.reading.stock import why_altered

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _Kind:
    """Names in the module that is the mixture, and how its router chooses.

    Attributes:
        router: the module that chooses; it has ``top_k`` and, where that is a choice, ``norm_topk_prob``,
            ``num_group`` and ``topk_group``.
        linear: the module with its weight, where that is another.
        normalized: None: as ``norm_topk_prob`` says.
        scale: attribute that the weights are multiplied with; empty for none.
        with_scores: the mixture returns the router's scores, too.
        best_of_group: groups are chosen by the sum of so many of their best scores; 0: in a way of their own.

    The others are those of ``MoeSpec``.
    """

    router: str = "gate"
    linear: str = ""
    scores: str = "softmax"
    float32: bool = False
    normalized: bool | None = None
    correction: str = ""
    scale: str = ""
    best_of_group: int = 2
    shared: str = ""
    shared_gate: str = ""
    with_scores: bool = False


_NORMED = _Kind(normalized=True)
_GRANITE = _Kind(router="router", normalized=True)
_QWEN2 = _Kind(shared="shared_expert", shared_gate="shared_expert_gate")
# arXiv 2412.19437
_DEEPSEEK_V3 = _Kind(
    scores="sigmoid",
    float32=True,
    correction="gate.e_score_correction_bias",
    scale="gate.routed_scaling_factor",
    shared="shared_experts",
)

# How HF spells the activations of experts with gates and without.
ACTIVATIONS = {"swiglu": ("SiLUActivation", "SiLU", "silu"), "squared_relu": ("ReLUSquaredActivation",)}
_ALPHA = 1.702  # of Megatron's quick_gelu (megatron/core/fusions/fused_bias_geglu.py)
# Model type -> its mixtures. Each is proven by tests/parity: test_mixtures.py, test_mixture_blocks.py.
KINDS = {
    **dict.fromkeys(("qwen3_moe", "olmoe", "flex_olmo", "mellum"), _Kind()),
    **dict.fromkeys(("mixtral", "minimax"), _NORMED),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _GRANITE),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen4_exp_text"), _QWEN2),
    "lara_mini": _Kind(float32=True, shared="shared_expert"),
    "qwen3_5_moe_text": replace(_QWEN2, normalized=True),
    "gpt_oss": replace(_GRANITE, with_scores=True),
    "aria_text": replace(_GRANITE, shared="shared_experts"),
    "jamba": _Kind(router="router", normalized=False),
    "hunyuan_v1_moe": replace(_NORMED, linear="gate.wg", float32=True, shared="shared_mlp"),
    "cohere2_moe": replace(_NORMED, shared="shared_experts"),
    "deepseek_v2": _Kind(
        normalized=False,
        float32=True,
        scale="gate.routed_scaling_factor",
        best_of_group=1,
        shared="shared_experts",
    ),
    **dict.fromkeys(
        (
            *("deepseek_v3", "deepseek_v32", "dots1", "dots3_note_text", "glm4_moe", "glm4_moe_lite"),
            *("glm_moe_dsa", "solar_open", "exaone_moe", "bailing_hybrid", "kimi_linear", "mimo_v2_flash"),
            *("nemotron_h", "sarvam_moe", "sarvam_mla"),
        ),
        _DEEPSEEK_V3,
    ),
    "axk2": replace(_DEEPSEEK_V3, best_of_group=0),
    "beam": replace(_DEEPSEEK_V3, scale="routed_scaling_factor"),
    "hy_v3": replace(
        _DEEPSEEK_V3,
        normalized=True,
        correction="e_score_correction_bias",
        scale="gate.router_scaling_factor",
    ),
    "minimax_m2": _Kind(scores="sigmoid", normalized=True, correction="e_score_correction_bias"),
    "flint": _Kind(scores="sigmoid", float32=True, shared="shared_expert"),
    "lfm2_moe": _Kind(scores="sigmoid", correction="expert_bias", scale="gate.routed_scaling_factor"),
}


def mixture_of(model: nn.Module) -> MoeSpec | str:
    """How the mixtures of a definition are put together, or why Megatron's can't stand for them."""
    config: Any = text_config(model.config)
    kind = KINDS.get(config.model_type)
    if kind is None:
        return f"no mixture is known for model type {config.model_type!r}"
    paths = [experts.rpartition(".")[0] for experts in find_experts(model)]
    if not paths:
        return "the model has no experts of the form that HF gives them"
    if reason := why_altered(model, paths):
        return reason
    routers: list[Any] = [model.get_submodule(f"{path}.{kind.router}") for path in paths]
    if len({router.top_k for router in routers}) > 1:
        return "layers choose different numbers of experts"
    path, router = paths[0], routers[0]
    name, module = path.rpartition(".")[2], model.get_submodule(path)
    shared = kind.shared if hasattr(module, kind.shared) else ""
    grouped = _groups(router, config)
    reason = _why_not(kind, module, shared, config) or _why_not_routed(kind, router, grouped)
    if reason:
        return reason
    # What there is under these names.
    own = {"correction": kind.correction, "shared": shared, "shared_gate": kind.shared_gate}
    return MoeSpec(
        router=f"{name}.{kind.linear or kind.router}",
        experts=f"{name}.experts",
        top_k=router.top_k,
        normalized=_normalized(kind, router),
        scores=_scores(kind, router),
        float32=kind.float32,
        expert_groups=grouped[0],
        group_top_k=grouped[1],
        expert=_expert(module.experts),
        with_scores=kind.with_scores,
        scale=reduce(getattr, kind.scale.split("."), module) if kind.scale else 1.0,
        **{field: f"{name}.{value}" for field, value in own.items() if value and _has(module, value)},
    )


def _has(module: nn.Module, path: str) -> bool:
    """Whether there is such a module or buffer."""
    parent, _, name = path.rpartition(".")
    return hasattr(module.get_submodule(parent), name)


def _expert(experts: Any) -> ExpertSpec:
    form = {"biased": experts.has_bias, "transposed": experts.is_transposed}
    form["interleaved"] = experts.has_gate and not experts.is_concatenated
    if hasattr(experts, "alpha"):  # gpt-oss has no function of its own for it
        return ExpertSpec("quick_geglu", **form, limit=experts.limit, offset=1.0)
    return ExpertSpec("swiglu" if experts.has_gate else "squared_relu", **form)


def _scores(kind: _Kind, router: Any) -> Any:
    return getattr(router, "expert_selection_fn", kind.scores)


def _normalized(kind: _Kind, router: Any) -> bool:
    return router.norm_topk_prob if kind.normalized is None else kind.normalized


def _groups(router: Any, config: Any) -> tuple[int, int]:
    """Groups of experts, and how many of them are chosen; 1 and 1 where all are."""
    groups, chosen = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    limited = getattr(config, "topk_method", "group_limited_greedy") == "group_limited_greedy"
    return (groups, chosen) if chosen < groups and limited else (1, 1)


def _why_not(kind: _Kind, module: Any, shared: str, config: Any) -> str:
    reason = _why_not_activated(module.experts, getattr(module, shared) if shared else None)
    if reason:
        return reason
    if shared and getattr(config, "shared_expert_combination_strategy", "sum") != "sum":
        return "shared experts are averaged with the others, and Megatron adds them"
    if getattr(config, "output_router_logits", False):
        return "output_router_logits adds a loss of HF's routers, which are gone then"
    if getattr(config, "router_jitter_noise", 0.0):
        return "router_jitter_noise changes what HF's routers see"
    return ""


def _why_not_activated(experts: Any, shared: Any) -> str:
    activation = _expert(experts).activation
    known = ACTIVATIONS.get(activation, ())
    if activation == "quick_geglu" and experts.alpha != _ALPHA:
        return f"its activation has {experts.alpha} (swiglu_alpha), and Megatron's {_ALPHA}"
    for part in (*([experts] if known else []), *([shared] if shared is not None else [])):
        name = getattr(part.act_fn, "__name__", type(part.act_fn).__name__)
        if name not in known:
            return f"its activation is {name}, and Megatron's experts are given {known[0]}"
    return ""


def _why_not_routed(kind: _Kind, router: Any, grouped: tuple[int, int]) -> str:
    """What of routers Megatron's does otherwise (``topk_routing_with_score_function`` and ``group_limited_topk``
    in megatron/core/transformer/moe/moe_utils.py)."""
    chosen, normalized = router.top_k, _normalized(kind, router)
    if _scores(kind, router) == "sigmoid" and normalized != (chosen > 1):
        adds = "add up to one" if normalized else "are the scores themselves"
        return f"the weights of a token's {chosen} experts {adds} (norm_topk_prob), and not in Megatron's router"
    groups, chosen_groups = grouped
    if groups == 1:
        return ""
    if not kind.best_of_group:
        return "HF's router scores experts of groups that are not chosen with 0, Megatron's leaves them out"
    each = chosen // chosen_groups
    if each != kind.best_of_group:
        best = kind.best_of_group
        return f"HF's router finds groups by the best {best} scores in each, Megatron's by the best {each}"
    return ""
