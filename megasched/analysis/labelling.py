"""The labelling run: what calls of modules do to labels, on top of what operations do (``label_run.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megasched.analysis.backward_code import handed_to_hooks
from megasched.analysis.entries import ColumnCall
from megasched.analysis.label_backward import BackwardLabels
from megasched.analysis.labels import TpSpec
from megasched.analysis.meta_call import tensors_in
from megasched.analysis.parts import ArgRef
from megasched.analysis.recorded import change_leaves
from megasched.language.tensor_types import ShardDim

_SPLIT = TpSpec("S", active=True, fed=True, along=ShardDim(1))


class Labelling(BackwardLabels):
    """The labelling run, hooked around every call of a module (``before`` and ``after``)."""

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.stack.append((path, args, kwargs))
        self.derived.called.add(path)
        changed = self._enter_layer(path, args, kwargs)
        if changed is None and path == self._around():
            changed = self._enter_region(path, args, kwargs)
            changed = self._take_parts(path, *(changed or (args, kwargs))) or changed
        if changed is not None:
            self.stack[-1] = (path, *changed)
        if path in self.experts:
            self.derived.experts[path] = self.label(tensors_in(self.stack[-1][1:])[0]).region
        if path in self.cuts:
            if not self.silent:
                self._enter_cut(path, args, kwargs)
                if self.packing:
                    self._refuse_packing()
            self._meet(module.parameters())
            self.silent += 1
        return changed

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        _, args, kwargs = self.stack[-1]
        changed = output
        if path in self.regions:
            changed = self._leave_region(output)
        elif path in self.wanted_regions:
            self._as_if_region(output)
        elif path and self.structure is not None and self.structure.holds_layers(path):
            changed = self._leave_layers(output)
        for tensor in handed_to_hooks(module, args, kwargs, output):
            self.hooked(tensor)
        self.stack.pop()
        handed = {id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(output):
            if id(tensor) in handed:  # what it was given goes out again, to whoever uses it next
                self.other_uses[id(tensor)].add(path)
        if path in self.cuts:
            self.silent -= 1
            if not self.silent:
                result = tensors_in(output)[0]
                self.cut_outputs[id(result)] = path
                self._set(result, self._cut_output(path, result.dim() - 1, tensors_in((args, kwargs))[0]))
        self._note_sides(path, args, kwargs, changed)
        if self.sequence_parallel and self.structure and path == self.structure.layer_path(self.structure.last):
            hidden = self.structure.slot.result(changed)
            whole = self._view(hidden, TpSpec(active=True, fed=True))
            return self.structure.slot.rewrap(changed, whole)
        return None if changed is output else changed

    def _note_sides(self, path: str, args: Any, kwargs: Any, output: Any) -> None:
        """How what later layers read beside the hidden state is cut."""
        for side in self.structure.sides if self.structure else ():
            place = side.places[0]
            if place.path == path and path:
                label = self.label(place.tensor(args, kwargs, output))
                if label.region in ("T", "S"):
                    self.derived.sides[place] = label.along.dim if label.along else None

    def _view(self, tensor: torch.Tensor, label: TpSpec) -> torch.Tensor:
        """The same values under another label."""
        with self._silently():
            view = tensor.view_as(tensor)
        self._set(view, label)
        return view

    def _enter_layer(self, path: str, args: Any, kwargs: Any) -> Any:
        """Under sequence parallelism the hidden state is split when it enters the first layer, and what else was
        made of the whole sequence before the layers when it enters any."""
        if path not in self.layers:
            return None
        slot = self.structure.slot
        hidden = slot.get(args, kwargs)
        self.tokens = hidden.shape[:2]
        found = dict([*enumerate(args), *kwargs.items()])
        whole = [key for key, value in found.items() if value is not hidden and self._of_sequence(value, hidden)]
        if whole:
            self.derived.split_slots[path] = tuple(whole)
        found.update({key: self._view(found[key], _SPLIT) for key in whole})
        args, kwargs = tuple(found[index] for index in range(len(args))), {name: found[name] for name in kwargs}
        if path == self.structure.layer_path(self.structure.first):
            return slot.put(self._view(hidden, _SPLIT), args, kwargs)
        return (args, kwargs) if whole else None

    def _of_sequence(self, value: Any, hidden: torch.Tensor) -> bool:
        """Whether this is an activation [b, s, ...] that every TP rank has whole."""
        if not isinstance(value, torch.Tensor) or value.shape[:2] != hidden.shape[:2]:
            return False
        label = self.label(value)
        return value.is_floating_point() and label.active and label.region == "R"

    def _enter_region(self, path: str, args: Any, kwargs: Any) -> Any:
        """What a region takes over: the arguments that carry a gradient."""
        found = dict([*enumerate(args), *kwargs.items()])
        active = {
            slot: value
            for slot, value in found.items()
            if any(self.label(tensor).active and tensor.is_floating_point() for tensor in tensors_in(value))
        }
        labels = {key: self.label(v) if isinstance(v, torch.Tensor) else TpSpec("T") for key, v in active.items()}
        known = (("R", None), ("S", ShardDim(1)))
        usable = all((label.region, label.along) in known for label in labels.values())
        slots = tuple(active) if usable else ()
        self.derived.whole_slots[path] = {key for key in slots if labels[key].region == "R"}
        if self.slots.setdefault(path, slots) != slots:
            slots = self.slots[path] = ()
        if path not in self.regions:
            return None
        if not slots:
            self.not_regions.add(path)
            return None
        self.derived.needed_regions.add(path)
        found.update({slot: self._view(active[slot], TpSpec("P", active=True, fed=True)) for slot in slots})
        return tuple(found[index] for index in range(len(args))), {name: found[name] for name in kwargs}

    def _take_parts(self, path: str, args: Any, kwargs: Any) -> Any:
        """Constants that the module is handed: some are cut, which of the others should be is to be seen."""
        found = dict([*enumerate(args), *kwargs.items()])
        taken = {}
        for slot, value in found.items():
            argument = ArgRef(path, slot)
            part = self.parts.known.get(argument)
            constant = isinstance(value, torch.Tensor) and self._is_constant(value)
            if part is None:
                if constant:
                    self.parts.offer(argument, value)
            elif not constant:  # in another call it was one
                self.derived.gather |= part.columns
            elif part.columns.isdisjoint(self.gather):
                taken[slot] = self._view(value, TpSpec("T", part.columns, along=part.along(value)))
                self.derived.parts[argument] = part
        if not taken:
            return None
        found |= taken
        return tuple(found[index] for index in range(len(args))), {name: found[name] for name in kwargs}

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the same on all TP ranks, and carries no gradient."""
        label = self.label(tensor)
        return label.region == "R" and not label.active and not label.params

    def _leave_region(self, output: Any) -> Any:
        """Whole tensors leave a region as ``_outside`` says."""
        path = self.stack[-1][0]
        if not self.slots.get(path):
            return output
        leaves, structure = torch.utils._pytree.tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self._is_inside(leaf):
                label = self._outside(leaf)
                self.derived.exits[path][index] = label.along
                leaves[index] = self._view(leaf, label)
        return torch.utils._pytree.tree_unflatten(leaves, structure)

    def _leave_layers(self, output: Any) -> Any:
        """What HF's hooks recorded inside of regions is whole once the module around the layers returns it."""
        leaves, _ = torch.utils._pytree.tree_flatten_with_path(output)
        inside = [path for path, leaf in leaves if isinstance(leaf, torch.Tensor) and self._is_inside(leaf)]
        if not inside:
            return output
        around, whole = self.stack[-1][0], TpSpec(active=True, fed=True)
        self.derived.recorded[around] = tuple(inside)
        return change_leaves(around, output, dict.fromkeys(inside, lambda leaf: self._view(leaf, whole)))

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is whole, of a region, and carries a gradient."""
        return self.label(tensor).region == "P" and tensor.is_floating_point()

    def _along_sequence(self, leaf: torch.Tensor) -> ShardDim | None:
        """How [b, s, ...] and flattened [b*s, ...] are cut along the sequence; None for another shape."""
        if leaf.shape[:2] == self.tokens:
            return ShardDim(1)
        return ShardDim(0, outer=self.tokens[0]) if leaf.shape[:1] == (self.tokens.numel(),) else None

    def _as_if_region(self, output: Any) -> None:
        """What comes of a module that will be a region in the next run, so that nothing after it asks for one: a
        run for each layer would be quadratic."""
        for tensor in tensors_in(output):
            label = self.label(tensor)
            if label.region == "S" and label.along is None and tensor.dim() > 1:
                self._set(tensor, replace(label, along=ShardDim(1)))
            elif self._is_inside(tensor):
                self._set(tensor, self._outside(tensor))

    def _outside(self, inside: torch.Tensor) -> TpSpec:
        """Of a whole tensor that leaves a region: split as before it, or whole with a gradient that is, too."""
        along = self._along_sequence(inside) if self.sequence_parallel else None
        return TpSpec("R" if along is None else "S", active=True, fed=True, along=along)

    def _enter_cut(self, path: str, args: Any, kwargs: Any) -> None:
        source = tensors_in((args, kwargs))[0]
        label = self.label(source)
        cut = self.cuts[path]
        if cut == "column":
            self.derived.gather |= label.columns
            if label.region == "P":
                self.derived.inside.add(path)
            else:
                if label.region == "R" and self.sequence_parallel and self._in_layers(path):
                    self.derived.whole_inputs.add(path)
                self.column_calls.append(ColumnCall(path, source, list(self.stack)))
            self.kept.append(source)
        elif cut == "row" and label.region != "T":
            self.derived.gather |= label.columns
            self.derived.scatter.add(path)
            if label.region == "P":
                self.derived.inside.add(path)
            elif self._in_layers(path) and self.sequence_parallel:
                self._problem(
                    "a row-parallel linear whose input is not sharded can't run under sequence parallelism",
                    "shard the linear before it by columns, or leave this one whole",
                )
        elif cut == "row" and label.along != ShardDim(source.dim() - 1):
            # it takes a contiguous part of the last dimension, and nothing else
            self.derived.gather |= label.columns

    def _cut_output(self, path: str, last: int, source: torch.Tensor) -> TpSpec:
        cut = self.cuts[path]
        split = self.sequence_parallel and self._in_layers(path)
        if cut == "column" and path not in self.gather:
            along = ShardDim(last, components=self.components.get(path, ()), heads=self.heads.get(path, ()))
            if along.heads == (1,):
                return TpSpec("P", frozenset([path]), active=True, fed=True)
            return TpSpec("T", frozenset([path]), active=True, fed=True, along=along)
        if cut == "column" and self.label(source).region == "P":
            return TpSpec("P", active=True, fed=True)
        if cut == "column" and split:
            if not self._want_region():
                self._problem(
                    "the gathered output of a column-parallel linear is whole along the sequence",
                    "pair it with a row-parallel linear, or switch sequence parallelism off",
                )
            return TpSpec("P", active=True, fed=True)
        if path in self.rows_inside:
            return TpSpec("P", active=True, fed=True)
        if cut == "features":
            return TpSpec("T", frozenset([path]), active=True, fed=True, along=ShardDim(last))
        split = split and cut == "row"
        rows = frozenset([path]) if cut == "row" else frozenset()
        # Tokens may be flattened: [b*s, h].
        place = ShardDim(1) if last > 1 else ShardDim(0, outer=self.tokens[0])
        return TpSpec("S" if split else "R", rows=rows, active=True, fed=True, along=place if split else None)

    def attend(self, real: Any, module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attention is heads apart: it takes q, k and v [b, heads, s, d] that are cut along their heads."""
        operands = tensors_in((query, args, kwargs))
        self._meet(operands)
        label = self._join([self.label(tensor) for tensor in operands])
        if label.region == "T":
            cut = [self.label(tensor).along for tensor in operands if self.label(tensor).region == "T"]
            # Ranks may have the same heads of key and value: the function takes fewer of them than of query.
            cut = [cut[0], *(along and replace(along, heads=()) for along in cut[1:])]
            whole = [t for t in operands if self.label(t).region != "T" and id(t) not in self.alike]
            # Sinks, biases. The function takes those of its heads of a parameter.
            of_heads = [t for t in whole if t.dim() == 1 or (t.dim() == 4 and t.shape[1] > 1)]
            of_heads = [t for t in of_heads if t is not kwargs.get("s_aux") or not self.label(t).params]
            met = [(t, ShardDim(1 if t.dim() == 4 else 0)) for t in of_heads]
            by_heads = all(along == ShardDim(1) for along in cut)
            if not by_heads or (met and not self.parts.want(met, label.columns, self._around())):
                self.derived.gather |= label.columns
        if label.region == "S":
            self._need_sequence()
        with self._silently():
            output = real(module, query, *args, **kwargs)
        self._set(output[0], replace(label, along=ShardDim(2) if label.region == "T" else None))
        return output
