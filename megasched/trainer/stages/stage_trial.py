"""Tries on meta whether later layers do the same where earlier ones are on another stage.

Tensors that go from layer to layer are followed (``analysis/stages/stage_flow.py``) and carried. What layers tell
each other through Python objects is not: a counter in a shared dictionary, a list that each appends to. A stage
runs without what earlier layers put there, so its operations, their sizes or their numbers may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megasched.analysis.find_layer_stack import flow_of
from megasched.analysis.recording.meta_call import ScalarAnswers, call_hooks, meta_copy, run_on_meta, tensors_in
from megasched.analysis.recording.numbers import numbers_in
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.output_refs import StageInput
from megasched.analysis.stages.trial_inputs import loss_given
from megasched.analysis.trials.ways import Ways
from megasched.collector import collector_paused
from megasched.errors import ScheduleError
from megasched.trainer.stages.stage import Stage, hollow_out_stage, set_entry
from megasched.trainer.stages.stage_transfer import StageBuffers

_BATCH, _LENGTH = 2, 5
# Whether a new constant is detached depends on the modes that are on; a reshape copies where it can't give a view.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)

# A model -> what was found of it, for sessions of all layouts.
_WHY_NOT_ALONE: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_Operation = tuple[str, tuple[Any, ...], tuple[tuple[int, ...], ...]]


def why_not_stages(model: nn.Module, structure: LayerStack, ways: Callable[[], Ways]) -> str:
    """Returns why layers of one model can't be on several pipeline stages; empty where they can.

    Args:
        ways: finds the ways that its code can go; called only where nothing else speaks against stages.
    """
    if model not in _WHY_NOT_ALONE:
        _WHY_NOT_ALONE[model] = why_not_alone(model, structure)
    return _WHY_NOT_ALONE[model] or why_not_other_ways(model, structure, ways())


@collector_paused()
def why_not_alone(model: nn.Module, structure: LayerStack) -> str:
    """Returns how later layers depend on having the first half on their stage; empty where they do not.

    Raises:
        ScheduleError: the model does not run on meta.
    """
    start = structure.count // 2
    if structure.uncuttable or start <= structure.first or start > structure.last:
        return ""
    probe = meta_copy(model)
    whole = _StageRun(probe, structure, start)
    whole.run()
    if whole.hidden is None:  # that layer is not called
        return ""
    stage = _StageRun(probe, structure, start)
    try:
        stage.run_as_stage(whole.hidden, whole.stage_inputs)
    except ScheduleError as error:
        problem = error.problems[0]
        return f"{problem.module or 'the model'} needs what layers of earlier stages leave to it ({problem.what})"
    for (path, *operation), (_, *other) in zip(whole.done, stage.done, strict=False):
        if operation != other:
            return f"{path} goes by what layers of earlier stages left to it, and not by its arguments alone"
    if len(whole.done) != len(stage.done):
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
        if flow_of(model, structure, dict(way.answers), way.length) != flow:
            return f"what goes from layer to layer goes by {way}"
    return ""


class _StageRun(ScalarAnswers):
    """Runs a forward and notes the operations from a layer on.

    No tape tells: it runs once more without the layers before, as a stage does.

    Attributes:
        done: (module, operation, its numbers, shapes of its outputs).
        hidden: hidden state that the layer is handed; None until it runs.
        stage_inputs: other tensors that cross the boundary before it.
    """

    def __init__(self, model: nn.Module, structure: LayerStack, start: int) -> None:
        super().__init__()
        self.model, self.structure, self.start = model, structure, start
        self.done: list[tuple[str, str, tuple[Any, ...], Any]] = []
        self.hidden: torch.Tensor | None = None
        self.stage_inputs: dict[StageInput, torch.Tensor] = {}
        self.stack: list[tuple[str, Any, Any]] = []
        places = (place.path for side in structure.stage_inputs for place in side.places)
        self.watched = {*structure.layer_paths(), *places}

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().execute(func, args, kwargs)
        if self.hidden is not None and func not in _SAME:
            path = self.stack[-1][0] if self.stack else ""
            shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(output))
            self.done.append((path, str(func), tuple(numbers_in(args, kwargs)), shapes))
        return output

    def run(self, inputs: Mapping[str, Any] | None = None) -> None:
        """Runs one forward; of token ids by default."""
        hooks = call_hooks(self.model, self._before, self._after, lambda path, module: path in self.watched)
        with hooks, loss_given(self.model, calls_loss=self.structure.calls_loss):
            run_on_meta(self.model, inputs or self._inputs(), self)

    def run_as_stage(self, hidden: torch.Tensor, stage_inputs: Mapping[StageInput, torch.Tensor]) -> None:
        """Runs the forward of the stage that begins with the layer."""
        stage = Stage(self.start, self.structure.count, first=False, last=True)
        wire = StageBuffers(hidden.clone(), dict(stage_inputs), _BATCH, _LENGTH, torch.device("meta"), open=True)
        with torch.device("meta"):  # also for zeros in the place of what lives elsewhere
            hollow_out_stage(self.model, self.structure, stage, wire, torch.float32)
        set_entry(self.model, self.structure, stage, wire)
        inputs = self._inputs()
        if self.structure.token_ids is not None:
            inputs["input_ids"] = wire.values.setdefault(self.structure.token_ids, inputs["input_ids"])
        self.run(inputs)

    def _inputs(self) -> dict[str, torch.Tensor]:
        return self.structure.inputs_for(self.model, _BATCH, _LENGTH)

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append((path, args, kwargs))
        if path == self.structure.layer_path(self.start) and self.hidden is None:
            self.hidden = self.structure.slot.get(args, kwargs)

    def _after(self, path: str, module: nn.Module, output: Any) -> None:
        _, args, kwargs = self.stack.pop()
        for side in self.structure.stage_inputs_at(self.start) if self.hidden is None else ():
            place = side.places[0]
            if place.path == path:
                with suppress(LookupError, TypeError):  # a hollow module of a stage returns no such thing
                    self.stage_inputs[side] = place.tensor(args, kwargs, output)
