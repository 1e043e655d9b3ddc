"""What a definition looks like when it runs: its layers, what comes before and after them.

Found by two calls on meta with different batch and sequence sizes, never by names. This is what lets a
stage be cut out of any definition whose layers form a list.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from megasched.analysis.crossing import StageFlow
from megasched.analysis.loss_trial import OwnLabels
from megasched.analysis.meta_call import meta_copy, tensors_in, token_inputs
from megasched.analysis.noted import NotedLines
from megasched.analysis.own_loss import OwnLoss, own_loss
from megasched.analysis.places import OutputRef, StageInput
from megasched.analysis.recorded import find_recorded
from megasched.analysis.recorder import boundaries_of, record_tape
from megasched.analysis.recording import (
    ModuleCallRecord,
    inputs_of,
    record,
    record_with_loss,
    trial_of,
)
from megasched.analysis.shape import SIZES, FollowsNeither, Shape, shape_of
from megasched.analysis.sites import Site
from megasched.analysis.slot import HiddenStateArg
from megasched.analysis.tape import Tape
from megasched.collector import collector_paused
from megasched.definition.build import cast_as_loaded
from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.definition.undisturbed import undisturbed
from megasched.errors import Problem, ScheduleError

_UNKNOWN = Shape((), torch.float32)  # until it is learnt


@dataclass
class LayerStack:
    """How a definition runs.

    Attributes:
        layers: path of the ``ModuleList`` whose children are the layers.
        slot: where the hidden state stands in each layer's call.
        before: path -> what it returns, of each module with parameters of its own that runs before the layers:
            a ``Shape``, or a structure that has one in each tensor's place.
        between: path -> (layers before or in which it runs, what it returns) of each such module that runs between
            or inside of layers.
        after: paths of such modules that run after the layers, in call order.
        repeated: whether layers are called more than once (ALBERT's are shared; some models run theirs in loops),
            or in another order than they have in their list.
        calls: path of a module -> how often a forward calls it, where that is more than once; empty unless
            ``repeated``.
        trial: example arguments of the forward, on meta, labels included.
        calls_loss: whether the forward computes its loss by ``loss_function``, of which a run has its own; one
            that does it by itself gets no labels, and its logits are taken.
        loss: whether a run's loss is that which its own code computes; it gets labels then.
        hidden: the shape of the hidden state; mostly [b, s, h].
        called: indices of the layers that a call with token ids runs; empty where it runs all in their order.
        sides: what layers read of earlier ones beside the hidden state.
        recorded: what HF's hooks record inside of layers.
        bare: modules outside of the layers whose parameters the code of others reads.
        changed_buffers: buffers that a forward writes to, and that are other ones after it.
        changed_parameters: parameters that a forward writes to -> whether the inputs say what.
        by_chance: whether the code around the layers asks for a number that it draws, to skip some of them.
        uncuttable: why there can be no pipeline stages; empty where there can.
        asked: questions about values that code around the layers asks, and that later stages can't answer.
        noted: which lines of the code a trial has run; None where that is not known.
    """

    layers: str
    count: int
    slot: HiddenStateArg
    before: dict[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    calls_loss: bool = True
    between: dict[str, tuple[tuple[int, ...], Any]] = field(default_factory=dict)
    hidden: Shape = _UNKNOWN
    called: tuple[int, ...] = ()
    sides: tuple[StageInput, ...] = ()
    recorded: tuple[OutputRef, ...] = ()
    bare: tuple[str, ...] = ()
    changed_buffers: tuple[str, ...] = ()
    changed_parameters: dict[str, bool] = field(default_factory=dict)
    uncuttable: str = ""
    by_chance: bool = False
    asked: frozenset[Site] = frozenset()
    noted: NotedLines | None = field(default=None, compare=False, repr=False)
    repeated: bool = False
    loss: OwnLoss = field(default_factory=OwnLoss)
    calls: dict[str, int] = field(default_factory=dict)
    trial: dict[str, torch.Tensor] = field(default_factory=lambda: token_inputs(*SIZES[0]))

    @property
    def own_labels(self) -> OwnLabels | None:
        """The labels that the definition's own code takes, where that computes the loss; None where a run does."""
        return self.loss.labels

    @property
    def takes_labels(self) -> bool:
        """Whether the forward gets labels, and returns the loss."""
        return self.calls_loss or self.own_labels is not None

    def trial_inputs(self) -> dict[str, torch.Tensor]:
        """What a trial call gets, on meta: what a batch has, and labels where the forward has a use for them."""
        inputs = {name: tensor.clone() for name, tensor in self.trial.items()}
        if not self.takes_labels:
            del inputs["labels"]
        elif self.own_labels is not None:
            inputs |= self.own_labels.arguments(inputs["labels"])
        return inputs

    def inputs_for(self, model: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
        """The same for a batch of other sizes."""
        return inputs_of(model, batch, length, self.own_labels, calls_loss=self.calls_loss)

    def layer_path(self, index: int) -> str:
        return f"{self.layers}.{index}"

    def layer_paths(self) -> list[str]:
        return [self.layer_path(index) for index in range(self.count)]

    @property
    def first(self) -> int:
        """Index of the first layer that runs."""
        return self.called[0] if self.called else 0

    @property
    def last(self) -> int:
        """Index of the last layer that runs."""
        return self.called[-1] if self.called else self.count - 1

    def last_before(self, boundary: int) -> int | None:
        """Index of the last layer that runs before a cut in front of the layer ``boundary``; None without any."""
        return max((i for i in self.called or range(self.count) if i < boundary), default=None)

    @property
    def token_ids(self) -> StageInput | None:
        """The token ids, where layers read them, or what is made of them without parameters."""
        return next((side for side in self.sides if not side.places[0].path), None)

    def sides_at(self, boundary: int) -> tuple[StageInput, ...]:
        """What has to cross a cut before the layer ``boundary``, beside the hidden state."""
        hidden = self.hidden_sides(boundary)
        return tuple(side for side in self.sides if side.crosses(boundary) and side not in hidden)

    def hidden_sides(self, boundary: int) -> tuple[StageInput, ...]:
        """Sides that are the hidden state there: they are read again further on."""
        layer = self.last_before(boundary)
        hidden = None if layer is None else OutputRef(self.layer_path(layer), self.slot.output)
        return tuple(side for side in self.sides if hidden in side.places)

    def measure(
        self, model: nn.Module, batch: int, length: int, dtype: torch.dtype
    ) -> dict[OutputRef, torch.Tensor]:
        """Place of each side -> a tensor on meta of its shape and dtype in a run without parallelism.

        Args:
            model: the definition.
            dtype: of its parameters in that run.
        """
        probe = meta_copy(model)
        cast_as_loaded(probe, dtype)
        flow = _stage_flow(record_definition(probe, self, batch, length), self)
        return {found.places[0]: found.tensor for found in flow.sides()}

    def holds_layers(self, path: str) -> bool:
        """Whether the module at ``path`` is around the layers."""
        return not path or self.layers.startswith(f"{path}.") or path == self.layers

    def index_of(self, path: str) -> int | None:
        """Index of the layer that the module at ``path`` is or lies in; None outside the layers."""
        if not path.startswith(self.layers + "."):
            return None
        return int(path[len(self.layers) + 1 :].partition(".")[0])


def record_definition(
    probe: nn.Module,
    structure: LayerStack,
    batch: int = SIZES[0][0],
    length: int = SIZES[0][1],
    answers: Mapping[Site, int] | None = None,
) -> Tape:
    """The tape of a trial batch of a definition whose layers are known.

    Args:
        probe: a ``meta_copy`` of it.
        answers: to questions about values.

    Raises:
        ScheduleError: it does not run on meta.
    """
    inputs = structure.inputs_for(probe, batch, length)
    own_loss = not structure.calls_loss
    return record_tape(probe, inputs, boundaries_of(probe, structure), answers=answers, own_loss=own_loss)


def _stage_flow(tape: Tape, structure: LayerStack) -> StageFlow:
    """Only a causal language model's later stages lack its inputs; other batches are read on every stage. What a
    forward adds to the result of ``loss_function`` may read what layers left, so it is looked at, too."""
    layers = [structure.layer_path(index) for index in structure.called or range(structure.count)]
    outside = {*structure.before, *structure.between, *structure.after}
    first_stage_only = "input_ids" if objective_of(tape.model) is CAUSAL_LM else None
    return StageFlow(tape, layers, outside, structure.slot, structure.recorded, first_stage_only)


@collector_paused()
def find_layer_stack(model: nn.Module) -> LayerStack:
    """The structure of an HF model that was built for an objective.

    Raises:
        ScheduleError: no list of layers is called one after the other, or the model can't run on meta.
    """
    probe = meta_copy(model)
    calls, calls_loss, noted = record_with_loss(probe)
    layers, repeated = _find_layers(probe, calls)
    count = len(probe.get_submodule(layers))
    paths = {f"{layers}.{i}" for i in range(count)}
    of_layers = [call for call in calls if call.path in paths]
    called = tuple(int(call.path.rpartition(".")[2]) for call in of_layers)
    found = LayerStack(layers, count, _find_slot(of_layers), calls_loss=calls_loss, repeated=repeated)
    with undisturbed(model):
        found.loss = own_loss(model, found)
    if found.own_labels is not None:  # its loss may call more modules
        found.calls_loss, noted = False, NotedLines()
        calls = record(probe, inputs_of(probe, *SIZES[0], found.own_labels), noted=noted)
        of_layers = [call for call in calls if call.path in paths]
    found.trial, found.noted = trial_of(probe), noted
    found.called = () if [*dict.fromkeys(called)] == [*range(count)] else called
    owners = {path for path, m in probe.named_modules() if next(m.parameters(recurse=False), None) is not None}
    outside = {path for path in owners if found.index_of(path) is None and not found.holds_layers(path)}
    inside = {path for path, _ in probe.named_modules() if found.index_of(path) is not None} - paths
    found.recorded = find_recorded(
        probe, ((call.path, call.output) for call in calls), inside.__contains__, found.holds_layers
    )
    tape = record_definition(probe, found, *SIZES[0])
    first_stage_only = "input_ids" if objective_of(probe) is CAUSAL_LM else None
    run = StageFlow(tape, [call.path for call in of_layers], outside, found.slot, found.recorded, first_stage_only)
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
    found.sides = tuple(StageInput(of.made, of.read, tuple(of.places)) for of in run.sides())
    _learn_shapes(found, probe, calls if between else calls[: start + 1])
    return found


def flow_of(
    model: nn.Module, structure: LayerStack, answers: Mapping[Site, int] | None = None, length: int | None = None
) -> tuple[Any, ...]:
    """What goes from layer to layer, and what else a pipeline has to know, as something that can be compared.

    Args:
        answers: to questions about values.
        length: of the sequence; that of a trial by default.
    """
    batch, usual = SIZES[0]
    run = _stage_flow(record_definition(meta_copy(model), structure, batch, length or usual, answers), structure)
    sides = [StageInput(of.made, of.read, tuple(of.places)) for of in run.sides()]
    return run.ran, sides, run.bare, run.changed_buffers, run.refused


def layer_stack_of(model: nn.Module) -> LayerStack | None:
    """The same; None where there is none."""
    with suppress(ScheduleError):
        return find_layer_stack(model)
    return None


def _learn_shapes(structure: LayerStack, probe: nn.Module, calls: list[ModuleCallRecord]) -> None:
    """What follows the batch and the sequence, and which floats stay in float32 in another precision.

    Args:
        calls: up to the first layer's at least.
    """
    others, dtype = calls, torch.float32
    for dtype in (torch.bfloat16, torch.float32):
        cast_as_loaded(probe, dtype)
        try:
            others = record(probe, inputs_of(probe, *SIZES[1], structure.own_labels), limit=len(calls))
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


def _find_layers(model: nn.Module, calls: list[ModuleCallRecord]) -> tuple[str, bool]:
    """The largest list, and whether some of its layers are called more than once (shared, or in loops)."""
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
        remedy = "pipeline stages and sequence parallelism need a ModuleList whose modules are all called"
        raise ScheduleError(Problem("no list of layers found in the model", remedy=remedy))
    _, once, path = max(found, key=lambda one: one[:2])  # the first of those that are as large
    return path, not once


def _find_slot(calls: list[ModuleCallRecord]) -> HiddenStateArg:
    """Where the hidden state is: the argument that is, for most layers, what the layer before returned."""
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


def _handing_containers(slot: HiddenStateArg, calls: list[ModuleCallRecord]) -> str:
    """Why layers can't be cut that take something else than a tensor; empty where they take tensors."""
    handed = (slot.get(call.args, call.kwargs) for call in calls)
    names = [type(value).__name__ for value in handed if not isinstance(value, torch.Tensor)]
    return f"they hand each other a {names[0]}, and no tensor by itself" if names else ""


def _no_hidden_state(path: str, what: str) -> ScheduleError:
    remedy = "let layers take the hidden state as an argument, and return it, or a tuple or list that has it"
    what = f"this layer {what}, so where its hidden state is can't be told"
    return ScheduleError(Problem(what, path, remedy=remedy))


def _at(calls: list[ModuleCallRecord], path: str) -> ModuleCallRecord:
    return next(call for call in calls if call.path == path)


def _shapes(path: str, first: Any, second: Any, dtype: torch.dtype) -> Any:
    """The shape of each tensor in what a module returned in two calls; the rest stays."""

    def one(a: Any, b: Any) -> Any:
        return shape_of(a, b, second_dtype=dtype) if isinstance(a, torch.Tensor) else a

    try:
        return torch.utils._pytree.tree_map(one, first, second)
    except FollowsNeither as error:
        what = f"an output dimension follows neither batch nor sequence {error.args}"
        raise ScheduleError(Problem(what, path)) from error
