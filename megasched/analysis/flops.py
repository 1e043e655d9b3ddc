"""FLOPs of a definition, counted as it runs on meta: what its own code computes, whatever the architecture.

Counted are matrix products and convolutions, by the formulas of ``torch.utils.flop_counter``, 2 for each
multiplication with its addition. Attention through HF's registry counts the keys that each query attends to, and
no others: those before it, or those in the layer's window. Of experts in HF's form each token counts those that it
is routed to. Attention in code of its own counts what that computes, masked or not; experts that a definition
calls one by one count one token each, as which ones are called is a matter of values.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megasched.analysis.attention_flops import attended, attention_flops
from megasched.analysis.meta_call import ScalarAnswers, call_hooks, run_on_meta, tensors_in
from megasched.definition import attention_interface
from megasched.definition.experts import has_form

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn


@dataclass
class ForwardFlops:
    """FLOPs of one forward.

    Attributes:
        layers: of each layer, and of what runs between it and the one before.
        before: of what runs before the first layer.
        after: of what runs after the last one.
    """

    layers: list[float]
    before: float = 0.0
    after: float = 0.0

    @property
    def total(self) -> float:
        return self.before + sum(self.layers) + self.after


def forward_flops(
    probe: nn.Module, inputs: Mapping[str, torch.Tensor], layers: Sequence[str] = ()
) -> ForwardFlops:
    """Counts one forward.

    Args:
        probe: a ``meta_copy`` of a definition.
        inputs: arguments of its forward, on meta.
        layers: paths of the layers.
    """
    run = _FlopRun(layers)
    with attention_interface.use_attention(run.attend), call_hooks(probe, run.before, run.after, run.looks_at):
        run_on_meta(probe, inputs, run)
    run.flops.after = run.outside
    return run.flops


class _FlopRun(ScalarAnswers):
    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self.flops = ForwardFlops(layers=[0.0] * len(layers))
        self.numbers = {path: number for number, path in enumerate(layers)}
        self.silent = 0
        self.running: int | None = None  # the layer
        self.outside = 0.0  # since the last layer, or the begin
        self.begun = False  # any layer

    def carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.utils.flop_counter import flop_registry

        output = super().carry_out(func, args, kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None and not self.silent:
            self._count(formula(*args, **kwargs, out_val=output))
        return output

    def _count(self, flops: float) -> None:
        if self.running is None:
            self.outside += flops
        else:
            self.flops.layers[self.running] += flops

    def looks_at(self, path: str, module: nn.Module) -> bool:
        """Whether a module's calls matter; of large models nearly none do."""
        return path in self.numbers or has_form(module)

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if path in self.numbers:
            self._begin(self.numbers[path])
        if has_form(module):
            if not self.silent:
                self._count(_of_experts(module, tensors_in((args, kwargs))[1]))
            self.silent += 1

    def after(self, path: str, module: nn.Module, output: Any) -> None:
        self.silent -= has_form(module)
        if path in self.numbers:
            self.running = None

    def _begin(self, layer: int) -> None:
        """What ran since the layer before counts for this one: it is computed where this one is."""
        if self.begun:
            self.flops.layers[layer] += self.outside
        else:
            self.flops.before = self.outside
        self.running, self.outside, self.begun = layer, 0.0, True

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
        self._count(attention_flops(batch * heads * pairs, width, value.shape[-1]))
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
