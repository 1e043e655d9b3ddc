"""FLOPs of a definition, counted as it runs on meta: what its own code computes, whatever the architecture.

Counted are matrix products and convolutions, by the formulas of ``torch.utils.flop_counter``, 2 for each
multiplication with its addition. Attention through HF's registry counts the keys that each query attends to, and
no others: those before it, or those in the layer's window. Of experts in HF's form each token counts those that it
is routed to. Attention in code of its own counts what that computes, masked or not; experts that a definition
calls one by one count one token each, as which ones are called is a matter of values.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megasched.experts import is_experts
from megasched.lowering import attention
from megasched.trial.meta_call import DefaultScalars, call_hooks, meta_copy, run_on_meta, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn


def forward_flops(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Path of each module -> FLOPs of its own code in one forward; their sum is the model's.

    Args:
        model: a definition.
        inputs: arguments of its forward, on meta.
    """
    run = _FlopRun(meta_copy(model))
    with attention.stand_in(run.attend), call_hooks(run.model, run.before, run.after):
        run_on_meta(run.model, inputs, run)
    return dict(run.counted)


def attended(queries: int, keys: int, causal: bool, window: int | None) -> float:
    """Pairs of a query and a key that it attends to; the last query stands at the last key.

    Args:
        window: keys that a query attends to, its own included; None for all.
    """
    if not causal:
        return float(queries * keys)
    most = keys if window is None else min(window, keys)
    first = keys - queries + 1  # keys up to the first query's own
    growing = max(0, min(queries, most - first))  # queries that see fewer keys than they may
    return growing * first + growing * (growing - 1) / 2 + (queries - growing) * float(most)


class _FlopRun(DefaultScalars):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.counted: dict[str, float] = defaultdict(float)
        self.stack: list[str] = []
        self.silent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torch.utils.flop_counter import flop_registry

        output = super().__torch_dispatch__(func, types, args, kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None and not self.silent:
            self._count(formula(*args, **(kwargs or {}), out_val=output))
        return output

    def _count(self, flops: float) -> None:
        self.counted[self.stack[-1] if self.stack else ""] += flops

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(path)
        if is_experts(module):
            if not self.silent:
                self._count(_of_experts(module, tensors_in((args, kwargs))[1]))
            self.silent += 1

    def after(self, path: str, module: nn.Module, output: Any) -> None:
        self.stack.pop()
        self.silent -= is_experts(module)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Takes q, k, v [b, heads, s, d]; returns [b, s, heads, d]."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        batch, heads, queries, width = query.shape
        pairs = attended(queries, key.shape[2], bool(causal), sliding_window)
        self._count(2.0 * batch * heads * pairs * (width + value.shape[-1]))
        with self._silently():
            return value.new_empty(batch, queries, heads, value.shape[-1]), None

    @contextmanager
    def _silently(self) -> Iterator[None]:
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1


def _of_experts(module: nn.Module, chosen: torch.Tensor) -> float:
    """Each token through the experts [t, k] that were chosen for it."""
    weights = sum(p.numel() // p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3)
    return 2.0 * chosen.numel() * weights
