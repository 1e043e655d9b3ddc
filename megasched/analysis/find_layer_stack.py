"""Finds a definition's layers, and the modules that run before, between and after them.

It compares two calls on meta with different batch and sequence sizes, and never goes by names. With the result, a
pipeline stage can be cut out of any definition whose layers form a list.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from megasched.analysis.loss.loss_form import find_loss_form
from megasched.analysis.notes.code_facts import CodeFacts, code_facts_of
from megasched.analysis.recording.meta_call import evaluating, meta_copy, tensors_in
from megasched.analysis.recording.recorder import record_tape
from megasched.analysis.recording.sites import Site
from megasched.analysis.recording.tape import Call, Tape
from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.analysis.stages.hooked_outputs import find_recorded
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.loss_labels import LossLabels
from megasched.analysis.stages.output_refs import OutputRef, StageInput
from megasched.analysis.stages.shapes import SIZES, FollowsNeither, shape_of
from megasched.analysis.stages.stage_flow import StageFlow
from megasched.analysis.stages.trial_inputs import inputs_of, trial_of
from megasched.collector import collector_paused
from megasched.definition.build import cast_as_loaded
from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.definition.undisturbed import undisturbed
from megasched.errors import Problem, ScheduleError


def record_definition(probe: nn.Module, structure: LayerStack) -> Tape:
    """Returns the tape of a definition's smallest trial batch, layers being known; see ``LayerStack.record``."""
    return structure.record(probe, structure.inputs_for(probe, *SIZES[0]))


type _First = tuple[list[Call], CodeFacts, bool]


def _first_calls(model: nn.Module) -> _First:
    """Returns calls of modules up to the loss, the code facts, and whether ``loss_function`` gets all logits.

    It has to get the labels as the forward did, too; where it does not, the forward runs without labels.
    """
    inputs = trial_of(model)
    with suppress(ScheduleError):  # a loss of its own may not take labels as long as these
        tape = record_tape(model, inputs, lines=True, until_loss=True)
        if (loss := tape.loss) is not None:
            labels = loss.args[0] if loss.args else loss.kwargs.get("labels")
            if loss.logits.shape[:-1] == SIZES[0] and labels is inputs["labels"]:
                return [*tape.calls()], code_facts_of(tape), True
    return _calls_with(model, None)


def _calls_with(model: nn.Module, labels: LossLabels | None) -> _First:
    """Returns the same of a forward whose own code computes the loss of these labels, if there are any.

    Its operations, of which there are many, are forgotten.
    """
    tape = record_tape(model, inputs_of(model, *SIZES[0], labels), own_loss=True, lines=True)
    return [*tape.calls()], code_facts_of(tape), False


def _stage_flow(tape: Tape, structure: LayerStack, layers: Sequence[str], outside: set[str]) -> StageFlow:
    """Returns the flow of tensors between the layers of a tape.

    Later stages lack ``input_ids`` only for a causal language model; every stage reads the batches of other
    models. The flow goes past ``loss_function``, as code that adds to its result may read tensors that layers
    left.
    """
    first_stage_only = "input_ids" if objective_of(tape.model) is CAUSAL_LM else None
    return StageFlow(tape, layers, outside, structure.slot, structure.recorded, first_stage_only)


def _flow_at(
    probe: nn.Module,
    structure: LayerStack,
    batch: int,
    length: int,
    answers: Mapping[Site, int] | None = None,
) -> StageFlow:
    """Returns the flow of tensors between the known layers for a batch of these sizes."""
    layers = [structure.layer_path(index) for index in structure.called or range(structure.count)]
    outside = {*structure.before, *structure.between, *structure.after}
    tape = structure.record(probe, structure.inputs_for(probe, batch, length), answers)
    return _stage_flow(tape, structure, layers, outside)


@collector_paused()
def find_layer_stack(model: nn.Module) -> LayerStack:
    """Finds the layer stack of an HF model that was built for an objective.

    Raises:
        ScheduleError: no list of layers is called one after the other, or the model can't run on meta.
    """
    probe = meta_copy(model)
    calls, code_facts, calls_loss = _first_calls(probe)
    layers, repeated = _find_layers(probe, calls)
    count = len(probe.get_submodule(layers))
    paths = {f"{layers}.{i}" for i in range(count)}
    of_layers = [call for call in calls if call.path in paths]
    called = tuple(int(call.path.rpartition(".")[2]) for call in of_layers)
    found = LayerStack(layers, count, _find_slot(of_layers), calls_loss=calls_loss, repeated=repeated)
    with undisturbed(model):
        found.loss = find_loss_form(model, found)
    if found.loss_labels is not None:  # its loss may call more modules
        calls, code_facts, found.calls_loss = _calls_with(probe, found.loss_labels)
        of_layers = [call for call in calls if call.path in paths]
    found.trial, found.code_facts = trial_of(probe), code_facts
    found.called = () if [*dict.fromkeys(called)] == [*range(count)] else called
    owners = {path for path, m in probe.named_modules() if next(m.parameters(recurse=False), None) is not None}
    outside = {path for path in owners if found.index_of(path) is None and not found.holds_layers(path)}
    inside = {path for path, _ in probe.named_modules() if found.index_of(path) is not None} - paths
    found.recorded = find_recorded(
        probe, ((call.path, call.output) for call in calls), inside.__contains__, found.holds_layers
    )
    tape = found.tape = record_definition(meta_copy(model), found)  # of a copy that has not run
    run = _stage_flow(tape, found, [call.path for call in of_layers], outside)
    found.uncuttable, found.by_chance, found.asked = run.refused, run.by_chance, frozenset(run.asked)
    if repeated:
        more = len(set(called)) < len(called)
        found.uncuttable = "they are called more than once" if more else "they are called out of their order"
        found.calls = {path: times for path, times in Counter(call.path for call in calls).items() if times > 1}
    elif not next(call.autograd for call in tape.calls() if call.path == of_layers[0].path):
        found.uncuttable = "the model computes their gradients by a function of its own"
    found.uncuttable = found.uncuttable or _handing_containers(found.slot, of_layers)
    found.bare, found.changed_buffers = tuple(run.bare), tuple(sorted(run.changed_buffers))
    found.changed_parameters = run.changed_parameters
    start, end = calls.index(of_layers[0]), of_layers[-1].end
    found.before = {call.path: None for call in calls[:start] if call.path in outside}
    found.after = tuple(dict.fromkeys(call.path for call in calls[end:] if call.path in outside))
    for path, places in run.bare.items():
        if places == {called[-1] + 1}:
            found.after += (path,) if path not in found.after else ()
        elif called[-1] + 1 in places or path in found.after:
            found.uncuttable = found.uncuttable or f"the parameters of {path} are read before the layers and after"
    between: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(calls[start:end], start):
        if call.path in outside:
            between[call.path].append(
                next(i for i, layer in zip(called, of_layers, strict=True) if layer.end > number)
            )
    found.between = {path: (tuple(indices), None) for path, indices in between.items()}
    found.stage_inputs = tuple(StageInput(of.made, of.read, tuple(of.places)) for of in run.stage_inputs())
    _learn_shapes(found, meta_copy(model), calls if between else calls[: start + 1])
    return found


def measure_stage_inputs(
    model: nn.Module, structure: LayerStack, batch: int, length: int, dtype: torch.dtype
) -> dict[OutputRef, torch.Tensor]:
    """Returns the tensors that cross between stages beside the hidden state, by their places.

    They are meta tensors with the shapes and dtypes of a run without parallelism.

    Args:
        model: the definition.
        batch, length: sizes of a micro-batch.
        dtype: dtype of the definition's parameters in that run.
    """
    probe = meta_copy(model)
    cast_as_loaded(probe, dtype)
    return {of.places[0]: of.tensor for of in _flow_at(probe, structure, batch, length).stage_inputs()}


def flow_of(
    model: nn.Module, structure: LayerStack, answers: Mapping[Site, int] | None = None, length: int | None = None
) -> tuple[Any, ...]:
    """Returns the tensor flow between layers, and other facts a pipeline needs, as a tuple that can be compared.

    Args:
        answers: answers to questions about values.
        length: length of the sequence; by default that of a trial.
    """
    batch, usual = SIZES[0]
    run = _flow_at(meta_copy(model), structure, batch, length or usual, answers)
    stage_inputs = [StageInput(of.made, of.read, tuple(of.places)) for of in run.stage_inputs()]
    return run.ran, stage_inputs, run.bare, run.changed_buffers, run.refused


def changed_by_evaluation(model: nn.Module, structure: LayerStack) -> tuple[dict[str, bool], list[str]]:
    """Returns what an evaluation writes to and training does not: parameters as in LayerStack, and buffers.

    Raises:
        ScheduleError: the model can't be evaluated on meta.
    """
    with evaluating(True):
        run = _flow_at(meta_copy(model), structure, *SIZES[0])
    known, buffers = structure.changed_parameters, run.changed_buffers - {*structure.changed_buffers}
    parameters = {name: by_inputs for name, by_inputs in run.changed_parameters.items() if name not in known}
    return parameters, sorted(buffers)


def layer_stack_of(model: nn.Module) -> LayerStack | None:
    """Returns the layer stack of an HF model, or None where ``find_layer_stack`` raises ``ScheduleError``."""
    with suppress(ScheduleError):
        return find_layer_stack(model)
    return None


def _learn_shapes(structure: LayerStack, probe: nn.Module, calls: list[Call]) -> None:
    """Learns which dimensions follow batch and sequence, and which floats stay float32 in another precision.

    Args:
        probe: another ``meta_copy`` than the one that made ``calls``: it is cast, and calls may return parameters.
        calls: calls up to that of the first layer at least.
    """
    others, dtype = calls, torch.float32
    for dtype in (torch.bfloat16, torch.float32):
        cast_as_loaded(probe, dtype)
        try:
            inputs = inputs_of(probe, *SIZES[1], structure.loss_labels)
            others = [*record_tape(probe, inputs, own_loss=True, most_calls=len(calls)).calls()]
            break
        except ScheduleError:  # one that can't run in bfloat16 will not be trained in it
            if dtype == torch.float32:
                raise
    for path in structure.before:
        structure.before[path] = _shapes(path, _at(calls, path).output, _at(others, path).output, dtype)
    for path, (layers, _) in structure.between.items():
        returned = _shapes(path, _at(calls, path).output, _at(others, path).output, dtype)
        structure.between[path] = layers, returned
    first = structure.layer_path(structure.first)
    hidden = [structure.slot.get(call.args, call.kwargs) for call in (_at(calls, first), _at(others, first))]
    structure.hidden = _shapes(first, *hidden, dtype)


def _find_layers(model: nn.Module, calls: list[Call]) -> tuple[str, bool]:
    """Returns the path of the largest list of called layers, and whether some are called more than once.

    The second is also True where layers are called out of their order.
    """
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        children = [f"{path}.{i}" for i in range(len(module))]
        members = set(children)
        order = [call.path for call in calls if call.path in members]
        # Some may be for what is not there (cross attention to images).
        once = order == [child for child in children if child in set(order)]
        size = sum(p.numel() for child in set(order) for p in model.get_submodule(child).parameters())
        if order and (once or set(order) == members):
            found.append((size, once, path))
    if not found:
        remedy = (
            "Megatron's trainer, pipeline stages and sequence parallelism need them in an nn.ModuleList "
            "whose modules are all called"
        )
        raise ScheduleError(Problem("no list of layers found in the model", remedy=remedy))
    _, once, path = max(found, key=lambda one: one[:2])  # the first of those that are as large
    return path, not once


def _find_slot(calls: list[Call]) -> HiddenStateArg:
    """Finds the hidden state: the argument that is, for most layers, a tensor that the layer before returned."""
    votes: Counter[int | str] = Counter()
    for previous, call in pairwise(calls):
        returned = {id(t) for t in tensors_in(previous.output)}
        for key, value in [*enumerate(call.args), *call.kwargs.items()]:
            if isinstance(value, torch.Tensor) and id(value) in returned:
                votes[key] += 1
    if votes:
        argument = votes.most_common(1)[0][0]
    else:  # one layer, or an operation between the layers: the first float tensor
        given = [*enumerate(calls[0].args), *calls[0].kwargs.items()]
        floats = [k for k, v in given if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if not floats:
            raise _no_hidden_state(calls[0].path, "takes no tensor of floats by itself")
        argument = floats[0]
    output = calls[-1].output
    if isinstance(output, torch.Tensor):
        return HiddenStateArg(argument, None)
    first = calls[0]
    hidden = first.args[argument] if isinstance(argument, int) else first.kwargs[argument]
    items = output if isinstance(output, (tuple, list)) else ()
    fits = [i for i, v in enumerate(items) if isinstance(v, torch.Tensor) and v.shape == hidden.shape]
    if not fits:
        kind = type(output).__name__
        raise _no_hidden_state(calls[-1].path, f"returns a {kind} without a tensor like what it takes")
    others = tuple(None if isinstance(v, torch.Tensor) else v for v in items)
    return HiddenStateArg(argument, fits[0], others, type(items))


def _handing_containers(slot: HiddenStateArg, calls: list[Call]) -> str:
    """Returns why layers that hand each other no tensor can't be cut; empty where they hand each other tensors."""
    handed = (slot.get(call.args, call.kwargs) for call in calls)
    names = [type(value).__name__ for value in handed if not isinstance(value, torch.Tensor)]
    return f"they hand each other a {names[0]}, and no tensor by itself" if names else ""


def _no_hidden_state(path: str, what: str) -> ScheduleError:
    remedy = "let layers take the hidden state as an argument, and return it, or a tuple or list that has it"
    what = f"this layer {what}, so where its hidden state is can't be told"
    return ScheduleError(Problem(what, path, remedy=remedy))


def _at(calls: list[Call], path: str) -> Call:
    return next(call for call in calls if call.path == path)


def _shapes(path: str, first: Any, second: Any, dtype: torch.dtype) -> Any:
    """Returns what a module returned, with each tensor replaced by its ``Shape``, learnt from two calls."""

    def one(a: Any, b: Any) -> Any:
        return shape_of(a, b, second_dtype=dtype) if isinstance(a, torch.Tensor) else a

    try:
        return torch.utils._pytree.tree_map(one, first, second)
    except FollowsNeither as error:
        what = f"an output dimension follows neither batch nor sequence {error.args}"
        raise ScheduleError(Problem(what, path)) from error
