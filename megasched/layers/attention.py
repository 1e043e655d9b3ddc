"""Computes attention through HF's ``AttentionInterface``, by one function for all definitions that use it.

It sees local heads only, so it is the same at any TP. Plain causal attention goes to a fused kernel; a mask that
HF built (sliding window, chunks) is applied unchanged. Under context parallelism a rank's queries attend to the
keys of all ranks (``context_parallel.py``), with masks of their true positions (``mask_interface.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.analysis.trials import attention_switch
from megasched.definition import attention_interface, mask_interface
from megasched.definition.attention_interface import HARMLESS
from megasched.definition.sequence_split import causal_mask
from megasched.errors import MegaschedError
from megasched.layers.context_parallel import CpGroup
from megasched.layers.fused import capped_attention
from megasched.layers.fused.biased_product import autocast_dtype
from megasched.layers.packed import is_packed_mask
from megasched.layers.recompute.recompute import recompute
from megasched.layers.rng import fork_rng
from megasched.layers.te.attention import TeCore, why_not_te, window_of
from megasched.layers.torch_attention import fused_attention, plain_attention

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AttentionSettings:
    """Holds the lowering's facts about one attention module; stored on the module as ``megasched_attention``.

    Attributes:
        local_heads: query heads on this rank; another number in a forward is an error: a definition that views
            heads by its own count would silently compute wrongly. None if they are whole, and need not be heads.
        sharded: heads are sharded over TP, so that dropout must differ between the ranks.
        te: Transformer Engine's kernels, if they are used.
        context: the ranks that share the sequence of these queries; None if this module has all of it.
        packed: a row may hold several sequences, which masks keep apart.
        first_head: index of this rank's first query head among all.
        recompute: recompute the attention core in the backward pass (Megatron's ``core_attn``).
        logged: reasons for which torch and not Transformer Engine computed calls; each is logged once.
    """

    local_heads: int | None
    sharded: bool
    te: TeCore | None = None
    context: CpGroup | None = None
    packed: bool = False
    first_head: int = 0
    recompute: bool = False
    logged: set[str] = field(default_factory=set)

    def stays_with_torch(self, reason: str) -> bool:
        """Returns whether a reason keeps a call from Transformer Engine; logs it once at debug level."""
        if reason and reason not in self.logged:
            self.logged.add(reason)
            log.debug("attention stays with torch, not Transformer Engine: %s", reason)
        return bool(reason)


# Of a module that no lowering knows: it has all heads and the whole sequence.
_WHOLE = AttentionSettings(None, sharded=False)


@dataclass(frozen=True)
class AttentionCall:
    """Represents a call of attention: HF's arguments, and, once it is resolved, how it is computed.

    Attributes:
        query, key, value: [b, heads, s, d]; key and value may have fewer heads, and the tokens of all CP ranks.
        mask: boolean (True attends) or additive; None if ``causal`` suffices.
        causal: whether queries attend only to earlier tokens; None: the module decides.
        dropout, scaling, softcap, position_bias: as in ``attention_forward``.
        sinks: of the heads of this rank.
        sliding_window: how many tokens, itself included, a query attends to; None for all.
        indices: of the keys that each query attends to; None for all.
        window: the sliding window in Transformer Engine's form: (left, right).
        windowed: the mask is a sliding window and nothing else.
        packed: bounds of packed sequences, and the longest, if the mask is these and nothing else.
        te: computes the call; None leaves it to torch.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool | None
    dropout: float
    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None
    position_bias: torch.Tensor | None
    sliding_window: int | None
    indices: torch.Tensor | None
    window: tuple[int, int] = (-1, 0)
    windowed: bool = False
    packed: tuple[torch.Tensor, int] | None = None
    te: TeCore | None = None

    def compute(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Runs the kernel that was chosen; the tensors are arguments, so that it can be recomputed from them."""
        causal = bool(self.causal)
        if self.te is not None:
            return self.te(
                query,
                key,
                value,
                causal=causal or self.windowed or self.packed is not None,
                window=self.window,
                dropout=self.dropout,
                scaling=self.scaling,
                softcap=self.softcap,
                sinks=self.sinks,
                packed=self.packed,
            )
        if self.softcap is None and self.sinks is None and self.position_bias is None:
            return fused_attention(query, key, value, self.mask, causal, self.dropout, self.scaling)
        if self._is_capped_alone and capped_attention.takes(query, key, value):
            return capped_attention.capped_attention(
                query, key, value, softcap=self.softcap, left=self.window[0], scaling=self.scaling
            )
        return plain_attention(
            query,
            key,
            value,
            self.mask,
            causal,
            self.dropout,
            self.scaling,
            softcap=self.softcap,
            sinks=self.sinks,
            position_bias=self.position_bias,
        )

    @property
    def _is_capped_alone(self) -> bool:
        """Returns whether it caps logits and is causal or has a window, and that is all."""
        others = self.sinks is not None or self.position_bias is not None or self.dropout
        return self.softcap is not None and bool(self.causal or self.windowed) and not others


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
    """Computes the attention core in HF's calling convention.

    Args:
        query: [b, heads, s, head_dim]; key and value may have fewer heads (GQA).
        attention_mask: [b or 1, 1, s, s], boolean (True attends) or additive; None is causal or full
            attention, by ``module.is_causal``. Under context parallelism [b or 1, 1, s / cp, s], of this
            rank's queries; everything else is s / cp long.
        s_aux: [heads], logits of an extra place that queries attend to and that adds nothing to the result
            (gpt-oss); of all ranks.
        sinks: [b, heads, s, 1], such logits for each query (Inkling).
        indices: [b, s, k] of the keys that each query attends to, among those that the mask allows (DeepSeek's
            sparse attention, arXiv 2512.02556); None for all.
        cu_seq_lens_q: bounds of packed sequences in all rows together (``PackedRows``); the mask has them, too.
        max_length_q: length of the longest of them.

    Returns:
        [b, s, heads, value_head_dim] and no attention weights.

    Raises:
        MegaschedError: the number of heads is not this rank's, a tensor argument is unknown, or a tensor can't be
            made whole under context parallelism.
    """
    _refuse_unknown(module, kwargs)
    settings: AttentionSettings = getattr(module, "megasched_attention", _WHOLE)
    sinks = s_aux if sinks is None else sinks
    given = (dropout, scaling, softcap, sinks, position_bias, sliding_window, indices)
    call = AttentionCall(*_in_one_dtype(query, key, value), attention_mask, is_causal, *given)
    bounds = None if cu_seq_lens_q is None or max_length_q is None else (cu_seq_lens_q, max_length_q)
    call = resolve(module, settings, call, bounds)
    # TE is given no tracker: it would fork a second time where a layer has forked already (sequence parallelism),
    # and also where heads are whole and all ranks must draw the same.
    with fork_rng() if dropout and settings.sharded else nullcontext():
        again = settings.recompute and torch.is_grad_enabled()
        run = partial(recompute, call.compute) if again else call.compute
        output = run(call.query, call.key, call.value)
    return output.transpose(1, 2).contiguous(), None  # some definitions view it


def _in_one_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns query, key and value in the dtype of ``torch.autocast``, to which torch's own attention casts them.

    A rotary embedding leaves some in float32. Transformer Engine and compiled kernels refuse several dtypes.
    """
    dtypes = [autocast_dtype(tensor) if tensor.dtype != torch.float64 else None for tensor in tensors]
    return [tensor if dtype is None else tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


def resolve(
    module: nn.Module, settings: AttentionSettings, call: AttentionCall, bounds: tuple[torch.Tensor, int] | None
) -> AttentionCall:
    """Decides how a call is computed: its mask, its kernel, and the keys that its queries attend to.

    Args:
        call: as HF passes it.
        bounds: bounds of packed sequences, and the longest; None if the caller does not pass them.

    Raises:
        MegaschedError: see ``attention_forward``.
    """
    _refuse_foreign(module, settings, call.query)
    context, te, length = settings.context, settings.te, call.query.shape[2]
    causal_layer = bool(getattr(module, "is_causal", True) if call.causal is None else call.causal)
    mask, sliding_window = call.mask, call.sliding_window
    if mask is not None and mask_interface.is_causal(mask):
        mask, causal_layer = None, True
    causal = causal_layer and mask is None and length > 1
    if call.indices is not None:
        mask, causal = _of_selected(mask, causal, call.indices, call.key.shape[2]), False
        sliding_window = None  # the mask says it
    sinks = call.sinks
    if sinks is not None and settings.local_heads is not None and sinks.dim() == 1:
        sinks = sinks.narrow(0, settings.first_head, settings.local_heads)
    window = window_of(sliding_window, length * (1 if context is None else context.zigzag.size))
    # A causal layer's mask is its window, which may be as long as the sequence; any other mask is the definition's
    # own and goes to torch.
    windowed, packed = causal_layer and mask is not None and sliding_window is not None, None
    if settings.packed and mask is not None:
        windowed = False  # it may divide sequences, too
        if te is not None and causal_layer and bounds is not None:
            packed = (
                bounds if is_packed_mask(mask, bounds[0], sliding_window if window[0] >= 0 else None) else None
            )
    call = replace(call, mask=mask, causal=causal, sinks=sinks, window=window, windowed=windowed, packed=packed)
    if te is not None and not settings.stays_with_torch(_why_not_te(te, context, call)):
        call = replace(call, te=te)
    return call if context is None or call.te is not None else _with_all_keys(module, context, call)


def _refuse_foreign(module: nn.Module, settings: AttentionSettings, query: torch.Tensor) -> None:
    """Refuses a call that differs from the trial call: on a part of a sequence, or with heads of other ranks."""
    if settings.context is None and mask_interface.in_context():
        raise MegaschedError(
            f"{type(module).__name__} calls attention on its part of the sequence, and did not in the trial call: "
            "context parallelism does not know of it. Run it without --context-parallel-size"
        )
    if settings.local_heads is not None and query.shape[1] != settings.local_heads:
        raise MegaschedError(
            f"{type(module).__name__} views {query.shape[1]} query heads where this rank holds "
            f"{settings.local_heads}: it takes the head count from an attribute; name it in the adapter's "
            "local_attributes, so that it is divided by the tensor parallel size"
        )


def _why_not_te(te: TeCore, context: CpGroup | None, call: AttentionCall) -> str:
    """Returns why torch computes a call; empty if Transformer Engine does."""
    reason = why_not_te(
        softcap=call.softcap,
        dropout=call.dropout,
        s_aux=call.sinks,
        position_bias=call.position_bias,
        other_mask=call.mask is not None and not call.windowed and call.packed is None,
        packed=call.packed is not None,
    )
    if reason or context is None:
        return reason
    windowed = call.windowed and call.window[0] >= 0
    return te.why_not_in_context(call.query, call.key, windowed=windowed, softcap=call.softcap, sinks=call.sinks)


def _with_all_keys(module: nn.Module, context: CpGroup, call: AttentionCall) -> AttentionCall:
    """Returns the call with the keys and values of the whole sequence, and the mask of this rank's queries."""
    if call.indices is not None or call.position_bias is not None:
        raise MegaschedError(
            f"{type(module).__name__} chooses keys, or biases logits, by its part of the sequence alone; "
            "run it without --context-parallel-size"
        )
    key, value = context.gather_together(call.key, call.value)
    queries, mask = call.query.shape[2], call.mask
    if call.causal:
        mask = causal_mask(context.zigzag.positions(queries, call.query.device), key.shape[2])[None, None]
    if mask is not None and mask.shape[-2:] != (queries, key.shape[2]):
        raise MegaschedError(
            f"a mask {list(mask.shape)} for {queries} queries of this rank and {key.shape[2]} keys of all: "
            "the definition made it of its part of the sequence alone. Run it without --context-parallel-size"
        )
    return replace(call, key=key, value=value, mask=mask, causal=False)


def _refuse_unknown(module: nn.Module, arguments: dict[str, Any]) -> None:
    unknown = [name for name, value in arguments.items() if value is not None and name not in HARMLESS]
    if unknown:
        raise MegaschedError(
            f"{type(module).__name__} calls attention with {', '.join(unknown)}, which megasched's attention does "
            "not know; to leave it out would compute something else. Add it in megasched/layers/attention.py"
        )


def _of_selected(mask: torch.Tensor | None, causal: bool, indices: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a mask [b, 1, s, s] of the selected keys among those that the mask (or causality) allows."""
    batch, queries, _ = indices.shape
    selected = torch.zeros(batch, queries, length, dtype=torch.bool, device=indices.device)
    selected = selected.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return selected.tril() if causal else selected
    if mask.dtype == torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


def register() -> None:
    """Registers this module's attention as that of a run."""
    attention_interface.register(attention_forward)


def enable(model: Any, inputs: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Makes a definition call this module's attention, if it calls attention by a name and the result is the same.

    Args:
        inputs: keyword arguments of its forward; by default those of a trial.

    Returns:
        The function that restores the names.
    """
    register()
    return attention_switch.enable(model, inputs)
