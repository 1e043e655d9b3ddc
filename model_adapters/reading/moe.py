"""Reads the structure of a definition's mixtures of experts, or the reason why Megatron's can't replace them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

from torch import nn

from megasched.definition.build import text_config
from megasched.definition.expert_trials import is_transposed
from megasched.definition.experts import MARKER, find_experts, is_batched
from megasched.errors import Declined
from megasched.language.module_specs import ExpertSpec, MoeSpec
from megasched.model_adapters.reading.stock import why_altered

# How HF spells the activations of experts with gates and without.
ACTIVATIONS = {"swiglu": ("SiLUActivation", "SiLU", "silu"), "squared_relu": ("ReLUSquaredActivation",)}
_ALPHA = 1.702  # of Megatron's quick_gelu (megatron/core/fusions/fused_bias_geglu.py)


@dataclass(frozen=True)
class MoeFacts:
    """Holds the facts about a family's mixtures of experts that its definition does not show.

    They are names in the mixture's module, and how its router chooses; the defaults are Qwen3-MoE's.
    Each family's facts are proven in tests/parity: by test_mixtures.py or test_mixture_blocks.py.

    Attributes:
        router: the module that chooses; it has ``top_k`` and, if they vary, ``norm_topk_prob``, ``num_group`` and
            ``topk_group``.
        linear: the module with the router's weight, if it is another one.
        normalized: whether the weights of a token's experts add up to one; None: the value of ``norm_topk_prob``.
        scale: attribute with the factor of the weights; empty for none.
        best_of_group: groups are chosen by the sum of this many of their best scores; 0: by another rule.

    The others are those of ``MoeSpec``.
    """

    router: str = "gate"
    linear: str = ""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    float32: bool = False
    normalized: bool | None = None
    correction: str = ""
    scale: str = ""
    best_of_group: int = 2
    shared: str = ""
    shared_gate: str = ""
    with_scores: bool = False
    flat: bool = False


def read_moe(model: nn.Module, facts: MoeFacts) -> MoeSpec | Declined:
    """Returns the spec of a definition's mixtures, or the reason why Megatron's can't replace them."""
    config: Any = text_config(model.config)
    paths = [experts.rpartition(".")[0] for experts in find_experts(model)]
    if not paths:
        return Declined("the model has no experts of the form that HF gives them")
    if reason := why_altered(model, paths):
        return Declined(reason)
    routers: list[Any] = [model.get_submodule(f"{path}.{facts.router}") for path in paths]
    if len({router.top_k for router in routers}) > 1:
        return Declined("layers choose different numbers of experts")
    path, router = paths[0], routers[0]
    name, module = path.rpartition(".")[2], model.get_submodule(path)
    shared = facts.shared if hasattr(module, facts.shared) else ""
    grouped = _groups(router, config)
    if not is_batched(module.experts) and not hasattr(module.experts, MARKER):
        return Declined("its experts are code of their own, which does not say what it computes")
    if reason := _why_not(module, shared, config) or _why_not_routed(facts, router, grouped):
        return Declined(reason)
    # What there is under these names.
    own = {"correction": facts.correction, "shared": shared, "shared_gate": facts.shared_gate}
    return MoeSpec(
        router=f"{name}.{facts.linear or facts.router}",
        experts=f"{name}.experts",
        top_k=router.top_k,
        normalized=_normalized(facts, router),
        scores=_scores(facts, router),
        float32=facts.float32,
        expert_groups=grouped[0],
        group_top_k=grouped[1],
        expert=_expert(module.experts),
        with_scores=facts.with_scores,
        flat=facts.flat,
        weighted_inputs=is_batched(module.experts),  # which are handed what is not theirs as zeros
        scale=reduce(getattr, facts.scale.split("."), module) if facts.scale else 1.0,
        **{field: f"{name}.{value}" for field, value in own.items() if value and _has(module, value)},
    )


def _has(module: nn.Module, path: str) -> bool:
    """Returns whether there is a module or buffer at this path."""
    parent, _, name = path.rpartition(".")
    return hasattr(module.get_submodule(parent), name)


def _expert(experts: Any) -> ExpertSpec:
    if is_batched(experts):
        return ExpertSpec(transposed=is_transposed(experts))
    form = {"biased": experts.has_bias, "transposed": experts.is_transposed}
    form["interleaved"] = experts.has_gate and not experts.is_concatenated
    if hasattr(experts, "alpha"):  # gpt-oss has no function of its own for it
        return ExpertSpec("quick_geglu", **form, limit=experts.limit, offset=1.0)
    return ExpertSpec("swiglu" if experts.has_gate else "squared_relu", **form)


def _scores(facts: MoeFacts, router: Any) -> Any:
    return getattr(router, "expert_selection_fn", facts.scores)


def _normalized(facts: MoeFacts, router: Any) -> bool:
    return router.norm_topk_prob if facts.normalized is None else facts.normalized


def _groups(router: Any, config: Any) -> tuple[int, int]:
    """Returns the number of groups of experts and how many of them are chosen; (1, 1) if all are."""
    groups, chosen = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    limited = getattr(config, "topk_method", "group_limited_greedy") == "group_limited_greedy"
    return (groups, chosen) if chosen < groups and limited else (1, 1)


def _why_not(module: Any, shared: str, config: Any) -> str:
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
        function = part.act_fn if hasattr(part, "act_fn") else part.activation_fn
        name = getattr(function, "__name__", type(function).__name__)
        if name not in known:
            return f"its activation is {name}, and Megatron's experts are given {known[0]}"
    return ""


def _why_not_routed(facts: MoeFacts, router: Any, grouped: tuple[int, int]) -> str:
    """Returns how Megatron's router would differ from the definition's; empty if it does not.

    See ``topk_routing_with_score_function`` and ``group_limited_topk`` in
    megatron/core/transformer/moe/moe_utils.py.
    """
    chosen, normalized = router.top_k, _normalized(facts, router)
    if _scores(facts, router) == "sigmoid" and normalized != (chosen > 1):
        adds = "add up to one" if normalized else "are the scores themselves"
        return f"the weights of a token's {chosen} experts {adds} (norm_topk_prob), and not in Megatron's router"
    groups, chosen_groups = grouped
    if groups == 1:
        return ""
    if not facts.best_of_group:
        return "HF's router scores experts of groups that are not chosen with 0, Megatron's leaves them out"
    each = chosen // chosen_groups
    if each != facts.best_of_group:
        best = facts.best_of_group
        return f"HF's router finds groups by the best {best} scores in each, Megatron's by the best {each}"
    return ""
