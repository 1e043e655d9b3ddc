"""Attention through HF's ``AttentionInterface``: one function for every definition that asks for one.

It sees local heads only, so it is the same at any TP. Plain causal attention goes to a fused kernel; a
mask that HF built (sliding window, chunks) is applied as it is. Under context parallelism a rank's queries meet
the keys of all ranks (``context_parallel.py``), and masks are those of their true places (``context_masks.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megasched.analysis.trials import attention_switch
from megasched.definition import attention_interface
from megasched.definition.attention_interface import HARMLESS
from megasched.definition.mask_interface import in_context
from megasched.definition.sequence_split import causal_mask
from megasched.errors import MegaschedError
from megasched.layers.context_parallel import CpGroup
from megasched.layers.packed import is_packed_mask
from megasched.layers.recompute.recompute import recompute
from megasched.layers.rng import fork_rng
from megasched.layers.te.attention import TeCore, why_not_te, window_of

log = logging.getLogger(__name__)


class AttentionSettings:
    """What the lowering knows of one attention module; kept on the module as ``megasched_attention``.

    Attributes:
        local_heads: query heads on this rank; another number in a forward is an error: a definition that views
            heads by a count of its own would go wrong silently. None where they are whole, and may be no heads.
        sharded: heads are cut over TP, so that dropout must differ between the ranks.
        te: Transformer Engine's kernels, where they are used.
        context: the ranks that share the sequence of these queries; None where this module has all of it.
        packed: a row may hold several sequences, which masks keep apart.
        first_head: which of all query heads is the first of this rank.
        recompute: compute the attention core again in the backward pass (Megatron's ``core_attn``).
        told: why calls stayed with torch where Transformer Engine is there; each reason is logged once.
    """

    def __init__(
        self,
        local_heads: int | None,
        sharded: bool,
        te: TeCore | None = None,
        context: CpGroup | None = None,
        packed: bool = False,
        first_head: int = 0,
    ) -> None:
        self.local_heads, self.first_head = local_heads, first_head
        self.sharded, self.te = sharded, te
        self.context = context
        self.packed = packed
        self.recompute = False
        self.told: set[str] = set()

    def stays_with_torch(self, reason: str) -> bool:
        """Whether a reason keeps a call from Transformer Engine; says so in the debug log, once."""
        if reason and self.te is not None and reason not in self.told:
            self.told.add(reason)
            log.debug("attention stays with torch, not Transformer Engine: %s", reason)
        return bool(reason)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention core in HF's calling convention.

    Args:
        query: [b, heads, s, head_dim]; key and value may have fewer heads (GQA).
        attention_mask: [b or 1, 1, s, s], boolean (True attends) or additive; None is causal or full
            attention, as ``module.is_causal`` says. Under context parallelism [b or 1, 1, s / cp, s], of this
            rank's queries; everything else is s / cp long.
        s_aux: [heads], logits of a place that is attended to and left out of the result (gpt-oss); of the heads of
            all ranks.
        sinks: [b, heads, s, 1], the same for each query (Inkling).
        indices: [b, s, k] of the keys that each query attends to, of those that the mask leaves it (DeepSeek's
            sparse attention, arXiv 2512.02556); None for all.
        cu_seq_lens_q: where packed sequences begin in all rows together (``PackedRows``); the mask says it, too.
        max_length_q: length of the longest of them.

    Returns:
        [b, s, heads, value_head_dim] and no attention weights.

    Raises:
        MegaschedError: more heads than this rank holds, a tensor argument whose meaning is not known, or what
            can't be made whole under context parallelism.
    """
    _refuse_unknown(module, kwargs)
    settings: AttentionSettings | None = getattr(module, "megasched_attention", None)
    context = None if settings is None else settings.context
    if context is None and in_context():
        raise MegaschedError(
            f"{type(module).__name__} calls attention on its part of the sequence, and did not in the trial call: "
            "context parallelism does not know of it. Run it without --context-parallel-size"
        )
    own_heads = settings.local_heads if settings is not None else None
    if own_heads is not None and query.shape[1] != own_heads:
        raise MegaschedError(
            f"{type(module).__name__} views {query.shape[1]} query heads where this rank holds "
            f"{own_heads}: it takes the head count from an attribute; name it in the adapter's "
            "local_attributes, so that it is divided by the tensor parallel size"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
    if indices is not None:
        attention_mask, causal = _of_selected(attention_mask, causal, indices, key.shape[2]), False
        sliding_window = None  # the mask says it

    s_aux = s_aux if sinks is None else sinks
    if s_aux is not None and own_heads is not None and s_aux.dim() == 1:
        s_aux = s_aux.narrow(0, settings.first_head, own_heads)
    plain = softcap is None and s_aux is None and position_bias is None
    window = window_of(sliding_window, query.shape[2] * (1 if context is None else context.zigzag.size))
    # A causal layer's mask is its window; any other mask is the definition's own and goes to torch.
    windowed = bool(is_causal) and attention_mask is not None and window[0] >= 0
    packed = None
    if settings is not None and settings.packed and attention_mask is not None:
        windowed = False  # it may divide sequences, too
        if settings.te is not None and is_causal and cu_seq_lens_q is not None and max_length_q is not None:
            keys = sliding_window if window[0] >= 0 else None
            known = is_packed_mask(attention_mask, cu_seq_lens_q, keys)
            packed = (cu_seq_lens_q, max_length_q) if known else None
    reason = why_not_te(
        softcap=softcap,
        dropout=dropout,
        s_aux=s_aux,
        position_bias=position_bias,
        other_mask=attention_mask is not None and not windowed and packed is None,
        packed=packed is not None,
    )
    if not reason and context is not None and settings is not None and settings.te is not None:
        reason = settings.te.why_not_in_context(query, key, windowed=windowed, softcap=softcap, sinks=s_aux)
    te = None if settings is None or settings.stays_with_torch(reason) else settings.te
    if context is not None and te is None:
        if indices is not None or position_bias is not None:
            raise MegaschedError(
                f"{type(module).__name__} chooses keys, or biases logits, by its part of the sequence alone; "
                "run it without --context-parallel-size"
            )
        key, value, attention_mask = _of_all_ranks(context, query, key, value, attention_mask, causal)
        causal = False

    def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if te is not None:
            return te(
                query,
                key,
                value,
                causal=causal or windowed or packed is not None,
                window=window,
                dropout=dropout,
                scaling=scaling,
                softcap=softcap,
                sinks=s_aux,
                packed=packed,
            )
        if not plain:
            return plain_attention(
                query,
                key,
                value,
                attention_mask,
                causal,
                dropout,
                scaling,
                softcap=softcap,
                sinks=s_aux,
                position_bias=position_bias,
            )
        return fused_attention(query, key, value, attention_mask, causal, dropout, scaling)

    sharded = settings is not None and settings.sharded
    # TE is given no tracker: it would fork a second time where a layer has forked already (sequence parallelism),
    # and also where heads are whole and all ranks must draw the same.
    with fork_rng() if dropout and sharded else nullcontext():
        if settings is not None and settings.recompute and torch.is_grad_enabled():
            output = recompute(core, query, key, value)
        else:
            output = core(query, key, value)
    return output.transpose(1, 2).contiguous(), None  # some definitions view it


def _of_all_ranks(
    context: CpGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values [b, heads, s, d] of the whole sequence, and the mask of this rank's queries."""
    key, value = context.gather_together(key, value)
    if causal:
        mask = causal_mask(context.zigzag.positions(query.shape[2], query.device), key.shape[2])[None, None]
    if mask is not None and mask.shape[-2:] != (query.shape[2], key.shape[2]):
        raise MegaschedError(
            f"a mask {list(mask.shape)} for {query.shape[2]} queries of this rank and {key.shape[2]} keys of all: "
            "the definition made it of its part of the sequence alone. Run it without --context-parallel-size"
        )
    return key, value, mask


def _refuse_unknown(module: nn.Module, arguments: dict[str, Any]) -> None:
    unknown = [name for name, value in arguments.items() if value is not None and name not in HARMLESS]
    if unknown:
        raise MegaschedError(
            f"{type(module).__name__} calls attention with {', '.join(unknown)}, which megasched's attention does "
            "not know; to leave it out would compute something else. Add it in megasched/layers/attention.py"
        )


def _of_selected(mask: torch.Tensor | None, causal: bool, indices: torch.Tensor, length: int) -> torch.Tensor:
    """A mask [b, 1, s, s] of the selected keys among those that the mask (or causality) leaves."""
    batch, queries, _ = indices.shape
    selected = torch.zeros(batch, queries, length, dtype=torch.bool, device=indices.device)
    selected = selected.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return selected.tril() if causal else selected
    if mask.dtype == torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """torch's kernel on [b, heads, s, d] tensors, k and v with fewer heads where they are grouped."""
    grouped = key.shape[1] != query.shape[1]
    if grouped and (mask is not None or key.shape[-1] != value.shape[-1]):
        # torch's kernels take grouped heads only without a mask; with one they fall back to plain math.
        key, value = (_repeat_heads(t, query.shape[1]) for t in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """For what no fused torch kernel takes: soft-capped logits (Gemma 2), sinks (gpt-oss), position bias (T5)."""
    key, value = (_repeat_heads(t, query.shape[1]) for t in (key, value))
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + position_bias
    if causal:
        size = (query.shape[2], key.shape[2])
        mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        # Not -inf: a padding query attends to nothing, and its NaN would reach every other by 0 * NaN.
        lowest = max(torch.finfo(logits.dtype).min, torch.finfo(torch.float32).min)
        logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        of_heads = sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        of_queries = of_heads.expand(query.shape[0], -1, query.shape[2], -1)
        logits = torch.cat([logits, of_queries], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout) @ value


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[b, groups, s, d] -> [b, heads, s, d], each group as many times as it has query heads."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def register() -> None:
    """Makes this module's attention that of a run."""
    attention_interface.register(attention_forward)


def enable(model: Any, inputs: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Has a definition call this module's attention, if it calls attention by a name and this does the same.

    Args:
        inputs: keyword arguments of its forward; by default those of a trial.

    Returns:
        What puts the names back.
    """
    register()
    return attention_switch.enable(model, inputs)
