"""The labelling run: one forward of a definition on meta, every tensor carrying a label (``labels.py``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megasched.errors import Problem
from megasched.experts import is_experts
from megasched.roles import Cut
from megasched.trial.dims import Along, NeedsWhole, follow
from megasched.trial.entries import ColumnCall
from megasched.trial.labels import Derived, Label
from megasched.trial.meta_call import DefaultScalars, tensors_in
from megasched.trial.recorded import change_leaves
from megasched.trial.structure import Structure

_SPLIT = Label("S", active=True, fed=True, along=Along(1))
# Give tensors of one value, from nothing or from such a tensor: each rank can make its own part of one.
_ALIKE = frozenset(["zeros", "ones", "full", "detach"])
_RANDOM = ("dropout", "bernoulli", "rand", "normal_", "uniform_")


class Labelling(DefaultScalars):
    """The labelling run. A dispatch mode, so that it also sees what custom autograd functions do.

    Args:
        regions: modules that must be TP regions as a whole, known from runs before.
        not_regions: modules that can't be.
        rows_inside: row linears whose output stays inside of a region.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Mapping[str, Cut],
        structure: Structure | None,
        sequence_parallel: bool,
        gather: frozenset[str],
        forked_by_user: frozenset[str],
        components: Mapping[str, tuple[int, ...]],
        regions: frozenset[str] = frozenset(),
        not_regions: frozenset[str] = frozenset(),
        rows_inside: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.model, self.cuts, self.structure = model, cuts, structure
        self.components = components
        self.sequence_parallel = sequence_parallel
        self.layers = set(structure.layer_paths()) if sequence_parallel and structure else set()
        self.gather = gather
        self.forked_by_user = forked_by_user
        self.regions, self.not_regions = regions, set(not_regions)
        self.rows_inside = rows_inside
        self.wanted_regions: set[str] = set()
        self.derived = Derived()
        self.labels: dict[int, Label] = {}
        self.kept: list[torch.Tensor] = []
        self.stack: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.slots: dict[str, tuple[int | str, ...]] = {}
        self.column_calls: list[ColumnCall] = []
        self.other_uses: dict[int, set[str]] = defaultdict(set)
        self.summed_outputs: dict[int, str] = {}
        self.tokens = torch.Size((1, 1))
        self.alike: set[int] = set()
        self.silent = 0
        for name, parameter in model.named_parameters():
            self._set(parameter, Label(params=frozenset([name])))

    # labels -----------------------------------------------------------------------------------------

    def label(self, tensor: torch.Tensor) -> Label:
        return self.labels.get(id(tensor), Label())

    def _set(self, tensor: torch.Tensor, label: Label) -> None:
        self.labels[id(tensor)] = label
        self.kept.append(tensor)  # keeps the id from being given to another tensor
        if label.region == "T" and label.along is not None:
            size = tensor.shape[label.along.dim] // label.along.outer
            for column in label.columns:
                self.derived.cut_sizes[column].add(size)
            if label.along.dim != tensor.dim() - 1:
                self.derived.by_heads |= label.columns

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self.silent:
            return output
        operands = tensors_in((args, kwargs or {}))
        joined = self._join([self.label(t) for t in operands])
        path = self.stack[-1][0] if self.stack else ""
        for tensor in operands:
            self.other_uses[id(tensor)].update(entry[0] for entry in self.stack)
            self.kept.append(tensor)
        if func.__name__.split(".")[0].endswith("_") and operands and id(operands[0]) in self.summed_outputs:
            self.derived.overwritten.add(self.summed_outputs[id(operands[0])])
        outputs = tensors_in(output)
        if func.__name__.split(".")[0] in _ALIKE and self.alike.issuperset(map(id, operands)):
            self.alike.update(map(id, outputs))
        for tensor, along in zip(outputs, self._follow(func, args, kwargs or {}, outputs, joined), strict=True):
            self._set(tensor, replace(joined, along=along))
        if any(word in func.__name__ for word in _RANDOM):
            self._random(path, joined)
        return output

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], joined: Label
    ) -> list[Along | None]:
        """How the outputs are cut; what the operation needs whole is gathered."""
        if joined.region not in ("T", "S"):
            return [None] * len(outputs)
        try:
            found = follow(func, args, kwargs, outputs, lambda tensor: self.label(tensor).along)
        except NeedsWhole:
            found = None
        if joined.region == "T":
            if found is None:
                self.derived.gather |= joined.columns
        elif found is None or any(along is None for along in found):
            self._need_sequence()
        return found or [None] * len(outputs)

    def _join(self, labels: list[Label]) -> Label:
        """The label of what an operation makes of its operands."""
        regions = {label.region for label in labels}
        params = frozenset().union(*(label.params for label in labels))
        fed = any(label.fed for label in labels)
        whole = any(label.active and label.region == "R" for label in labels)
        rows = frozenset().union(*(label.rows for label in labels))
        if "T" in regions:
            columns = frozenset().union(*(label.columns for label in labels if label.region == "T"))
            self.derived.partial |= params
            if (whole or "S" in regions) and not self._want_region():
                self.derived.gather |= columns
            return Label("T", columns, active=True, fed=True)
        if "P" in regions:
            self.derived.partial |= params
            if not any(self._in_layers(path) for path, _, _ in self.stack):
                self._problem(
                    "a tensor from inside of a tensor-parallel region is read after the layers, which were not "
                    "handed it out",
                    "have the modules return it, or leave the region's linears whole",
                )
            if whole or "S" in regions:
                self._meets_inside(rows, [label for label in labels if label.active and label.region in "RS"])
            return Label("P", active=True, fed=True)
        if "S" in regions:
            self.derived.sequence |= params
            if whole:
                self._problem(
                    "a whole activation meets one that is split along the sequence",
                    "switch sequence parallelism off for this architecture",
                )
            return Label("S", rows=rows, active=True, fed=True)
        active = any(label.active for label in labels) or bool(params and fed)
        if active:
            self.derived.complete |= params
        return Label(rows=rows, params=frozenset() if active else params, active=active, fed=fed)

    def _problem(self, what: str, remedy: str) -> None:
        path = self.stack[-1][0] if self.stack else ""
        if all(problem.module != path for problem in self.derived.problems):
            self.derived.problems.append(Problem(what, path, remedy=remedy))

    def _random(self, path: str, label: Label) -> None:
        """A dropout on T activations must draw other numbers on each rank; S ones are covered layer by layer."""
        if label.region == "P" and self.sequence_parallel:
            self._problem(
                "draws random numbers for activations that are whole inside a region of sequence parallelism",
                "switch this dropout off, or sequence parallelism",
            )
        if label.region != "T":
            return
        if any(not user or path == user or path.startswith(user + ".") for user in self.forked_by_user):
            return
        if isinstance(self.model.get_submodule(path), nn.Dropout):
            self.derived.forked.add(path)
        else:
            self._problem(
                "draws random numbers for activations that are sharded over TP, outside of nn.Dropout",
                f'call sch["{path}"].fork_rng(), so that the ranks draw different ones',
            )

    # regions ----------------------------------------------------------------------------------------

    def _around(self) -> str | None:
        """The outermost running module below a layer; None outside of the layers and in a layer's own code."""
        if self.structure is None:
            return None
        for path, _, _ in self.stack:
            index = self.structure.index_of(path)
            if index is not None and path != self.structure.layer_path(index):
                return path
        return None

    def _want_region(self) -> bool:
        """Asks for the module around to be one TP region; False where it can't be, or is one already."""
        path = self._around()
        if path is None or path in self.regions or path in self.not_regions or not self.slots.get(path):
            return False
        self.wanted_regions.add(path)
        return True

    def _meets_inside(self, rows: frozenset[str], others: list[Label]) -> None:
        """Outside tensors meet whole ones inside a region: what rows give can stay inside, nothing else can."""
        region = f"{self._around()}."
        if rows and all(label.rows and all(row.startswith(region) for row in label.rows) for label in others):
            self.derived.rows_inside |= rows
        else:
            self._refuse_region()

    def _refuse_region(self) -> None:
        path = self._around()
        if path in self.regions:
            self.not_regions.add(path)

    def _need_sequence(self) -> None:
        """Something here needs the whole sequence."""
        if not self._want_region():
            self._problem(
                "needs the whole sequence, and gets a part of it",
                "switch sequence parallelism off for this architecture",
            )

    # modules ----------------------------------------------------------------------------------------

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.stack.append((path, args, kwargs))
        changed = self._enter_layer(path, args, kwargs)
        if changed is None and path == self._around():
            changed = self._enter_region(path, args, kwargs)
        if changed is not None:
            self.stack[-1] = (path, *changed)
        if is_experts(module):
            self.derived.experts[path] = self.label(tensors_in(self.stack[-1][1:])[0]).region
        if path in self.cuts:
            if not self.silent:
                self._enter_cut(path, args, kwargs)
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
        self.stack.pop()
        handed = {id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(output):
            if id(tensor) in handed:  # what it was given goes out again, to whoever uses it next
                self.other_uses[id(tensor)].add(path)
        if path in self.cuts:
            self.silent -= 1
            if not self.silent:
                result = tensors_in(output)[0]
                if self.cuts[path] in ("row", "vocab"):
                    self.summed_outputs[id(result)] = path
                self._set(result, self._cut_output(path, result.dim() - 1, tensors_in((args, kwargs))[0]))
        self._note_sides(path, args, kwargs, changed)
        if self.sequence_parallel and self.structure and path == self.structure.layer_path(self.structure.last):
            hidden = self.structure.slot.result(changed)
            whole = self._view(hidden, Label(active=True, fed=True))
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

    def _view(self, tensor: torch.Tensor, label: Label) -> torch.Tensor:
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
        labels = {key: self.label(v) if isinstance(v, torch.Tensor) else Label("T") for key, v in active.items()}
        known = (("R", None), ("S", Along(1)))
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
        found.update({slot: self._view(active[slot], Label("P", active=True, fed=True)) for slot in slots})
        return tuple(found[index] for index in range(len(args))), {name: found[name] for name in kwargs}

    def _leave_region(self, output: Any) -> Any:
        """Whole tensors leave a region as they were before it: split, or whole with a gradient that is, too."""
        path = self.stack[-1][0]
        if not self.slots.get(path):
            return output
        leaves, structure = torch.utils._pytree.tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self._is_inside(leaf):
                along = self._along_sequence(leaf) if self.sequence_parallel else None
                self.derived.exits[path][index] = along
                label = Label("R" if along is None else "S", active=True, fed=True, along=along)
                leaves[index] = self._view(leaf, label)
        return torch.utils._pytree.tree_unflatten(leaves, structure)

    def _leave_layers(self, output: Any) -> Any:
        """What HF's hooks recorded inside of regions is whole once the module around the layers returns it."""
        leaves, _ = torch.utils._pytree.tree_flatten_with_path(output)
        inside = [path for path, leaf in leaves if isinstance(leaf, torch.Tensor) and self._is_inside(leaf)]
        if not inside:
            return output
        around, whole = self.stack[-1][0], Label(active=True, fed=True)
        self.derived.recorded[around] = tuple(inside)
        return change_leaves(around, output, dict.fromkeys(inside, lambda leaf: self._view(leaf, whole)))

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is whole, of a region, and carries a gradient."""
        return self.label(tensor).region == "P" and tensor.is_floating_point()

    def _along_sequence(self, leaf: torch.Tensor) -> Along | None:
        """How [b, s, ...] and flattened [b*s, ...] are cut along the sequence; None for another shape."""
        if leaf.shape[:2] == self.tokens:
            return Along(1)
        return Along(0, outer=self.tokens[0]) if leaf.shape[:1] == (self.tokens.numel(),) else None

    def _as_if_region(self, output: Any) -> None:
        """What comes of a module that will be a region in the next run, so that nothing after it asks for one."""
        for tensor in tensors_in(output):
            label = self.label(tensor)
            if label.region == "S" and label.along is None and tensor.dim() > 1:
                self._set(tensor, replace(label, along=Along(1)))

    def _enter_cut(self, path: str, args: Any, kwargs: Any) -> None:
        source = tensors_in((args, kwargs))[0]
        label = self.label(source)
        cut = self.cuts[path]
        if cut == "column":
            if label.region == "T":
                self.derived.gather |= label.columns
            if label.region == "P":
                self.derived.inside.add(path)
            else:
                if label.region == "R" and self.sequence_parallel and self._in_layers(path):
                    self.derived.whole_inputs.add(path)
                self.column_calls.append(ColumnCall(path, source, list(self.stack)))
            self.kept.append(source)
        elif cut == "row" and label.region != "T":
            self.derived.scatter.add(path)
            if label.region == "P":
                self.derived.inside.add(path)
            elif self._in_layers(path) and self.sequence_parallel:
                self._problem(
                    "a row-parallel linear whose input is not sharded can't run under sequence parallelism",
                    "shard the linear before it by columns, or leave this one whole",
                )
        elif cut == "row" and label.along != Along(source.dim() - 1):
            # it takes a contiguous part of the last dimension, and nothing else
            self.derived.gather |= label.columns

    def _cut_output(self, path: str, last: int, source: torch.Tensor) -> Label:
        cut = self.cuts[path]
        split = self.sequence_parallel and self._in_layers(path)
        if cut == "column" and path not in self.gather:
            along = Along(last, components=self.components.get(path, ()))
            return Label("T", frozenset([path]), active=True, fed=True, along=along)
        if cut == "column" and self.label(source).region == "P":
            return Label("P", active=True, fed=True)
        if cut == "column" and split:
            if not self._want_region():
                self._problem(
                    "the gathered output of a column-parallel linear is whole along the sequence",
                    "pair it with a row-parallel linear, or switch sequence parallelism off",
                )
            return Label("P", active=True, fed=True)
        if path in self.rows_inside:
            return Label("P", active=True, fed=True)
        if cut == "features":
            return Label("T", frozenset([path]), active=True, fed=True, along=Along(last))
        split = split and cut == "row"
        rows = frozenset([path]) if cut == "row" else frozenset()
        # Tokens may be flattened: [b*s, h].
        place = Along(1) if last > 1 else Along(0, outer=self.tokens[0])
        return Label("S" if split else "R", rows=rows, active=True, fed=True, along=place if split else None)

    def attend(self, real: Any, module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attention is heads apart: it takes q, k and v [b, heads, s, d] that are cut along their heads."""
        operands = tensors_in((query, args, kwargs))
        label = self._join([self.label(tensor) for tensor in operands])
        if label.region == "T":
            cut = [self.label(tensor).along for tensor in operands if self.label(tensor).region == "T"]
            whole = [t for t in operands if self.label(t).region != "T" and id(t) not in self.alike]
            of_heads = [t for t in whole if t.dim() == 1 or (t.dim() == 4 and t.shape[1] > 1)]  # sinks, biases
            if any(along != Along(1) for along in cut) or of_heads:
                self.derived.gather |= label.columns
        if label.region == "S":
            self._need_sequence()
        with self._silently():
            output = real(module, query, *args, **kwargs)
        self._set(output[0], replace(label, along=Along(2) if label.region == "T" else None))
        return output

    def _in_layers(self, path: str) -> bool:
        return self.structure is not None and self.structure.index_of(path) is not None

    @contextmanager
    def _silently(self) -> Any:
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1
