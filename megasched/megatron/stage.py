"""One stage of an unmodified definition: what lives elsewhere is hollow in its place.

The definition's own forward runs on every stage. Layers of other stages stay where they are, without
parameters, and hand the hidden state through; the one before the stage returns what came over the wire, and
the stage's last layer ends the forward with what goes out. What runs before the layers (positions, masks,
norms) runs on every stage, on a dummy where its trainable parts live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megasched.lowering.structure import Shape, Slot, Structure
from megasched.lowering.wrap import Forward, wrap_forward


class StageEnd(BaseException):
    """Ends a definition's forward where the stage ends. No error, so nothing that catches errors may catch it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class Stage:
    """What one (pipeline rank, model chunk) runs.

    Attributes:
        start, stop: its layers, half open; empty stages are legal.
        first: it holds what comes before the layers (embeddings) and gets the token ids.
        last: it holds what comes after the layers (norm, head) and gets the labels.
    """

    start: int
    stop: int
    first: bool
    last: bool

    @property
    def empty(self) -> bool:
        """Whether it only hands on what it receives."""
        return self.start == self.stop and not self.first and not self.last

    def holds(self, structure: Structure, path: str) -> bool:
        """Whether the module at ``path`` lives on this stage."""
        index = structure.index_of(path)
        if index is not None:
            return self.start <= index < self.stop
        return self.last if path in structure.after else self.first


@dataclass
class Wire:
    """What the stage boundaries share during one forward: the tensor received, and the sizes of the batch."""

    received: torch.Tensor | None = None
    batch: int = 0
    length: int = 0
    device: torch.device | None = None


def hollow_out(module: nn.Module) -> None:
    """Takes the parameters out of a module and all below it; their metadata stay readable (dtype, shape)."""
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                del child._parameters[name]
                child.__dict__[name] = parameter.detach().to("meta")


def make_stage(model: nn.Module, structure: Structure, stage: Stage, wire: Wire, dtype: torch.dtype) -> None:
    """Makes the definition run as one stage, in place: hollow modules and boundaries.

    Args:
        model: the definition, its local modules lowered or still to be lowered.
        structure: where its layers are.
        stage: what lives here.
        wire: set before each forward.
        dtype: of the dummies that stand for what an embedding elsewhere would give.
    """
    slot = structure.slot
    for index in range(structure.count):
        layer = model.get_submodule(structure.layer_path(index))
        if not stage.start <= index < stage.stop:
            hollow_out(layer)
            wrap_forward(layer, _pass_through(slot))
    for path, shape in structure.before.items():
        if not stage.first:
            module = model.get_submodule(path)
            hollow_out(module)
            wrap_forward(module, _dummy(shape, wire, dtype))
    for path in structure.after:
        if not stage.last:
            hollow_out(model.get_submodule(path))
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None and not stage.holds(structure, path):
            hollow_out(module)


def set_entry(model: nn.Module, structure: Structure, stage: Stage, wire: Wire) -> None:
    """Where the received hidden state enters: as what the layer before the stage returns."""
    if stage.first:
        return
    if stage.start == 0 and stage.stop > 0:  # no layer before it: the embeddings are on a stage of their own
        wrap_forward(model.get_submodule(structure.layer_path(0)), _enter_as_input(structure.slot, wire))
        return
    before = stage.start - 1 if stage.start < stage.stop else structure.count - 1
    wrap_forward(model.get_submodule(structure.layer_path(before)), _enter_as_output(structure.slot, wire))


def set_exit(model: nn.Module, structure: Structure, stage: Stage) -> None:
    """Where the forward ends; the outermost of all wraps of that layer."""
    if stage.last:
        return
    # Without layers the first one is hollow and hands its input through: that is what goes out.
    layer = model.get_submodule(structure.layer_path(max(stage.stop - 1, 0)))
    wrap_forward(layer, _leave_after(structure.slot))


def _pass_through(slot: Slot) -> Callable[[Forward], Forward]:
    return lambda forward: lambda *args, **kwargs: slot.wrap(slot.get(args, kwargs))


def _enter_as_output(slot: Slot, wire: Wire) -> Callable[[Forward], Forward]:
    return lambda forward: lambda *args, **kwargs: slot.wrap(_received(wire))


def _enter_as_input(slot: Slot, wire: Wire) -> Callable[[Forward], Forward]:
    def wrapper(forward: Forward) -> Forward:
        def entered(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = slot.put(_received(wire), args, kwargs)
            return forward(*args, **kwargs)

        return entered

    return wrapper


def _leave_after(slot: Slot) -> Callable[[Forward], Forward]:
    def wrapper(forward: Forward) -> Forward:
        def left(*args: Any, **kwargs: Any) -> Any:
            raise StageEnd(slot.result(forward(*args, **kwargs)))

        return left

    return wrapper


def _dummy(shape: Shape, wire: Wire, dtype: torch.dtype) -> Callable[[Forward], Forward]:
    """Zeros of the shape that the real module would return; some definitions write into them."""

    def wrapper(forward: Forward) -> Forward:
        def dummy(*args: Any, **kwargs: Any) -> torch.Tensor:
            kind = dtype if shape.dtype.is_floating_point else shape.dtype
            return torch.zeros(shape.sizes(wire.batch, wire.length), dtype=kind, device=wire.device)

        return dummy

    return wrapper


def _received(wire: Wire) -> torch.Tensor:
    assert wire.received is not None, "a stage that is not the first ran before it received anything"
    return wire.received
