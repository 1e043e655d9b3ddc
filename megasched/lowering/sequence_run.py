"""What needs the whole sequence under context parallelism: found by a run on meta, never by names.

Each rank has a part of the sequence, and a definition is run on that as if it were all. That is exact as long as
each token is computed by itself, and where attention goes through HF's registry. This run follows where the
sequence is in every tensor. A value that may depend on other tokens, or on places that were counted on this part
alone, is *local*: it spoils what it meets. The module in which it came about is then run on the whole sequence, on
every rank; where there is no such module, context parallelism is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.experts import is_experts
from megasched.lowering import attention
from megasched.lowering.context_masks import context_masks, whole_sequence
from megasched.lowering.given_positions import takes_counted_positions
from megasched.lowering.zigzag import Zigzag
from megasched.trial.dims import Along
from megasched.trial.meta_call import DefaultScalars, call_hooks, meta_copy, run_on_meta, tensors_in
from megasched.trial.recorded import change_leaves
from megasched.trial.sequence_dims import CONSTANTS, follow_sequence
from megasched.trial.sequence_plan import SequencePlan, SequenceRegion
from megasched.trial.sequence_trial import (
    REMEDY,
    Call,
    Origin,
    closed_over,
    dims_as_long,
    numbers_in,
    numbers_of_length,
    takes_positions,
    trial_sizes,
)
from megasched.trial.structure import Structure

_WRITES = "_"  # ends the name of an operation that changes its operand


def plan_sequence(
    model: nn.Module, structure: Structure, size: int, refuse_region: Callable[[str], str]
) -> SequencePlan:
    """What context parallelism over ``size`` ranks does to a causal language model.

    Args:
        refuse_region: why a module can't be run on the whole sequence; empty where it can.
    """
    regions: frozenset[str] = frozenset()
    batch, lengths = trial_sizes(model, size)
    while True:
        run = SequenceRun(meta_copy(model), structure, size, (batch, lengths[0]), regions, refuse_region)
        run.run()
        if run.wanted <= regions:
            break
        regions |= run.wanted
    for path in sorted(run.wanted):  # is one already, and it did not help
        what = "context parallelism: it needs more than the whole sequence of what it is handed"
        run.plan.problems.append(Problem(what, path, remedy=REMEDY))
    if not run.plan.problems:
        other = SequenceRun(meta_copy(model), structure, size, (batch, lengths[1]), regions, refuse_region)
        other.run()
        run.plan.problems += numbers_of_length(run.numbers, other.numbers)
    if run.plan.takes_positions and not run.plan.problems and not takes_counted_positions(model):
        what = "context parallelism: position_ids that count from 0 are not what it makes by itself"
        run.plan.problems.append(Problem(what, remedy=REMEDY))
    return run.plan


class SequenceRun(DefaultScalars):
    """One run, with some modules run on the whole sequence."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        size: int,
        sizes: tuple[int, int],
        regions: frozenset[str],
        refuse_region: Callable[[str], str],
    ) -> None:
        super().__init__()
        self.model, self.structure, self.size = model, structure, size
        self.regions, self.refuse_region = regions, refuse_region
        self.batch, self.length = sizes
        self.numbers: list[tuple[Any, ...]] = []
        self.plan = SequencePlan()
        self.wanted: set[str] = set()
        self.places: dict[int, Along] = {}
        self.local: dict[int, Origin] = {}
        self.spoiled: dict[int, Origin] = {}
        self.of_positions: set[int] = set()
        self.recorded: set[int] = set()
        self.whole: set[int] = set()
        self.kept: list[torch.Tensor] = []
        self.stack: list[Call] = []
        self.inside: str | None = None
        self.open_regions = ExitStack()
        self.silent = 0

    def run(self) -> None:
        """Runs the model once; ``wanted`` and ``plan`` say what was found."""
        ids = torch.zeros(self.batch, self.length, dtype=torch.long, device="meta")
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        self.plan.takes_positions = takes_positions(self.model)
        if self.plan.takes_positions:
            inputs["position_ids"] = ids.clone()
            self.of_positions.add(id(inputs["position_ids"]))
        if self.structure.calls_loss:
            inputs["labels"] = ids.clone()
        for tensor in tensors_in(inputs):
            self._put(tensor, Along(1))
        self.model.loss_function = self._loss
        zigzag = Zigzag(self.size, 0)
        hooks = call_hooks(self.model, self.before, self.after)
        masks = context_masks(zigzag, lambda part, along: self._resized(part, along, self.size), self._mask)
        try:
            with attention.stand_in(self.attend), hooks, masks, self.open_regions:
                output = run_on_meta(self.model, inputs, self)
        except ScheduleError as error:  # a mask for all keys, e.g., in attention code of its own
            if self.plan.problems:
                return
            if self.inside is not None or not self.stack:
                raise
            self._need(self._origin(f"a part of it does not go through: {error.problems[0].what}"))
            return
        if not self.structure.calls_loss:
            self._take_part(output.logits, "logits")

    # what is known of tensors -------------------------------------------------------------------------

    def place(self, tensor: torch.Tensor) -> Along | None:
        """Where the sequence is in a tensor; None for one that is the same on all ranks."""
        return self.places.get(id(tensor))

    def _put(self, tensor: torch.Tensor, along: Along) -> None:
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self.silent:
            self._asked_for_value(args[0])
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self.silent:
            return output
        operands, outputs = tensors_in((args, kwargs or {})), tensors_in(output)
        if self.inside:
            self._refuse_crossing(operands)
            return output
        if self._is_whole(operands):
            self._note_whole(outputs)
            return output
        if torch.Tag.pointwise in getattr(func, "tags", ()):
            self.numbers.append((self.stack[-1].path, func.__name__, *numbers_in(args, kwargs)))
        if any(id(tensor) in self.of_positions for tensor in operands):
            self.of_positions.update(id(tensor) for tensor in outputs)
        origins = [origin for tensor in operands if (origin := self._origin_of(tensor)) is not None]
        split = [tensor for tensor in operands if id(tensor) in self.places]
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        if origins:
            for origin in origins if split else ():
                self._need(origin)
            self._spoil_all(name, outputs, origins[0])
        elif split and name not in CONSTANTS:
            self._follow(func, name, args, kwargs or {}, outputs)
        else:
            self._made(name, outputs)
        return output

    def _follow(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
    ) -> None:
        partly = name.endswith(_WRITES) and self.place(args[0]) is None
        found = follow_sequence(func, args, kwargs, outputs, self.place)
        for tensor, along in zip(outputs, found, strict=True):
            if along is None:
                origin = self._origin(f"{name.strip('_')} takes other tokens than its own")
                self._spoil_all(name, [tensor], origin)
            else:
                self._put(tensor, along)
                if partly and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
                    self._spoil_all(name, [tensor], self._origin(f"{name.strip('_')} writes into a larger tensor"))

    def _made(self, name: str, outputs: list[torch.Tensor]) -> None:
        """Of no part of the sequence, and as long as one: constants are harmless, counted places are not."""
        for tensor in outputs:
            dims = dims_as_long(tensor, self.batch, self.length)
            if dims and len(dims) == 1 and name in CONSTANTS:
                self._put(tensor, dims[0])
            elif dims:
                self._spoil(
                    tensor, self._origin(f"{name} makes something as long as a rank's part of the sequence")
                )
                self.of_positions.add(id(tensor))

    def _spoil_all(self, name: str, outputs: list[torch.Tensor], origin: Origin) -> None:
        for tensor in outputs:
            self._spoil(tensor, origin)
            if name.endswith(_WRITES):  # what the operand is a view of, too
                self.spoiled[tensor.untyped_storage()._cdata] = origin

    def _asked_for_value(self, tensor: torch.Tensor) -> None:
        """A number that was made of positions decides on something: of the longest position, e.g. which rotary
        frequencies are used. Others are checks of the token ids."""
        origin = self._origin_of(tensor)
        if origin is not None and id(tensor) in self.of_positions and not self.inside:
            self._need(origin)

    # regions ------------------------------------------------------------------------------------------

    def _origin(self, why: str) -> Origin:
        return Origin(self._region_here(), self.stack[-1].path if self.stack else "", why)

    def _region_here(self) -> str | None:
        """The module to be run on the whole sequence for what runs now: in a layer the outermost one below it, or
        else the layer; outside of layers the innermost one. It must be handed a part, to know the length."""
        calls = [call for call in self.stack if any(id(t) in self.places for t in tensors_in(call[1:]))]
        for call in calls:
            index = self.structure.index_of(call.path)
            if index is not None and call.path != self.structure.layer_path(index):
                return call.path
        layers = [call.path for call in calls if self.structure.index_of(call.path) is not None]
        around = f"{self.structure.layers}."
        others = [call.path for call in calls if call.path and not around.startswith(f"{call.path}.")]
        return layers[-1] if layers else others[-1] if others else None

    def _need(self, origin: Origin) -> None:
        """What came about there is needed right: the whole sequence has to be there."""
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

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.stack.append(Call(path, args, kwargs))
        if self.silent or self.inside:
            return None
        if path in self.regions:
            return self._enter(path, args, kwargs)
        if is_experts(module):  # each token by itself, however they are sorted for it
            for tensor in tensors_in((args, kwargs)):
                self._take_part(tensor, "experts")
            self.silent += 1
        return None

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        _, args, kwargs = self.stack[-1]
        changed = None
        if path == self.inside:
            self.inside = None
            self.open_regions.close()
            changed = self._leave(path, output)
        elif is_experts(module) and not self.inside and self.silent == 1:
            self.silent -= 1
            along = self.place(tensors_in((args, kwargs))[0])
            for tensor in tensors_in(output) if along is not None else ():
                self._put(tensor, along)
        elif path and self.structure.holds_layers(path):
            changed = self._leave_layers(path, output)
        for place in self.structure.recorded if not self.silent else ():
            if place.path == path:
                self.recorded.add(id(place.tensor((), {}, output if changed is None else changed)))
        self.stack.pop()
        index = self.structure.index_of(path)
        if index is not None and path == self.structure.layer_path(index):
            self._take_part(
                self.structure.slot.result(output if changed is None else changed), "the layer's output"
            )
        return changed

    def _enter(self, path: str, args: Any, kwargs: Any) -> Any:
        leaves, structure = torch.utils._pytree.tree_flatten((args, kwargs))
        inputs = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            origin, along = self._origin_of(leaf), self.place(leaf)
            if origin is not None:
                self._need(origin)
            elif along is not None:
                inputs[index] = along
                leaves[index] = self._resized(leaf, along, self.size)
        self.plan.regions.setdefault(path, SequenceRegion(inputs, {}))
        if self.plan.regions[path].inputs != inputs:
            self._problem(path, "context parallelism: it is called in several ways, on the whole sequence", REMEDY)
        self.inside = path
        self.open_regions.enter_context(whole_sequence())
        return torch.utils._pytree.tree_unflatten(leaves, structure)

    def _leave(self, path: str, output: Any) -> Any:
        """A rank's own part of what is as long as the whole sequence."""
        leaves, structure = torch.utils._pytree.tree_flatten(output)
        outputs = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            dims = dims_as_long(leaf, self.batch, self.length * self.size)
            if len(dims) > 1:
                why = "what it returns has the sequence in several dimensions"
                self._spoil(leaf, Origin(None, path, why))
            elif dims:
                outputs[index] = dims[0]
                leaves[index] = self._resized(leaf, dims[0], 1 / self.size)
                self._put(leaves[index], dims[0])
        self.plan.regions[path] = SequenceRegion(self.plan.regions[path].inputs, outputs)
        return torch.utils._pytree.tree_unflatten(leaves, structure)

    def _leave_layers(self, path: str, output: Any) -> Any:
        """What HF's hooks recorded inside of layers is gathered where the module around the layers returns it."""
        leaves, _ = torch.utils._pytree.tree_flatten_with_path(output)
        found = {leaf_path: self.place(leaf) for leaf_path, leaf in leaves if id(leaf) in self.recorded}
        for leaf in (leaf for leaf_path, leaf in leaves if leaf_path in found):
            if (origin := self._origin_of(leaf)) is not None:
                self._need(origin)
            self._note_whole([leaf])  # that of a region is, as it is
        split = {leaf_path: along for leaf_path, along in found.items() if along is not None}
        if not split:
            return None
        self.plan.recorded[path] = split

        def gathered(leaf: torch.Tensor, along: Along) -> torch.Tensor:
            whole = self._resized(leaf, along, self.size)
            self._note_whole([whole])
            return whole

        return change_leaves(path, output, {at: partial(gathered, along=along) for at, along in split.items()})

    def _note_whole(self, tensors: list[torch.Tensor]) -> None:
        self.whole.update(map(id, tensors))
        self.kept += tensors

    def _is_whole(self, operands: list[torch.Tensor]) -> bool:
        """Whether an operation takes what was gathered, and no part of the sequence with it: it sees the true
        length."""
        parts = any(id(tensor) in self.places or self._origin_of(tensor) is not None for tensor in operands)
        return not parts and any(id(tensor) in self.whole for tensor in operands)

    def _resized(self, tensor: torch.Tensor, along: Along, factor: float) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[along.dim] = round(shape[along.dim] * factor)
        with self._silently():
            return tensor.new_empty(shape)

    # calls that are known -----------------------------------------------------------------------------

    def _take_part(self, tensor: torch.Tensor, what: str) -> None:
        """Something that must be a part of the sequence, each token by itself."""
        origin = self._origin_of(tensor)
        if origin is not None:
            self._need(origin)
        elif self.place(tensor) is None and not self.wanted:
            path = self.stack[-1].path if self.stack else ""
            self._problem(path, f"context parallelism: the sequence was lost on the way to {what}", REMEDY)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Attention through HF's registry gathers keys and values [b, heads, s, d] by itself."""
        if self.inside:
            with self._silently():
                return attention.attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
        for tensor in (query, key, value):
            self._take_part(tensor, "attention")
        whole = self.length * self.size
        others = [t for n, t in kwargs.items() if n not in attention.HARMLESS and isinstance(t, torch.Tensor)]
        fits = attention_mask is None or (
            self.place(attention_mask) == Along(2) and attention_mask.shape[-1] == whole
        )
        aligned = all(self.place(t) in (None, Along(2)) for t in (query, key, value))
        if not fits or not aligned or any(id(t) in self.places or self._origin_of(t) for t in others):
            self._need(self._origin("attention gets a mask, or more, that was made of a part of the sequence"))
            for tensor in [*others, *([] if attention_mask is None else [attention_mask])]:
                if (origin := self._origin_of(tensor)) is not None:
                    self._need(origin)
        self.plan.attention.add(self.stack[-1].path)
        with self._silently():
            output = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        self._put(output, Along(1))
        return output, None

    def _mask(self, function: Callable[..., Any], build: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        with self._silently():
            mask = build()
        made_of = [t for t in closed_over(function) if id(t) in self.places or self._origin_of(t) is not None]
        if mask is not None and made_of:
            self._spoil(mask, Origin(None, self.stack[-1].path, "a mask is made of other tensors than positions"))
        elif mask is not None:
            self._put(mask, Along(2))
        return mask

    def _loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._take_part(logits, "the loss")
        with self._silently():
            return logits.new_zeros(())

    @contextmanager
    def _silently(self) -> Iterator[None]:
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1
