"""Defines the layer stack of a definition: its layers, the modules around them, and the tensors between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megasched.analysis.notes.code_facts import CodeFacts
from megasched.analysis.recording.meta_call import token_inputs
from megasched.analysis.recording.recorder import Boundaries, record_tape
from megasched.analysis.recording.sites import Site
from megasched.analysis.recording.tape import Tape
from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.analysis.stages.loss_labels import LossForm, LossLabels
from megasched.analysis.stages.output_refs import OutputRef, StageInput
from megasched.analysis.stages.shapes import SIZES, Shape
from megasched.analysis.stages.trial_inputs import inputs_of
from megasched.language.module_paths import is_within

_UNKNOWN = Shape((), torch.float32)  # until it is learnt


@dataclass
class LayerStack:
    """Describes how a definition runs.

    Attributes:
        layers: path of the ``ModuleList`` whose children are the layers.
        slot: where the hidden state stands in each layer's call.
        before: path -> output of each module with parameters of its own that runs before the layers: a ``Shape``,
            or a structure with a ``Shape`` in each tensor's place.
        between: path -> (layers before or in which it runs, its output) of each such module that runs between or
            inside of layers.
        after: paths of such modules that run after the layers, in call order.
        repeated: whether layers are called more than once (ALBERT's are shared; some models run theirs in loops),
            or in another order than they have in their list.
        calls: path of a module -> how often a forward calls it, where that is more than once; empty unless
            ``repeated``.
        trial: example arguments of the forward, on meta, labels included.
        calls_loss: whether the forward computes its loss by ``loss_function``, which a run replaces. A forward
            that does not gets no labels, and the run takes its logits.
        loss: whether a run's loss is the one that the definition's own code computes; it gets labels then.
        hidden: the shape of the hidden state; mostly [b, s, h].
        called: indices of the layers that a call with token ids runs; empty where it runs all in their order.
        stage_inputs: tensors of earlier layers that layers read beside the hidden state.
        recorded: places of the tensors that HF's hooks record inside of layers.
        bare: modules outside of the layers whose parameters are read by the code of other modules.
        changed_buffers: buffers that a forward writes to or replaces.
        changed_parameters: parameters that a forward writes to -> whether the new values depend on the inputs.
        by_chance: whether the code around the layers asks for a random number, to skip some of them.
        uncuttable: why there can be no pipeline stages; empty where there can.
        asked: questions about values in code around the layers that later stages can't answer.
        tape: tape of a forward with ``trial_inputs``, until ``take_tape``; None where there is none.
        code_facts: which lines of the code a trial has run; None where that is not known.
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
    stage_inputs: tuple[StageInput, ...] = ()
    recorded: tuple[OutputRef, ...] = ()
    bare: tuple[str, ...] = ()
    changed_buffers: tuple[str, ...] = ()
    changed_parameters: dict[str, bool] = field(default_factory=dict)
    uncuttable: str = ""
    by_chance: bool = False
    asked: frozenset[Site] = frozenset()
    code_facts: CodeFacts | None = field(default=None, compare=False, repr=False)
    tape: Tape | None = field(default=None, compare=False, repr=False)
    repeated: bool = False
    loss: LossForm = field(default_factory=LossForm)
    calls: dict[str, int] = field(default_factory=dict)
    trial: dict[str, torch.Tensor] = field(default_factory=lambda: token_inputs(*SIZES[0]))

    @property
    def loss_labels(self) -> LossLabels | None:
        """Returns the labels that the definition's own loss code takes; None where a run computes the loss."""
        return self.loss.labels

    @property
    def takes_labels(self) -> bool:
        """Returns whether the forward gets labels, and returns the loss."""
        return self.calls_loss or self.loss_labels is not None

    def trial_inputs(self) -> dict[str, torch.Tensor]:
        """Returns the arguments of a trial call on meta, with labels where the forward uses them."""
        inputs = {name: tensor.clone() for name, tensor in self.trial.items()}
        if not self.takes_labels:
            del inputs["labels"]
        elif self.loss_labels is not None:
            inputs |= self.loss_labels.arguments(inputs["labels"])
        return inputs

    def inputs_for(self, model: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
        """Returns the arguments of a trial call for a batch of other sizes."""
        return inputs_of(model, batch, length, self.loss_labels, calls_loss=self.calls_loss)

    def boundaries(self, model: nn.Module) -> Boundaries:
        """Returns the places at which a tape of this model replaces tensors by aliases."""
        around = frozenset(path for path, _ in model.named_modules() if path and self.holds_layers(path))
        layers, last = frozenset(self.layer_paths()), self.layer_path(self.last)
        return Boundaries(layers, f"{self.layers}.", last, self.slot, around)

    def record(
        self,
        probe: nn.Module,
        inputs: Mapping[str, Any],
        answers: Mapping[Site, int] | None = None,
        *,
        lines: bool = False,
    ) -> Tape:
        """Returns the tape of a forward with aliases at the boundaries of its layers.

        Args:
            probe: a ``meta_copy`` of the definition.
            inputs: arguments of its forward, as ``trial_inputs`` or ``inputs_for`` make them.
            answers: answers to questions about values.
            lines: whether the tape has the lines of the definition's code, which take time to find.

        Raises:
            ScheduleError: it does not run on meta.
        """
        own_loss, boundaries = self.loss_labels is not None, self.boundaries(probe)
        return record_tape(probe, inputs, boundaries, answers=answers, own_loss=own_loss, lines=lines)

    def take_tape(self) -> Tape | None:
        """Hands over the tape with which the layers were found, and drops it here."""
        tape, self.tape = self.tape, None
        return tape

    def layer_path(self, index: int) -> str:
        return f"{self.layers}.{index}"

    def layer_paths(self) -> list[str]:
        return [self.layer_path(index) for index in range(self.count)]

    @property
    def first(self) -> int:
        """Returns the index of the first layer that runs."""
        return self.called[0] if self.called else 0

    @property
    def last(self) -> int:
        """Returns the index of the last layer that runs."""
        return self.called[-1] if self.called else self.count - 1

    def last_before(self, boundary: int) -> int | None:
        """Returns the index of the last layer that runs before a cut in front of layer ``boundary``, or None."""
        return max((i for i in self.called or range(self.count) if i < boundary), default=None)

    @property
    def sequence_dim(self) -> int:
        """Returns the dimension along which sequence parallelism splits the hidden state, s of [..., b, s, h].

        There are definitions with several streams of tokens, [n, b, s, h].
        """
        dims = self.hidden.dims
        return next((dim for dim in range(2, len(dims)) if dims[dim - 1 : dim + 1] == ("b", "s")), 1)

    @property
    def token_ids(self) -> StageInput | None:
        """Returns the token ids if layers read them, or tensors made of them without parameters; else None."""
        return next((side for side in self.stage_inputs if not side.places[0].path), None)

    def stage_inputs_at(self, boundary: int) -> tuple[StageInput, ...]:
        """Returns the tensors that have to cross a cut before the layer ``boundary``, beside the hidden state."""
        hidden = self.stage_inputs_in_hidden(boundary)
        return tuple(side for side in self.stage_inputs if side.crosses(boundary) and side not in hidden)

    def stage_inputs_in_hidden(self, boundary: int) -> tuple[StageInput, ...]:
        """Returns the sides that are themselves the hidden state at a cut, and are read again further on."""
        layer = self.last_before(boundary)
        hidden = None if layer is None else OutputRef(self.layer_path(layer), self.slot.output)
        return tuple(side for side in self.stage_inputs if hidden in side.places)

    def holds_layers(self, path: str) -> bool:
        """Returns whether the module at ``path`` is around the layers."""
        return is_within(self.layers, path)

    def is_below_layer(self, path: str) -> bool:
        """Returns whether the module at ``path`` lies in a layer, and is none itself."""
        index = self.index_of(path)
        return index is not None and path != self.layer_path(index)

    def index_of(self, path: str) -> int | None:
        """Returns the index of the layer that the module at ``path`` is or lies in; None outside the layers."""
        if not path.startswith(self.layers + "."):
            return None
        return int(path[len(self.layers) + 1 :].partition(".")[0])
