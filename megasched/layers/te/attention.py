"""Calls Transformer Engine's ``DotProductAttention`` from the attention function, if TE is installed.

TE chooses among its kernels (cuDNN fused, flash, unfused) itself. Grouped heads, scales, dropout, sliding windows
and learned sinks are passed to it; soft caps if it has a kernel for them. Torch computes the rest (position bias,
masks of other shapes). Under context parallelism TE itself exchanges keys and values, by ``--cp-comm-type``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch


@cache
def te_attention() -> type | None:
    """Returns TE's ``DotProductAttention``, or None if TE can't be imported."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention


def uses_transformer_engine(device: torch.device) -> bool:
    """Returns whether models on this device are made of TE's modules: it has kernels for GPUs alone."""
    return device.type == "cuda" and te_attention() is not None


@cache
def te_caps_logits() -> bool:
    """Returns whether TE has a kernel for soft-capped logits in this environment.

    Only flash-attn's has it (``get_attention_backend`` in TE); without it, TE would keep [b, heads, s, s] tensors,
    as plain operations do.
    """
    cls = te_attention()
    if cls is None or "softcap" not in signature(cls).parameters:
        return False
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils as flash

    return bool(flash.v2_6_0_plus or flash.fa3_supports_softcap)


@cache
def _flash_attn_2_caps_logits() -> bool:
    """Returns whether flash-attn 2 is there, whose kernel alone caps logits under context parallelism, too."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils as flash

    return bool(flash.v2_6_0_plus)


def why_not_te(
    *,
    softcap: float | None,
    dropout: float,
    s_aux: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    other_mask: bool,
    packed: bool = False,
) -> str:
    """Returns why torch computes a call of attention; empty if TE does.

    Args:
        other_mask: there is a mask that is neither causal nor a sliding window.
        packed: a row holds several sequences.
    """
    if position_bias is not None:
        return "a bias on the logits"
    if other_mask:
        return "a mask that is neither causal nor a sliding window"
    if s_aux is not None and s_aux.dim() > 1:
        return "sinks of each query's own"
    if packed and (s_aux is not None or softcap is not None):
        return "packed sequences with sinks or soft-capped logits"
    if softcap is not None and not te_caps_logits():
        return "soft-capped logits, for which Transformer Engine needs flash-attn 2.6"
    if softcap is not None and dropout:
        return "soft-capped logits with dropout"
    if softcap is not None and s_aux is not None:
        return "soft-capped logits with sinks"
    return ""


def window_of(sliding_window: int | None, length: int) -> tuple[int, int]:
    """Returns TE's (left, right) window of a causal layer; HF counts the token itself. (-1, 0) is no window."""
    if sliding_window is None or sliding_window >= length:
        return (-1, 0)
    return (sliding_window - 1, 0)


def contiguous_unshared(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors with the same values, each contiguous, from the start of a storage of its own.

    TE guesses the layout of q, k and v from strides, offsets and storages (``get_qkv_layout``), and its kernels
    rely on the guess alone. It does not recognise views of [b, heads, s, d], and refuses strides that differ in a
    dim of size 1, which ``contiguous()`` does not change. Tensors with that layout already are not copied.
    """
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    found = []
    for t, storage in zip(tensors, storages, strict=True):
        flat = t.reshape(-1)  # strides of a view of it are canonical, those of dims of size 1 included
        copied = flat.untyped_storage().data_ptr() != storage
        if not copied and (t.storage_offset() or storages.count(storage) > 1):
            flat = flat.clone()
        found.append(flat.view(t.shape))
    return found


def is_one_of_three(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether [b, s, heads, d] tensors are the thirds of one [b, s, 3, heads, d] tensor, in this order.

    TE knows that layout (``bs3hd``), too, and reads it without a copy.
    """
    tensors = (query, key, value)
    _, length, heads, width = query.shape
    third = heads * width
    strides = (length * 3 * third, 3 * third, width, 1)
    return len({each.untyped_storage().data_ptr() for each in tensors}) == 1 and all(
        each.shape == query.shape and each.stride() == strides and each.storage_offset() == number * third
        for number, each in enumerate(tensors)
    )


@dataclass(frozen=True)
class TeCpArgs:
    """Holds TE's arguments for context parallelism, under its own names.

    Attributes:
        cp_group: the ranks that share a sequence; a list of two nested groups for ``a2a+p2p``.
        cp_global_ranks: global ranks of that group.
        cp_stream: CUDA stream on which TE communicates; one for all modules.
        cp_comm_type: ``p2p``, ``all_gather``, ``a2a`` or ``a2a+p2p``.
        size: number of these ranks.
    """

    cp_group: Any
    cp_global_ranks: list[int]
    cp_stream: Any
    cp_comm_type: str
    size: int

    def options(self) -> dict[str, Any]:
        """Returns the arguments of ``DotProductAttention``."""
        names = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
        return {name: getattr(self, name) for name in names}


class TeCore:
    """Holds the TE modules of one attention module, one for each form of call that it makes.

    Args:
        tp_size, tp_group: of the ranks that share the heads.
        context: TE's arguments for context parallelism; None without it.
    """

    def __init__(self, tp_size: int, tp_group: Any, context: TeCpArgs | None = None) -> None:
        self.tp_size, self.tp_group, self.context = tp_size, tp_group, context
        self._made: dict[tuple[Any, ...], Any] = {}

    def why_not_in_context(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        windowed: bool,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> str:
        """Returns why torch computes a call under context parallelism; empty if TE does.

        See ``attn_forward_func_with_cp`` and ``get_attention_backend`` in TE 2.20.

        Args:
            query, key: [b, heads, s / cp, d].
        """
        if self.context is None:
            return "context parallelism, of which Transformer Engine was not told"
        kind, size = self.context.cp_comm_type, self.context.size
        if query.dtype not in (torch.float16, torch.bfloat16):
            return "context parallelism in 32 bits, for which Transformer Engine has no kernel"
        if windowed and kind not in ("a2a", "all_gather"):
            return (
                f"a sliding window under --cp-comm-type {kind}; Transformer Engine has it with a2a and all_gather"
            )
        if sinks is not None and kind != "a2a":
            return f"sinks under --cp-comm-type {kind}; Transformer Engine has them with a2a"
        if softcap is not None and not _flash_attn_2_caps_logits():
            return (
                "soft-capped logits under context parallelism, for which Transformer Engine needs flash-attn 2.6"
            )
        if kind == "a2a" and (query.shape[1] % size or key.shape[1] % size):
            return f"--cp-comm-type a2a with {query.shape[1]} and {key.shape[1]} heads on {size} ranks"
        return ""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        window: tuple[int, int],
        dropout: float,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        packed: tuple[torch.Tensor, int] | None = None,
    ) -> torch.Tensor:
        """Computes attention of [b, heads, s, d] tensors (HF's order); returns [b, heads, s, d].

        Args:
            sinks: [heads], logits of an extra place that queries attend to and that adds nothing to the result.
            packed: [n + 1] int32, cumulative lengths of the sequences of all rows, and the longest length; causal.
        """
        widths = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        form = (*widths, causal, window, dropout, scaling, softcap, sinks is not None, packed is not None)
        if form not in self._made:
            self._made[form] = self._make(*form)
        core = self._made[form]
        if sinks is not None:  # TE's own parameter gives way to the definition's
            core.softmax_offset = sinks
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        if packed is not None or self.context is not None or not is_one_of_three(q, k, v):
            q, k, v = contiguous_unshared(q, k, v)
        if packed is None:
            output = core(q, k, v)  # [b, s, heads * d]
        else:
            bounds, longest = packed
            lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
            lengths |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
            output = core(*(t.flatten(0, 1) for t in (q, k, v)), **lengths)  # [b * s, heads * d]
        return output.view(*q.shape[:3], v.shape[-1]).transpose(1, 2)

    def _make(
        self,
        heads: int,
        groups: int,
        key_width: int,
        value_width: int,
        causal: bool,
        window: tuple[int, int],
        dropout: float,
        scaling: float | None,
        softcap: float | None,
        sinks: bool,
        packed: bool,
    ) -> Any:
        cls = te_attention()
        assert cls is not None
        options: dict[str, Any] = {}
        if softcap is not None:
            options["softcap"] = softcap
        if sinks:
            options["softmax_type"] = "learnable"
        if self.context is not None:
            options |= self.context.options()
        core = cls(
            num_attention_heads=heads * self.tp_size,
            kv_channels=key_width if key_width == value_width else (key_width, value_width),
            num_gqa_groups=groups * self.tp_size,
            attention_dropout=dropout,
            qkv_format="thd" if packed else "bshd",
            attn_mask_type="padding_causal" if packed else "causal" if causal else "no_mask",
            window_size=window if causal else (-1, -1),
            tp_size=self.tp_size,
            tp_group=self.tp_group,
            softmax_scale=scaling,
            **options,
        )
        if sinks:
            del core.softmax_offset
        return core
