"""Checks whether a definition given the positions 0, 1, 2, ... computes what it computes when given none.

RoBERTa does not: by itself it counts from the padding token's number on, and it uses given positions unchanged. A
run of each kind tells. Floating-point tensors are on meta, but a tensor made of token ids and positions alone has
its values, up to where it meets a tensor on meta. These values must be equal in both runs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.meta_call import ScalarAnswers, call_hooks, meta_copy, run_on_meta, tensors_in
from megasched.definition import attention_interface

_LENGTH = 6
_CPU = torch.device("cpu")


def takes_counted_positions(model: nn.Module) -> bool:
    """Returns whether ``position_ids`` that count from 0 change nothing."""
    return _met(model, {}) == _met(model, {"position_ids": torch.arange(_LENGTH)[None]})


class ValuesRun(ScalarAnswers):
    """Runs a definition so that tensors that are not on meta keep their values, which a tape has none of.

    Attributes:
        met: operation, and values that were handed to it together with tensors on meta.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met: list[tuple[str, list[float]]] = []

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        tensors = tensors_in((args, kwargs))
        real = [tensor for tensor in tensors if not tensor.is_meta]
        if len(real) == len(tensors):
            with suppress(NotImplementedError):  # an operation that this machine has for other dtypes only
                return self._compute(func, args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        if real:
            self.met += [(func.__name__, tensor.flatten().tolist()) for tensor in real]
            args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        return super().execute(func, args, kwargs)

    @staticmethod
    def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _CPU}
        output = func(*args, **kwargs)
        if func.__name__.startswith(("empty", "new_empty")):
            output.zero_()  # what is in it by chance is no value
        return output


def with_values(model: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    """Returns a copy on meta for a ``ValuesRun``, with real integer buffers, and token ids [1, s] for it."""
    probe = meta_copy(model)
    for (_, module), (_, copied) in zip(model.named_modules(), probe.named_modules(), strict=True):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_floating_point() and not buffer.is_meta:
                copied._buffers[name] = buffer.clone()  # positions, e.g.
    return probe, _tokens(model)


def _met(model: nn.Module, positions: dict[str, torch.Tensor]) -> list[tuple[str, list[float]]]:
    probe, tokens = with_values(model)
    run = ValuesRun()
    inputs = {"input_ids": tokens, "use_cache": False, **positions}
    with attention_interface.use_attention(_attend), call_hooks(probe):
        run_on_meta(probe, inputs, run)
    return run.met


def _tokens(model: nn.Module) -> torch.Tensor:
    """Returns token ids [1, s] without padding, which a definition may leave out of its count."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return torch.tensor([[token for token in range(_LENGTH + 1) if token != padding][:_LENGTH]])


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
