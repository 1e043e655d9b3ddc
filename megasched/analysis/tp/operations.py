"""Applies operations to labels (``facts.py``), by reading a tape with a label at every tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.operators import base_of, draws, written
from megasched.analysis.recording.sites import site_of
from megasched.analysis.recording.tape import Call, Operation, Tape, TapeReader
from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.function_trials import FunctionTrials
from megasched.analysis.rules.op_call import NeedsWhole, NoRule
from megasched.analysis.tp.channels import CutChannels
from megasched.analysis.tp.facts import TpAssumptions, TpFacts, TpSpec, written_to
from megasched.analysis.tp.shared_inputs import ColumnCall
from megasched.analysis.tp.sliced_args import SlicedArgs
from megasched.definition.experts import find_experts
from megasched.errors import Problem
from megasched.language.lora import DROPOUT, A
from megasched.language.tensor_types import (
    FEATURE_SHARD,
    INVARIANT,
    ON_ALL_RANKS,
    REPLICATE,
    SEQUENCE_SHARD,
    ShardDim,
)

# Give tensors of one value, from nothing or from such a tensor: each rank can make its own part of one.
_ALIKE = frozenset(["zeros", "ones", "full", "detach"])
# Beside what is pointwise: do the same to a part of a weight as to the whole, and ask nothing of it.
_OF_ANY_PART = frozenset(["detach", "alias", "clone", "_to_copy", "t", "transpose"])


class LabelRun(TapeReader):
    """Applies operations to labels; ``Labelling`` (``calls.py``) adds calls of modules.

    Args:
        tape: tape of a definition, replacements made.
        assume: what it starts from.
        functions: results of trials of functions with their own backward, which it reuses and adds to.
    """

    def __init__(self, tape: Tape, assume: TpAssumptions, functions: FunctionTrials | None = None) -> None:
        self.tape, self.assume = tape, assume
        self.model, self.cuts, self.structure = tape.model, dict(assume.cuts), assume.structure
        self.channels = CutChannels(tape.model, assume.channels_whole)
        self.sequence_parallel = assume.sequence_parallel
        structure = assume.structure
        self.layers = set(structure.layer_paths()) if assume.sequence_parallel and structure else set()
        self.gather, self.regions = assume.gather, assume.regions
        self.not_regions = set(assume.not_regions)
        self.wanted_regions: set[str] = set()
        self.parts = SlicedArgs(assume.parts)
        self.tp_facts = TpFacts()
        self.labels: dict[int, TpSpec] = {}
        self.stack: list[Call] = []
        self.slots: dict[str, tuple[int | str, ...]] = {}
        self.column_calls: list[ColumnCall] = []
        self.origins: dict[int, int] = {}  # id of an alias -> id of what it is one of
        self.other_uses: dict[int, set[str]] = defaultdict(set)  # by ``origin``
        self.cut_outputs: dict[int, str] = {}  # id of a tensor -> path of what is cut and gave it
        self.written: dict[int, TpSpec] = {}  # root of a tensor of which a view was written to -> what was
        self.roots: dict[int, int] = {}  # id of a tensor -> its root, where that is not the tensor it is a view of
        self.tokens = torch.Size((1, 1))
        self.alike: dict[int, int] = {}  # id of a tensor that has one value everywhere -> its number
        self._numbers = count()
        self.silent = 0  # calls of what is cut that have not ended, and of attention and the loss
        self.functions = functions or FunctionTrials()
        self.packing = 0
        # Id of a parameter, or what is made of it -> the module that it is of, which is cut or may be.
        self.weights: dict[int, str] = self.channels.weights()
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            self._set(parameter, TpSpec(params=frozenset([name])))
        self.experts = set(find_experts(self.model))
        for path, module in self.model.named_modules():
            if path in self.cuts or path in self.experts:
                self.weights.update((id(parameter), path) for parameter in module.parameters(recurse=False))

    # labels -----------------------------------------------------------------------------------------

    def label(self, tensor: torch.Tensor) -> TpSpec:
        found = self.labels.get(id(tensor), TpSpec())
        if self.written and (written := self.written.get(self._root(tensor))) is not None:
            return written_to(found, written)
        return found

    def origin(self, tensor: torch.Tensor) -> int:
        """Returns an id that a tensor and its aliases share."""
        return self.origins.get(id(tensor), id(tensor))

    def _pass_on(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """Copies all that is known of a tensor to its alias."""
        self.origins[id(alias)] = self.origin(source)
        self.labels[id(alias)] = self.labels.get(id(source), TpSpec())
        for known in (self.alike, self.cut_outputs, self.weights, self.roots):
            if id(source) in known:
                known[id(alias)] = known[id(source)]
        self.parts.pass_on(source, alias)

    def _set(self, tensor: torch.Tensor, label: TpSpec) -> None:
        self.labels[id(tensor)] = label
        if label.type == FEATURE_SHARD and label.along is not None:
            place = label.along
            lengths = place.components or (tensor.shape[place.dim] // place.outer,)
            parts = place.heads or (0,) * len(lengths)
            cut = {length for length, part in zip(lengths, parts, strict=True) if not part}
            for column in label.columns:
                self.tp_facts.cut_sizes[column] |= cut
            if label.along.dim != tensor.dim() - 1:
                self.tp_facts.by_heads |= label.columns

    def operation(self, operation: Operation) -> None:
        if self.silent:
            return
        func, args, kwargs = operation.func, operation.args, operation.kwargs
        operands, outputs = operation.operands, operation.outputs
        joined = self._join([self.label(t) for t in operands], operation)
        path = self._path()
        for tensor in operands:
            if not (self._in_adapter_of_column(path) and self.label(tensor).type == SEQUENCE_SHARD):
                self._use(tensor)
        self._meet(operands)
        if self.packing and joined.type in (FEATURE_SHARD, SEQUENCE_SHARD):
            self._refuse_packing()
        changed = written(func, args, kwargs)
        for tensor in changed:
            for held in (tensor, base_of(tensor)):
                if id(held) in self.cut_outputs:
                    self.tp_facts.overwritten.add(self.cut_outputs[id(held)])
        self._watch_weights(func, operands, outputs)
        if func.__name__.split(".")[0] in _ALIKE and all(id(tensor) in self.alike for tensor in operands):
            number = self.alike[id(operands[0])] if operands else next(self._numbers)
            self.alike.update((id(tensor), number) for tensor in outputs)
        for tensor in changed:
            self.alike.pop(id(tensor), None)
            self.alike.pop(id(base_of(tensor)), None)
        for tensor, along in zip(outputs, self._follow(operation, joined), strict=True):
            on_all = along == ON_ALL_RANKS
            self._set(tensor, replace(joined, type=REPLICATE) if on_all else replace(joined, along=along))
            for source in operands if self.roots else ():
                if id(source) in self.roots and base_of(source) is base_of(tensor):
                    self.roots[id(tensor)] = self.roots[id(source)]
        for tensor in changed:
            self._write_through(tensor)
        if draws(func, args, kwargs):
            self._random(path, joined)

    def _path(self) -> str:
        """Returns the path of the module that runs; empty for the model's own code."""
        return self.stack[-1].path if self.stack else ""

    def _use(self, tensor: torch.Tensor) -> None:
        """Notes that all running modules use a tensor."""
        self.other_uses[self.origin(tensor)].update(call.path for call in self.stack)

    def _follow(self, operation: Operation, joined: TpSpec) -> list[ShardDim | None]:
        """Returns how the outputs are cut, and gathers operands that the operation needs whole."""
        func, args, kwargs, outputs = operation.func, operation.args, operation.kwargs, operation.outputs
        if joined.type not in (FEATURE_SHARD, SEQUENCE_SHARD):
            self.parts.follow(func, args, kwargs, operation.operands, outputs)
            return [None] * len(outputs)
        try:
            found = follow(func, args, kwargs, outputs, lambda tensor: self.label(tensor).along)
            if joined.type == SEQUENCE_SHARD and any(along and along.components for along in found):
                raise NeedsWhole  # two sequences, one after the other
            needed = "gives shards that can't be followed" if found else "asks for a number"
        except NeedsWhole as needs:
            found = None
            needed = "has no rule" if isinstance(needs, NoRule) else "needs the whole"
            if isinstance(needs, NoRule) and joined.type == FEATURE_SHARD:
                self.tp_facts.without_rule[str(func)].add(self._path())
            if joined.type == FEATURE_SHARD and self.parts.want(needs.met, joined.columns, self._around()):
                return [None] * len(outputs)
        # What gives no tensor asks for a number, which each rank would answer by its part.
        if not found or any(along is None for along in found):
            if joined.type == FEATURE_SHARD:
                self._gather(joined.columns, f"{_reader(operation)} {needed}")
            else:
                self._need_sequence()
        return found or [None] * len(outputs)

    def _gather(self, columns: Iterable[str], why: str) -> None:
        """Has the outputs of columns gathered; the first reason for each of them stays."""
        for column in columns:
            self.tp_facts.gather.setdefault(column, why)

    def _meet(self, tensors: Iterable[torch.Tensor]) -> None:
        for name in (self.names[id(tensor)] for tensor in tensors if id(tensor) in self.names):
            self.tp_facts.readers[name].add(self._path())

    def _watch_weights(self, func: Any, operands: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Notes weights that are cut, and are read by code other than their own module's.

        A rank has a part of such a weight, and only that module's code is made to know it.
        """
        read = {self.weights[id(tensor)] for tensor in operands if id(tensor) in self.weights}
        if not read:
            return
        alone = len({id(tensor) for tensor in operands}) == 1
        if alone and (torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _OF_ANY_PART):
            self.weights.update((id(tensor), min(read)) for tensor in outputs)
            return
        running = [call.path for call in self.stack]
        for path in read.difference(running):
            self.tp_facts.read_elsewhere.setdefault(path, running[-1] if running else "")

    def _write_through(self, tensor: torch.Tensor) -> None:
        """Gives the label of a view that was written to also to its base and all the base's views."""
        root, given = self._root(tensor), self.labels.get(id(tensor), TpSpec())
        if base_of(tensor) is not tensor and (given.active or given.fed):
            before = self.written.get(root)
            self.written[root] = given if before is None else written_to(before, given)

    def _root(self, tensor: torch.Tensor) -> int:
        """Returns an id that tensors share where what is written into one of them all of them may have."""
        return self.roots.get(id(tensor), id(base_of(tensor)))

    def _set_anew(self, tensor: torch.Tensor, label: TpSpec) -> None:
        """Labels what ranks have as a tensor of its own, where the trial has a view of what came before."""
        self._set(tensor, label)
        self.roots[id(tensor)] = id(tensor)

    def _join(self, labels: list[TpSpec], operation: Operation | None = None) -> TpSpec:
        """Returns the label of what an operation, or attention, makes of operands with these labels."""
        types = {label.type for label in labels}
        params = frozenset().union(*(label.params for label in labels))
        fed = any(label.fed for label in labels)
        whole = any(label.active and label.type == INVARIANT for label in labels)
        rows = frozenset().union(*(label.rows for label in labels))
        if FEATURE_SHARD in types:
            columns = frozenset().union(*(label.columns for label in labels))
            self.tp_facts.partial |= params
            if (whole or SEQUENCE_SHARD in types) and not self._want_region():
                self._gather(columns, f"{_reader(operation)} combines it with a whole activation")
            return TpSpec(FEATURE_SHARD, columns, active=True, fed=True)
        if REPLICATE in types:
            self.tp_facts.partial |= params
            columns = frozenset().union(*(label.columns for label in labels))
            outside = self.structure is not None and not any(self._in_layers(call.path) for call in self.stack)
            if outside and not columns:
                self._problem(
                    "a tensor from inside of a tensor-parallel region is read after the layers, which were not "
                    "handed it out",
                    "have the modules return it, or leave the region's linears whole",
                )
            if (whole or SEQUENCE_SHARD in types) and columns:
                self._gather(columns, f"{_reader(operation)} combines it with a whole activation")
            elif whole or SEQUENCE_SHARD in types:
                self._meets_inside(
                    rows,
                    [label for label in labels if label.active and label.type in (INVARIANT, SEQUENCE_SHARD)],
                )
            return TpSpec(REPLICATE, columns, active=True, fed=True)
        if SEQUENCE_SHARD in types:
            self.tp_facts.sequence |= params
            if whole and not self._want_region():
                self._problem(
                    "a whole activation meets one that is split along the sequence",
                    "switch sequence parallelism off for this architecture",
                )
            return TpSpec(SEQUENCE_SHARD, rows=rows, active=True, fed=True)
        active = any(label.active for label in labels)
        if params and fed and not active:
            if self._around() in self.tp_facts.needed_regions:  # of ids: what is made of it here leaves in parts
                self.tp_facts.partial |= params
                return TpSpec(REPLICATE, active=True, fed=True)
            active = True
        if active:
            self.tp_facts.complete |= params
        return TpSpec(rows=rows, params=frozenset() if active else params, active=active, fed=fed)

    def _problem(self, what: str, remedy: str) -> None:
        self._problem_at(self._path(), what, remedy)

    def _problem_at(self, path: str, what: str, remedy: str) -> None:
        if all(problem.module != path for problem in self.tp_facts.problems):
            self.tp_facts.problems.append(Problem(what, path, remedy=remedy))

    def _random(self, path: str, label: TpSpec) -> None:
        """Marks a dropout on a FEATURE_SHARD, which must draw other numbers on each rank.

        Dropouts on SEQUENCE_SHARDs are covered layer by layer.
        """
        if label.type == REPLICATE and self.sequence_parallel:
            self._problem(
                "draws random numbers for activations that are whole inside a region of sequence parallelism",
                "switch this dropout off, or sequence parallelism",
            )
        if label.type != FEATURE_SHARD:
            return
        if any(not user or path == user or path.startswith(user + ".") for user in self.assume.forked_by_user):
            return
        if isinstance(self.model.get_submodule(path), nn.modules.dropout._DropoutNd):
            self.tp_facts.forked.add(path)
        else:
            self._problem(
                "draws random numbers for activations that are sharded over TP, outside of nn.Dropout",
                f'call sch["{path}"].fork_rng(), so that the ranks draw different ones',
            )

    def _refuse_packing(self) -> None:
        self._problem(
            "its hooks on tensors that are saved for the backward pass (saved_tensors_hooks) get parts of them",
            "run it without TP",
        )

    # regions ----------------------------------------------------------------------------------------

    def _around(self) -> str | None:
        """Returns the outermost running module below a layer; None outside of layers and in a layer's own code."""
        if self.structure is None:
            return None
        return next((call.path for call in self.stack if self.structure.is_below_layer(call.path)), None)

    def want_lengths(self, entered: Container[str]) -> None:
        """Asks for regions around columns whose output is viewed as heads.

        Such code reads the length of the sequence off its module's input. So that module must be a region, where
        the whole sequence comes in at its entry.

        Args:
            entered: columns that read a tensor which enters TP at a module around them.
        """
        settled = {*self.gather, *self.tp_facts.gather, *self.tp_facts.inside, *self.tp_facts.whole_inputs}
        columns = {path for path in self.tp_facts.by_heads - settled if self.cuts[path] == "column"}
        for column in sorted(columns):
            index = None if self.structure is None else self.structure.index_of(column)
            of_adapter = column.rpartition(".")[0] in self.cuts  # its linear's output is what is viewed
            if column in entered or of_adapter or self.structure is None or index is None:
                continue
            layer = self.structure.layer_path(index)
            path = f"{layer}.{column.removeprefix(f'{layer}.').partition('.')[0]}"
            if path in self.regions:
                continue
            if path == column or not self._ask_for(path):
                self._problem(
                    f"what {column} gives is viewed as heads, by a length that is read off a part of the sequence",
                    "switch sequence parallelism off for this architecture",
                )

    def _want_region(self) -> bool:
        """Asks for the module around to be one TP region; False where it can't be, or is one already."""
        return self._ask_for(self._around())

    def _ask_for(self, path: str | None) -> bool:
        if path is None or path in self.regions or path in self.not_regions or not self.slots.get(path):
            return False
        self.wanted_regions.add(path)
        return True

    def _meets_inside(self, rows: frozenset[str], others: list[TpSpec]) -> None:
        """Handles tensors from outside that meet whole ones inside a region.

        Outputs of rows can stay inside. With any other tensor, the module can't be a region.
        """
        path = self._around()
        region = f"{path}."
        if rows and all(label.rows and all(row.startswith(region) for row in label.rows) for label in others):
            self.tp_facts.rows_inside |= rows
        elif path in self.regions:
            self.not_regions.add(path)

    def _need_sequence(self) -> None:
        """Asks for a region, where code needs the whole sequence, or else reports a problem."""
        if not self._want_region():
            self._problem(
                "needs the whole sequence, and gets a part of it",
                "switch sequence parallelism off for this architecture",
            )

    def _in_adapter_of_column(self, path: str) -> bool:
        """Returns whether a column's adapter runs its first part, which takes its share of the gathered input."""
        column, _, part = path.rpartition(".")
        return part in (A, DROPOUT) and self.cuts.get(column) == "column"

    def _in_layers(self, path: str) -> bool:
        return self.structure is not None and self.structure.index_of(path) is not None


def _reader(operation: Operation | None) -> str:
    """Returns an operation's name, and its line if the tape has lines; attention where there is none."""
    if operation is None:
        return "attention"
    site = site_of(operation.lines)
    return str(operation.func) if site is None else f"{operation.func} ({site})"
