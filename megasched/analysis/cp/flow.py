"""Follows what operations do to a sequence that is split over context-parallel ranks; see ``SequenceFlow``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from megasched.analysis.cp.facts import CpFacts
from megasched.analysis.cp.trial import REMEDY, Origin, RunningCall, dims_as_long
from megasched.analysis.recording.backward_code import Function
from megasched.analysis.recording.meta_call import ScalarAnswers, tensors_in
from megasched.analysis.recording.numbers import CONSTANTS, goes_by_numbers, numbers_in
from megasched.analysis.recording.operators import LibraryOperator, draws, written
from megasched.analysis.recording.sites import Site
from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.function_trials import FunctionTrials
from megasched.analysis.rules.op_call import NeedsWhole
from megasched.analysis.rules.op_rules import op_rule
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.definition.experts import find_experts
from megasched.errors import Problem
from megasched.language.tensor_types import ShardDim

_WRITES = "_"  # ends the name of an operation that changes its operand


class SequenceFlow(ScalarAnswers):
    """Follows the sequence dimension of every tensor in a run, and values made of one part of the sequence.

    No tape tells: code sees a rank's part, by whose length it may go another way.

    Attributes:
        places: id of a tensor -> its sequence dimension.
        local: id of a tensor -> how its values came to depend on more than their own tokens.
        wanted: modules that must run on the whole sequence.
        plan: the facts found so far.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: LayerStack,
        size: int,
        sizes: tuple[int, int],
        regions: frozenset[str],
        refuse_region: Callable[[str], str],
        answers: Mapping[Site, int] | None = None,
        deciding: frozenset[Site] = frozenset(),
    ) -> None:
        super().__init__(answers=answers)
        self.deciding = deciding
        self.model, self.structure, self.size = model, structure, size
        self.regions, self.refuse_region = regions, refuse_region
        self.batch, self.length = sizes
        self.experts = set(find_experts(model))
        self.numbers: list[tuple[Any, ...]] = []
        self.plan = CpFacts()
        self.wanted: set[str] = set()
        self.places: dict[int, ShardDim] = {}
        self.local: dict[int, Origin] = {}
        self.spoiled: dict[int, Origin] = {}
        self.of_positions: set[int] = set()
        self.recorded: set[int] = set()
        self.whole: set[int] = set()
        self.kept: list[torch.Tensor] = []
        self.stack: list[RunningCall] = []
        self.inside: str | None = None
        self.open_regions = ExitStack()
        self.functions = FunctionTrials()
        self.packing = 0

    def shard_of(self, tensor: torch.Tensor) -> ShardDim | None:
        """Returns the sequence dimension of a tensor; None for a tensor that is not split along the sequence."""
        return self.places.get(id(tensor))

    def _put(self, tensor: torch.Tensor, along: ShardDim) -> None:
        self.places[id(tensor)] = along
        self.local.pop(id(tensor), None)
        self.kept.append(tensor)  # keeps the id from being given to another tensor

    def _spoil(self, tensor: torch.Tensor, origin: Origin) -> None:
        self.local[id(tensor)] = origin
        self.places.pop(id(tensor), None)
        self.kept.append(tensor)

    def _origin_of(self, tensor: torch.Tensor) -> Origin | None:
        storage = tensor.untyped_storage()._cdata if self.spoiled else 0
        return self.local.get(id(tensor)) or self.spoiled.get(storage)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().execute(func, args, kwargs)
        if self.silent:
            return output
        operands, outputs = tensors_in((args, kwargs)), tensors_in(output)
        if self.inside:
            self._refuse_crossing(operands)
            return output
        if self._is_whole(operands):
            self._note_whole(outputs)
            return output
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        if goes_by_numbers(func) and name not in CONSTANTS:  # of which ``_made`` notes them
            self.numbers.append((self.stack[-1].path, func.__name__, *numbers_in(args, kwargs)))
        if any(id(tensor) in self.of_positions for tensor in operands):
            self.of_positions.update(id(tensor) for tensor in outputs)
        if self.packing and any(id(tensor) in self.places for tensor in operands):
            what = "context parallelism: its hooks on what is saved for the backward pass get parts of it"
            self._problem(self.stack[-1].path if self.stack else "", what, REMEDY)
        origins = [origin for tensor in operands if (origin := self._origin_of(tensor)) is not None]
        split = [tensor for tensor in operands if id(tensor) in self.places]
        if origins:
            for origin in origins if split else ():
                self._need(origin)
            self._spoil_all(name, outputs, origins[0])
        elif split and name not in CONSTANTS:
            self._follow(func, name, args, kwargs, outputs)
        else:
            self._made(name, args, kwargs, outputs)
        return output

    def _follow(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
    ) -> None:
        partly = name.endswith(_WRITES) and self.shard_of(args[0]) is None
        found: list[ShardDim | None] = [None] * len(outputs)
        # Numbers that are drawn into a tensor decide on something, and are those of the whole; but for a dropout.
        if name == "bernoulli_" or not (draws(func, args, kwargs) and written(func, args, kwargs)):
            with suppress(NeedsWhole):
                found = follow(func, args, kwargs, outputs, self.shard_of)
            if any(along and along.components for along in found):  # two sequences, one after the other
                found = [None] * len(outputs)
        for tensor, along in zip(outputs, found, strict=True):
            if along is None:
                origin = self._origin(f"{name.strip('_')} takes other tokens than its own")
                self._spoil_all(name, [tensor], origin)
            else:
                self._put(tensor, along)
                if partly and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
                    self._spoil_all(name, [tensor], self._origin(f"{name.strip('_')} writes into a larger tensor"))

    def custom_function(self, function: Function, args: tuple[Any, ...], output: Any) -> None:
        """Checks a function with its own backward, which may use the gradients of other tokens."""
        outputs = tensors_in(output)
        if self.inside:  # where each rank has the whole sequence, and of a gradient the term of its own part
            if not self.functions.works_on_shards(function, args, output, lambda tensor: None):
                what = f"the backward of {function.__name__} does not take a part of a gradient"
                self._problem(self.inside, f"context parallelism: {what}", REMEDY)
            return
        if self.silent or not any(id(tensor) in self.places for tensor in outputs):
            return
        if isinstance(function, LibraryOperator) and op_rule(function.operator):
            return
        with self.silently():
            by_parts = self.functions.works_on_shards(function, args, output, self.shard_of)
        if not by_parts:
            origin = self._origin(f"the backward of {function.__name__} takes other tokens than its own")
            self._spoil_all("", outputs, origin)

    def packs(self, change: int) -> None:
        """Counts how many of the definition's own hooks on tensors saved for the backward pass are active."""
        self.packing += change

    def grad_fn_read(self, tensor: torch.Tensor) -> None:
        self.hooked(tensor)

    def hooked(self, tensor: torch.Tensor) -> None:
        """Reports a hook that sees the gradient of a tensor where a rank has only a part of that gradient.

        These are the gradients of split or local tensors, of parameters, and of all tensors inside a region, of
        which a rank hands out its own part. During a silent call every hook counts, as no tensor is followed
        there.
        """
        of_part = id(tensor) in self.places or self._origin_of(tensor) is not None
        if self.silent or self.inside or of_part or isinstance(tensor, nn.Parameter):
            what = "context parallelism: a hook is handed a gradient of which each rank has a part"
            self._problem(self.stack[-1].path if self.stack else "", what, REMEDY)

    def _made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> None:
        """Notes the outputs of an operation on no part of the sequence.

        An output that is as long as a part is harmless where it is a constant, and local where positions were
        counted. A tensor made of nothing may also be twice as long, or one longer, or be filled with the length:
        its sizes and numbers are noted for comparison with a run of another length.
        """
        of_nothing = name in CONSTANTS or not tensors_in((args, kwargs))
        sizes: list[Any] = []
        for tensor in outputs:
            dims = dims_as_long(tensor, self.batch, self.length)
            if dims and len(dims) == 1 and name in CONSTANTS:
                self._put(tensor, dims[0])
            elif dims:
                self._spoil(
                    tensor, self._origin(f"{name} makes something as long as a rank's part of the sequence")
                )
                self.of_positions.add(id(tensor))
                of_nothing = of_nothing and name in CONSTANTS
            else:
                sizes.append(tuple(tensor.shape))
        if of_nothing:
            path = self.stack[-1].path if self.stack else ""
            self.numbers.append((path, name, *numbers_in(args, kwargs), *sizes))

    def _spoil_all(self, name: str, outputs: list[torch.Tensor], origin: Origin) -> None:
        for tensor in outputs:
            self._spoil(tensor, origin)
            if name.endswith(_WRITES):  # what the operand is a view of, too
                self.spoiled[tensor.untyped_storage()._cdata] = origin

    def numbers_given(self, values: Any) -> None:
        if not self.silent and not self.inside:
            self.numbers.append((self.stack[-1].path if self.stack else "", "tensor", repr(values)))

    def asked_about_values(self, tensors: Sequence[torch.Tensor], site: Site | None, *, how_many: bool) -> None:
        """Asks for the whole sequence where a number made of a part of it decides what the code does.

        The longest position, for example, decides which rotary frequencies are used. A question about how many
        elements there are always counts. Other questions that decide nothing are checks of the token ids.
        """
        if self.silent or self.inside or site is None:
            return
        for tensor in tensors:
            origin = self._origin_of(tensor)
            if origin is None and id(tensor) in self.places:
                origin = self._origin(f"{site} asks for values of a part of it")
            decides = how_many or site in self.deciding or id(tensor) in self.of_positions
            if origin is not None and decides:
                self._need(origin)

    def _note_whole(self, tensors: list[torch.Tensor]) -> None:
        self.whole.update(map(id, tensors))
        self.kept += tensors

    def _is_whole(self, operands: list[torch.Tensor]) -> bool:
        """Returns whether an operation takes gathered tensors and no part, so that it sees the true length."""
        parts = any(id(tensor) in self.places or self._origin_of(tensor) is not None for tensor in operands)
        return not parts and any(id(tensor) in self.whole for tensor in operands)

    # what is needed whole ----------------------------------------------------------------------------

    def _origin(self, why: str) -> Origin:
        return Origin(self._region_here(), self.stack[-1].path if self.stack else "", why)

    def _region_here(self) -> str | None:
        """Returns the path of the module to run on the whole sequence for the operation that runs now.

        In a layer it is the outermost module below the layer, or else the layer; outside of layers, the innermost
        one. It must be handed a part of the sequence, to know the length. None where no module qualifies.
        """
        calls = [call for call in self.stack if any(id(t) in self.places for t in tensors_in(call[1:]))]
        below = next((call.path for call in calls if self.structure.is_below_layer(call.path)), None)
        if below is not None:
            return below
        layers = [call.path for call in calls if self.structure.index_of(call.path) is not None]
        around = f"{self.structure.layers}."
        others = [call.path for call in calls if call.path and not around.startswith(f"{call.path}.")]
        return layers[-1] if layers else others[-1] if others else None

    def _need(self, origin: Origin) -> None:
        """Marks the origin's module to be run on the whole sequence, or reports why that is not possible."""
        path, what = origin.region, f"context parallelism: it needs the whole sequence ({origin.why})"
        if path is None:
            self._problem(origin.path, f"{what}, and no module of its own is handed it", REMEDY)
        elif reason := self.refuse_region(path):
            self._problem(path, f"{what}, and {reason}", REMEDY)
        else:
            self.wanted.add(path)

    def _problem(self, path: str, what: str, remedy: str) -> None:
        if all(problem.module != path for problem in self.plan.problems):
            self.plan.problems.append(Problem(what, path, remedy=remedy))

    def _refuse_crossing(self, operands: list[torch.Tensor]) -> None:
        if any(id(tensor) in self.places or self._origin_of(tensor) is not None for tensor in operands):
            what = "context parallelism: it needs the whole sequence, and reads a part that it is not handed"
            self._problem(self.inside or "", what, REMEDY)
