"""Prints statistics of what a module returns and of its gradient, and leaves both as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megasched.language.records import Record
from megasched.layers.build_context import BuildContext


def probe_module(module: nn.Module, record: Record, context: BuildContext) -> None:
    """Has the module print what a ``probe`` record asks for."""
    made, every = 0, record.arguments["every"]
    title = f"{record.arguments['label'] or 'probe'}: {record.path or 'the model'}, {_rank(context)}"

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal made
        made += 1
        if (made - 1) % every:
            return
        for place, value in pytree.tree_flatten_with_path(output)[0]:
            if isinstance(value, torch.Tensor):
                name = f"output{pytree.keystr(place)}"
                say = partial(_print, f"{title}, call {made}")
                say(f"forward, {name}", value)
                if value.requires_grad:
                    value.register_hook(_looking_at(partial(say, f"backward, gradient of {name}")))

    module.register_forward_hook(look)


def _rank(context: BuildContext) -> str:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if there else 0
    return f"rank {rank} (TP {context.rank} of {context.size})" if context.size > 1 else f"rank {rank}"


def _looking_at(say: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Returns a hook that returns nothing, so that the gradient stays what it is."""

    def hook(gradient: torch.Tensor) -> None:
        say(gradient)

    return hook


def _print(title: str, what: str, value: torch.Tensor) -> None:
    print(f"{title}, {what} {statistics(value)}", flush=True)


@torch.no_grad()
def statistics(value: torch.Tensor) -> str:
    """Returns shape, dtype, and mean, standard deviation, least and largest of the finite values as text."""
    form = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    numbers = value.detach().to(torch.float32 if value.dtype.itemsize < 8 else torch.float64)
    finite = numbers[numbers.isfinite()]
    if not finite.numel():
        return f"{form}: {value.numel()} values, none finite"
    spread = finite.std(correction=0)
    shown = {"mean": finite.mean(), "std": spread, "min": finite.min(), "max": finite.max()}
    strange = value.numel() - finite.numel()
    text = ", ".join(f"{name} {float(number):.4g}" for name, number in shown.items())
    return f"{form}: {text}" + (f", {strange} of {value.numel()} not finite" if strange else "")
