"""Tries on meta whether later layers do the same where earlier ones are on another stage.

Tensors that go from layer to layer are followed (``analysis/stages/stage_flow.py``) and carried. What layers tell
each other through Python objects is not: a counter in a shared dictionary, a list that each appends to. A stage
runs without what earlier layers put there, so its operations, their sizes or their numbers may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megasched.analysis.find_layer_stack import flow_of
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    call_hooks,
    evaluating,
    meta_copy,
    run_on_meta,
    tensors_in,
)
from megasched.analysis.recording.numbers import numbers_in
from megasched.analysis.recording.tape import Call, Operation, Tape, TapeReader
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.output_refs import StageInput
from megasched.analysis.stages.shapes import SIZES
from megasched.analysis.stages.trial_inputs import loss_given
from megasched.analysis.trials.ways import Ways
from megasched.collector import collector_paused
from megasched.errors import ScheduleError
from megasched.trainer.stages.stage import Stage, hollow_out_stage, set_entry
from megasched.trainer.stages.stage_transfer import StageBuffers

# Whether a new constant is detached depends on the modes that are on; a reshape copies where it can't give a view.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)

# A model -> what was found of it, for sessions of all layouts.
_WHY_NOT_ALONE: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def why_not_stages(
    model: nn.Module, structure: LayerStack, tape: Callable[[], Tape], ways: Callable[[], Ways]
) -> str:
    """Returns why layers of one model can't be on several pipeline stages; empty where they can.

    Args:
        tape: returns the tape of a trial.
        ways: finds the ways that its code can go; called only where nothing else speaks against stages.
    """
    if model not in _WHY_NOT_ALONE:
        _WHY_NOT_ALONE[model] = why_not_alone(model, structure, tape)
    return _WHY_NOT_ALONE[model] or why_not_other_ways(model, structure, ways())


@collector_paused()
def why_not_alone(model: nn.Module, structure: LayerStack, tape: Callable[[], Tape]) -> str:
    """Returns how later layers depend on having the first half on their stage; empty where they do not.

    Args:
        tape: returns the tape of a trial, on which all layers ran.

    Raises:
        ScheduleError: the model does not run on meta.
    """
    start = structure.count // 2
    if structure.uncuttable or start <= structure.first or start > structure.last:
        return ""
    whole = _WholeRun(structure, start)
    tape().read(whole)
    if whole.hidden is None:  # that layer is not called
        return ""
    stage = _StageRun(meta_copy(model), structure, start)
    try:
        stage.run(whole.hidden, whole.stage_inputs)
    except ScheduleError as error:
        problem = error.problems[0]
        return f"{problem.module or 'the model'} needs what layers of earlier stages leave to it ({problem.what})"
    for (path, *operation), (_, *other) in zip(whole.noted.done, stage.noted.done, strict=False):
        if operation != other:
            return f"{path} goes by what layers of earlier stages left to it, and not by its arguments alone"
    if len(whole.noted.done) != len(stage.noted.done):
        return "what runs after the layers of earlier stages goes by what they left to it"
    return ""


def why_not_other_ways(model: nn.Module, structure: LayerStack, ways: Ways) -> str:
    """Returns why another way through the code (``analysis/trials/ways.py``) rules stages out; or empty.

    Either other tensors go from layer to layer then, or the way depends on a value that most stages do not have.

    Raises:
        ScheduleError: the model does not run on meta.
    """
    if structure.uncuttable:
        return ""
    for site in sorted(structure.asked & ways.deciding):
        return f"the code around them goes by the value that {site} asks for, which most stages do not have"
    for site in ways.too_many:
        return f"the value that {site} asks for decides on more ways than are looked at"
    flow = flow_of(model, structure) if ways.others else None
    for way in ways.others:
        with evaluating(way.evaluates):
            other = flow_of(model, structure, dict(way.answers), way.length)
        if other != flow:
            return f"what goes from layer to layer goes by {way}"
    return ""


class _Done:
    """Notes the operations from a layer on.

    Attributes:
        done: (module, operation, its numbers, shapes of its outputs).
        begun: whether the layer has been called.
    """

    def __init__(self, structure: LayerStack, start: int) -> None:
        self.structure, self.start = structure, start
        self.done: list[tuple[str, str, tuple[Any, ...], tuple[tuple[int, ...], ...]]] = []
        self.begun = False
        self._running = [""]
        places = (place.path for side in structure.stage_inputs for place in side.places)
        self.watched = {*structure.layer_paths(), *places}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> None:
        """Notes an operation."""
        if self.begun and func not in _SAME:
            shapes = tuple(tuple(tensor.shape) for tensor in outputs)
            self.done.append((self._running[-1], str(func), tuple(numbers_in(args, kwargs)), shapes))

    def enters(self, path: str) -> None:
        """Notes that the forward of a module begins."""
        if path in self.watched:
            self._running.append(path)
            self.begun = self.begun or path == self.structure.layer_path(self.start)

    def leaves(self, path: str) -> None:
        """Notes that the forward of a module ends."""
        if path in self.watched:
            self._running.pop()


class _WholeRun(TapeReader):
    """Reads what a forward does from a layer on, and what crosses the boundary before it.

    Attributes:
        noted: its operations.
        hidden: hidden state that the layer is handed; None if it is not called.
        stage_inputs: other tensors that cross the boundary.
    """

    def __init__(self, structure: LayerStack, start: int) -> None:
        self.structure, self.start = structure, start
        self.noted = _Done(structure, start)
        self.hidden: torch.Tensor | None = None
        self.stage_inputs: dict[StageInput, torch.Tensor] = {}

    def operation(self, operation: Operation) -> None:
        self.noted.note(operation.func, operation.args, operation.kwargs, operation.outputs)

    def enter(self, call: Call) -> None:
        self.noted.enters(call.path)
        if self.noted.begun and self.hidden is None:
            self.hidden = self.structure.slot.get(call.args, call.kwargs)

    def leave(self, call: Call) -> None:
        self.noted.leaves(call.path)
        for side in self.structure.stage_inputs_at(self.start) if self.hidden is None else ():
            if side.places[0].path == call.path:
                self.stage_inputs[side] = side.places[0].tensor(*call.left, call.output)


class _StageRun(ScalarAnswers):
    """Runs the forward of the stage that begins with a layer.

    No tape tells: the layers before are not there.

    Attributes:
        noted: its operations.
    """

    def __init__(self, model: nn.Module, structure: LayerStack, start: int) -> None:
        super().__init__()
        self.model, self.structure, self.start = model, structure, start
        self.noted = _Done(structure, start)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().execute(func, args, kwargs)
        self.noted.note(func, args, kwargs, tensors_in(output))
        return output

    def run(self, hidden: torch.Tensor, stage_inputs: Mapping[StageInput, torch.Tensor]) -> None:
        """Runs it with gradients, as a tape is recorded, on the tensors that cross the boundary."""
        stage = Stage(self.start, self.structure.count, first=False, last=True)
        crossing = {side: tensor.detach() for side, tensor in stage_inputs.items()}
        device = torch.device("meta")
        wire = StageBuffers(hidden.detach().clone(), crossing, *SIZES[0], device, open=True)
        with device:  # also for zeros in the place of what lives elsewhere
            hollow_out_stage(self.model, self.structure, stage, wire, torch.float32)
        set_entry(self.model, self.structure, stage, wire)
        inputs = self.structure.inputs_for(self.model, *SIZES[0])
        if self.structure.token_ids is not None:
            inputs["input_ids"] = wire.values.setdefault(self.structure.token_ids, inputs["input_ids"])
        hooks = call_hooks(
            self.model,
            lambda path, *call: self.noted.enters(path),
            lambda path, *result: self.noted.leaves(path),
            lambda path, module: path in self.noted.watched,
        )
        with hooks, loss_given(self.model, calls_loss=self.structure.calls_loss):
            run_on_meta(self.model, inputs, self, autograd=True)
