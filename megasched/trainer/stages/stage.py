"""Makes an unmodified definition run as one pipeline stage: modules of other stages are hollow in their place.

The definition's own forward runs on every stage. Layers of other stages stay where they are, without
parameters, and hand the hidden state through; the one before the stage returns what came over the wire, and
the stage's last layer ends the forward with what goes out. What runs before the layers (positions, masks,
norms) runs on every stage, on a dummy where its trainable parts live elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.output_refs import OutputRef, StageInput
from megasched.analysis.stages.shapes import Shape
from megasched.layers.wrap import Forward, wrap_forward
from megasched.trainer.stages.stage_transfer import StageBuffers


class StageEnd(BaseException):
    """Ends a definition's forward where the stage ends; no ``Exception``, so that no error handler stops it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class Stage:
    """Describes what one (pipeline rank, model chunk) runs.

    Attributes:
        start, stop: half-open range of its layers; empty stages are legal.
        first: whether it holds what comes before the layers (embeddings) and gets the token ids.
        last: whether it holds what comes after the layers (norm, head) and gets the labels.
    """

    start: int
    stop: int
    first: bool
    last: bool

    @property
    def empty(self) -> bool:
        """Returns whether the stage only hands on what it receives."""
        return self.start == self.stop and not self.first and not self.last

    def holds(self, structure: LayerStack, path: str) -> bool:
        """Returns whether the module at ``path`` lives on this stage."""
        index = structure.index_of(path)
        if index is not None:
            return self.start <= index < self.stop
        if path in structure.between:
            layers, _ = structure.between[path]
            if any(self.start <= layer < self.stop for layer in layers):
                return True
        if path in structure.after:
            return self.last or (path in structure.before and self.first)
        return self.first and (path in structure.before or path not in structure.between)


def hollow_out(module: nn.Module) -> None:
    """Takes the parameters out of a module and all below it; their dtypes and shapes stay readable."""
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                del child._parameters[name]
                child.__dict__[name] = parameter.detach().to("meta")


def hollow_out_stage(
    model: nn.Module, structure: LayerStack, stage: Stage, wire: StageBuffers, dtype: torch.dtype
) -> None:
    """Makes the definition run as one stage, in place: hollow modules and boundaries.

    Args:
        model: the definition, its local modules lowered or still to be lowered.
        structure: layer stack of the definition.
        stage: the stage that lives here.
        wire: set before each forward.
        dtype: dtype of the parameters; ``wire`` keeps it for the dummies that stand in for an embedding elsewhere.
    """
    wire.dtype = dtype
    received = _by_module(structure, structure.stage_inputs)
    for index in range(structure.count):
        path = structure.layer_path(index)
        if not stage.holds(structure, path):
            layer = model.get_submodule(path)
            hollow_out(layer)
            replay, places = _replay(model, structure, path, wire), received[path]
            wrap_forward(layer, partial(_pass_through, structure.slot, places, wire, replay))
    returned = {**{path: shapes for path, (_, shapes) in structure.between.items()}, **structure.before}
    for path, shapes in returned.items():
        if not stage.holds(structure, path):
            module = model.get_submodule(path)
            hollow_out(module)
            wrap_forward(module, partial(_dummy, received[path], shapes, wire))
    for path, module in model.named_modules():
        if stage.holds(structure, path) or next(module.parameters(recurse=False), None) is None:
            continue
        if structure.holds_layers(path):
            _zero_own(module, dtype)
        else:
            hollow_out(module)
    for path in structure.bare:
        if not stage.holds(structure, path):
            _zero_own(model.get_submodule(path), dtype)


def _zero_own(module: nn.Module, dtype: torch.dtype) -> None:
    """Puts zeros in place of a module's own parameters, for other code that computes with them."""
    gone = {
        name: held for name, held in module.__dict__.items() if isinstance(held, torch.Tensor) and held.is_meta
    }
    held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, tensor in {**gone, **held}.items():
        module._parameters.pop(name, None)
        module.__dict__.pop(name, None)
        module.register_buffer(name, torch.zeros(tensor.shape, dtype=dtype), persistent=False)


def set_entry(model: nn.Module, structure: LayerStack, stage: Stage, wire: StageBuffers) -> None:
    """Makes the received hidden state enter as the output of the layer before, or as the first one's input."""
    if stage.first:
        return
    before = structure.last_before(stage.start)
    enter = _enter_as_input if before is None else _enter_as_output  # embeddings may be on a stage of their own
    layer = model.get_submodule(structure.layer_path(structure.first if before is None else before))
    wrap_forward(layer, partial(enter, structure.slot, wire))


def capture_stage_inputs(model: nn.Module, structure: LayerStack, stage: Stage, wire: StageBuffers) -> None:
    """Stores the sides that later stages read where this stage's modules make them."""
    if stage.last:
        return
    for path, places in _by_module(structure, structure.stage_inputs_at(stage.stop)).items():
        if path and stage.holds(structure, path):
            wrap_forward(model.get_submodule(path), partial(_take, places, wire))


def set_exit(model: nn.Module, structure: LayerStack, stage: Stage) -> None:
    """Makes the forward end after the stage's last layer, in the outermost wrap of that layer."""
    if stage.last:
        return
    # Without layers the first one is hollow and hands its input through: that is what goes out.
    index = structure.last_before(stage.stop)
    layer = model.get_submodule(structure.layer_path(structure.first if index is None else index))
    wrap_forward(layer, partial(_leave_after, structure.slot))


_Places = list[tuple[StageInput, OutputRef]]


def _by_module(structure: LayerStack, stage_inputs: tuple[StageInput, ...]) -> dict[str, _Places]:
    found: dict[str, _Places] = defaultdict(list)
    for side in stage_inputs:
        for place in side.places:
            found[place.path].append((side, place))
    return found


def _take(places: _Places, wire: StageBuffers, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    for side, place in places if wire.open else ():
        wire.values[side] = place.tensor(args, kwargs, output)
    return output


def _fill(places: _Places, wire: StageBuffers, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Returns a hollow module's output, with the sides that came over the wire in their places."""
    for side, place in places:
        if side in wire.values:
            output = place.put(wire.values[side], args, kwargs, output)
    return output


def _replay(model: nn.Module, structure: LayerStack, path: str, wire: StageBuffers) -> Callable[[], None]:
    """Returns a function that makes HF's hooks record what came over the wire for a hollow layer.

    The hooks are on modules inside the layer. These are made to return what was received, and are called.
    """
    recorded = []
    for inner, places in _by_module(structure, structure.stage_inputs).items():
        if inner.startswith(path + "."):
            recorded.append((model.get_submodule(inner), places))
            wrap_forward(recorded[-1][0], partial(_return_received, places, wire))

    def replay() -> None:
        for module, places in recorded:
            if any(side in wire.values for side, _ in places):
                module()

    return replay


def _return_received(places: _Places, wire: StageBuffers, forward: Forward) -> Any:
    return _fill(places, wire, (), {}, ())


def _pass_through(
    slot: HiddenStateArg,
    places: _Places,
    wire: StageBuffers,
    replay: Callable[[], None],
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    replay()
    return _fill(places, wire, args, kwargs, slot.wrap(slot.get(args, kwargs)))


def _enter_as_output(
    slot: HiddenStateArg, wire: StageBuffers, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    return slot.rewrap(forward(*args, **kwargs), _received(wire))


def _enter_as_input(
    slot: HiddenStateArg, wire: StageBuffers, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    args, kwargs = slot.put(_received(wire), args, kwargs)
    return forward(*args, **kwargs)


def _leave_after(slot: HiddenStateArg, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    raise StageEnd(slot.result(forward(*args, **kwargs)))


def _dummy(
    places: _Places, shapes: Any, wire: StageBuffers, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    """Returns zeros of the shapes that the real module would return; some definitions write into them."""

    def zeros(shape: Any) -> Any:
        if not isinstance(shape, Shape):
            return shape
        sizes = shape.sizes(wire.batch, wire.length)
        return torch.zeros(sizes, dtype=shape.run_dtype(wire.dtype), device=wire.device)

    return _fill(places, wire, args, kwargs, torch.utils._pytree.tree_map(zeros, shapes))


def _received(wire: StageBuffers) -> torch.Tensor:
    assert wire.received is not None, "a stage that is not the first ran before it received anything"
    return wire.received
