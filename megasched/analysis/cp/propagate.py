"""Finds the modules that need the whole sequence under context parallelism, by a run on meta, never by names.

Each rank has a part of the sequence, and runs the definition on it as if it were the whole. That is exact as long
as each token is computed by itself, and where attention goes through HF's registry. This run follows the sequence
dimension of every tensor. A value is *local* if it may depend on other tokens, or on positions that were counted
on this part alone, and so is every value made of it. The module in which it came about then runs on the whole
sequence on every rank. Where there is no such module, context parallelism is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.analysis.cp.facts import CpFacts, CpRegion
from megasched.analysis.cp.flow import SequenceFlow
from megasched.analysis.cp.given_positions import takes_counted_positions
from megasched.analysis.cp.trial import (
    REMEDY,
    Origin,
    RunningCall,
    closed_over,
    dims_as_long,
    numbers_of_length,
    takes_positions,
    trial_sizes,
)
from megasched.analysis.recording.backward_code import handed_to_hooks, watched_backward
from megasched.analysis.recording.meta_call import call_hooks, evaluating, meta_copy, run_on_meta, tensors_in
from megasched.analysis.stages.hooked_outputs import change_leaves
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.trials.ways import NO_OTHERS, Way, Ways
from megasched.definition import attention_interface
from megasched.definition.mask_interface import context_masks, whole_sequence
from megasched.definition.sequence_split import Zigzag
from megasched.errors import Problem, ScheduleError
from megasched.language.tensor_types import ShardDim


def plan_sequence(
    model: nn.Module,
    structure: LayerStack,
    size: int,
    refuse_region: Callable[[str], str],
    positions_count: Callable[[nn.Module], bool] = takes_counted_positions,
    ways: Ways = NO_OTHERS,
) -> CpFacts:
    """Finds what context parallelism over ``size`` ranks does to a causal language model.

    Args:
        refuse_region: returns why a module can't run on the whole sequence; empty where it can.
        positions_count: whether positions that count from 0 are those that the model makes by itself.
        ways: the ways through its code.
    """
    regions: frozenset[str] = frozenset()

    def run_by(way: Way, number: int) -> SequenceRun:
        """Runs the model with the first or the second of two lengths."""
        batch, lengths = trial_sizes(model, size, way.length or 0)
        own = (batch, lengths[number]), regions, refuse_region, dict(way.answers), ways.deciding
        run = SequenceRun(meta_copy(model), structure, size, *own)
        with evaluating(way.evaluates):
            run.run()
        return run

    while True:
        runs = [run_by(way, 0) for way in (Way(), *ways.others)]
        wanted = regions.union(*(run.wanted for run in runs))
        if wanted == regions:
            break
        regions = wanted
    run = runs[0]
    for path in sorted(set().union(*(each.wanted for each in runs))):  # is one already, and it did not help
        what = "context parallelism: it needs more than the whole sequence of what it is handed"
        run.plan.problems.append(Problem(what, path, remedy=REMEDY))
    for way, other in zip(ways.others, runs[1:], strict=True):
        _join(run.plan, other.plan, way)
    for way, first in zip((Way(), *ways.others), runs, strict=True) if not run.plan.problems else ():
        run.plan.problems += numbers_of_length(first.numbers, run_by(way, 1).numbers)
    for site in ways.too_many:
        what = f"context parallelism: the value that {site} asks for decides on more ways than are looked at"
        run.plan.problems.append(Problem(what, remedy=REMEDY))
    if run.plan.takes_positions and not run.plan.problems and not positions_count(model):
        what = "context parallelism: position_ids that count from 0 are not what it makes by itself"
        run.plan.problems.append(Problem(what, remedy=REMEDY))
    return run.plan


def _join(plan: CpFacts, other: CpFacts, way: Way) -> None:
    """Adds the facts that another way through the code shows."""
    for name in ("regions", "recorded"):
        held, more = getattr(plan, name), getattr(other, name)
        for path in (path for path in held.keys() & more.keys() if held[path] != more[path]):
            what = f"context parallelism: where the sequence is in its tensors goes by {way}"
            plan.problems.append(Problem(what, path, remedy=REMEDY))
        held.update(more)
    plan.attention |= other.attention
    known = {problem.module for problem in plan.problems}
    plan.problems += [problem for problem in other.problems if problem.module not in known]


class SequenceRun(SequenceFlow):
    """Runs the model once, with some modules on the whole sequence."""

    def run(self) -> None:
        """Runs the model, and fills ``wanted`` and ``plan``."""
        ids = torch.zeros(self.batch, self.length, dtype=torch.long, device="meta")
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        self.plan.takes_positions = takes_positions(self.model)
        if self.plan.takes_positions:
            inputs["position_ids"] = ids.clone()
            self.of_positions.add(id(inputs["position_ids"]))
        if self.structure.calls_loss:
            inputs["labels"] = ids.clone()
            self.model.loss_function = self._loss
        for tensor in tensors_in(inputs):
            self._put(tensor, ShardDim(1))
        zigzag = Zigzag(self.size, 0)
        self.attention = attention_interface.registered()
        hooks = call_hooks(self.model, self.before, self.after)
        masks = context_masks(zigzag, lambda part, along: self._resized(part, along, self.size), self._mask)
        try:
            backward = watched_backward(self.custom_function, lambda tensor, hook: self.hooked(tensor), self.packs)
            with attention_interface.use_attention(self.attend), hooks, masks, backward, self.open_regions:
                output = run_on_meta(self.model, inputs, self, autograd=True)
        except ScheduleError as error:  # a mask for all keys, e.g., in attention code of its own
            if self.plan.problems:
                return
            if self.inside is not None or not self.stack:
                raise
            self._need(self._origin(f"a part of it does not go through: {error.problems[0].what}"))
            return
        if not self.structure.calls_loss:
            self._take_part(output.logits, "logits")

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.stack.append(RunningCall(path, args, kwargs))
        if self.silent or self.inside:
            return None
        if path in self.regions:
            return self._enter(path, args, kwargs)
        if path in self.experts:  # each token by itself, however they are sorted for it
            for tensor in tensors_in((args, kwargs)):
                self._take_part(tensor, "experts")
            self.silent += 1
        return None

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        _, args, kwargs = self.stack[-1]
        for tensor in handed_to_hooks(module, args, kwargs, output):
            self.hooked(tensor)
        changed = None
        if path == self.inside:
            self.inside = None
            self.open_regions.close()
            changed = self._leave(path, output)
        elif path in self.experts and not self.inside and self.silent == 1:
            self.silent -= 1
            along = self.shard_of(tensors_in((args, kwargs))[0])
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
            origin, along = self._origin_of(leaf), self.shard_of(leaf)
            if origin is not None:
                self._need(origin)
            elif along is not None:
                inputs[index] = along
                leaves[index] = self._resized(leaf, along, self.size)
        self.plan.regions.setdefault(path, CpRegion(inputs, {}))
        if self.plan.regions[path].inputs != inputs:
            self._problem(path, "context parallelism: it is called in several ways, on the whole sequence", REMEDY)
        self.inside = path
        self.open_regions.enter_context(whole_sequence())
        return torch.utils._pytree.tree_unflatten(leaves, structure)

    def _leave(self, path: str, output: Any) -> Any:
        """Returns a module's output with each tensor as long as the whole sequence cut to a rank's own part."""
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
        self.plan.regions[path] = CpRegion(self.plan.regions[path].inputs, outputs)
        return torch.utils._pytree.tree_unflatten(leaves, structure)

    def _leave_layers(self, path: str, output: Any) -> Any:
        """Gathers what HF's hooks recorded inside of layers, where the module around the layers returns it."""
        leaves, _ = torch.utils._pytree.tree_flatten_with_path(output)
        found = {leaf_path: self.shard_of(leaf) for leaf_path, leaf in leaves if id(leaf) in self.recorded}
        for leaf in (leaf for leaf_path, leaf in leaves if leaf_path in found):
            if (origin := self._origin_of(leaf)) is not None:
                self._need(origin)
            self._note_whole([leaf])  # that of a region is, as it is
        split = {leaf_path: along for leaf_path, along in found.items() if along is not None}
        if not split:
            return None
        self.plan.recorded[path] = split

        def gathered(leaf: torch.Tensor, along: ShardDim) -> torch.Tensor:
            whole = self._resized(leaf, along, self.size)
            self._note_whole([whole])
            return whole

        return change_leaves(path, output, {at: partial(gathered, along=along) for at, along in split.items()})

    def _resized(self, tensor: torch.Tensor, along: ShardDim, factor: float) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[along.dim] = round(shape[along.dim] * factor)
        with self.silently():
            return tensor.new_empty(shape)

    # calls that are known ----------------------------------------------------------------------------

    def _take_part(self, tensor: torch.Tensor, what: str) -> None:
        """Checks that a tensor is a part of the sequence in which each token was computed by itself."""
        origin = self._origin_of(tensor)
        if origin is not None:
            self._need(origin)
        elif self.shard_of(tensor) is None and not self.wanted:
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
        """Stands in for attention through HF's registry, which gathers keys and values [b, heads, s, d]."""
        if self.inside:
            with self.silently():
                return self.attention(module, query, key, value, attention_mask, *args, **kwargs)
        for tensor in (query, key, value):
            self._take_part(tensor, "attention")
        whole = self.length * self.size
        harmless = attention_interface.HARMLESS
        others = [t for n, t in kwargs.items() if n not in harmless and isinstance(t, torch.Tensor)]
        fits = attention_mask is None or (
            self.shard_of(attention_mask) == ShardDim(2) and attention_mask.shape[-1] == whole
        )
        aligned = all(self.shard_of(t) in (None, ShardDim(2)) for t in (query, key, value))
        if not fits or not aligned or any(id(t) in self.places or self._origin_of(t) for t in others):
            self._need(self._origin("attention gets a mask, or more, that was made of a part of the sequence"))
            for tensor in [*others, *([] if attention_mask is None else [attention_mask])]:
                if (origin := self._origin_of(tensor)) is not None:
                    self._need(origin)
        self.plan.attention.add(self.stack[-1].path)
        with self.silently():
            output = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        self._put(output, ShardDim(1))
        return output, None

    def _mask(self, function: Callable[..., Any], build: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        with self.silently():
            mask = build()
        made_of = [t for t in closed_over(function) if id(t) in self.places or self._origin_of(t) is not None]
        if mask is not None and made_of:
            self._spoil(mask, Origin(None, self.stack[-1].path, "a mask is made of other tensors than positions"))
        elif mask is not None:
            self._put(mask, ShardDim(2))
        return mask

    def _loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._take_part(logits, "the loss")
        with self.silently():
            return logits.new_zeros(())
