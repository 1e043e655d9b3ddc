"""Finds which linears feed which, by following the linears that every tensor of a tape stems from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.tape import Call, Operation, Tape, TapeReader
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.definition.linears import is_linear, output_axis


@dataclass
class Flow:
    """Describes how the linears inside the layers feed each other in one run.

    Attributes:
        feeds: linear, in the order of the calls -> the linears its input stems from with no other between.
        mixed: linears whose input also stems from an activation that went through no linear (a residual).
        components: linear -> sizes of the parts that its output is split into, where it is.
    """

    feeds: dict[str, set[str]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    components: dict[str, tuple[int, ...]] = field(default_factory=dict)


_SPLITS = frozenset(["split", "split_with_sizes", "slice"])


@dataclass(frozen=True)
class _Stem:
    linears: frozenset[str] = frozenset()
    bypasses: bool = False


class _LinearFlow(TapeReader):
    def __init__(self, watched: dict[str, nn.Module], structure: LayerStack) -> None:
        self.flow = Flow()
        self.watched, self.structure = watched, structure
        self.starts = frozenset(structure.layer_paths())
        self.stems: dict[int, _Stem] = {}
        self.cuts_at: dict[str, set[int]] = defaultdict(set)
        self.inside = 0  # calls of linears that have not ended

    def stem(self, tensor: torch.Tensor) -> _Stem:
        return self.stems.get(id(tensor), _Stem())

    def operation(self, operation: Operation) -> None:
        if self.inside:
            return
        stems = [self.stem(tensor) for tensor in operation.operands]
        joined = _Stem(frozenset().union(*(s.linears for s in stems)), any(s.bypasses for s in stems))
        self.stems.update((id(tensor), joined) for tensor in operation.outputs)
        func = operation.func
        if isinstance(func, torch._ops.OpOverload) and func.overloadpacket.__name__ in _SPLITS:
            self._note_split(operation.args[0], operation.outputs, func, operation.args, operation.kwargs)

    def _note_split(self, x: torch.Tensor, outputs: list[torch.Tensor], func: Any, args: Any, kwargs: Any) -> None:
        linears = self.stem(x).linears
        if len(linears) != 1 or any(out.shape[:-1] != x.shape[:-1] for out in outputs):
            return
        (path,) = linears
        module = self.watched[path]
        if x.shape[-1] != module.weight.shape[output_axis(module)]:
            return
        start = 0
        if func.overloadpacket.__name__ == "slice":
            start = (args[2] if len(args) > 2 else kwargs.get("start")) or 0
            start += x.shape[-1] if start < 0 else 0
        for out in outputs:
            self.cuts_at[path] |= {start, start + out.shape[-1]}
            start += out.shape[-1]

    def enter(self, call: Call) -> None:
        self.stems.update((id(alias), self.stem(source)) for source, alias in call.entered)
        if call.path in self.starts:
            self.stems[id(self.structure.slot.get(call.args, call.kwargs))] = _Stem(bypasses=True)
        if call.path in self.watched:
            source = self.stem(tensors_in((call.args, call.kwargs))[0])
            self.flow.feeds.setdefault(call.path, set()).update(source.linears)
            if source.bypasses:
                self.flow.mixed.add(call.path)
            self.inside += 1

    def leave(self, call: Call) -> None:
        if call.path in self.watched:
            self.inside -= 1
            self.stems[id(tensors_in(call.output)[0])] = _Stem(frozenset([call.path]))
        self.stems.update((id(alias), self.stem(source)) for source, alias in call.exited)


def linears_in(model: nn.Module, structure: LayerStack) -> dict[str, nn.Module]:
    """Returns every linear inside the layers, by path."""
    prefix = structure.layers + "."
    return {path: m for path, m in model.named_modules() if path.startswith(prefix) and is_linear(m)}


def linear_flow(tape: Tape, structure: LayerStack) -> Flow:
    """Returns how linears feed each other in a forward of a causal language model.

    Args:
        tape: tape of the definition.
        structure: where its layers are; the flow begins anew in each.
    """
    watched = linears_in(tape.model, structure)
    reader = _LinearFlow(watched, structure)
    tape.read(reader)
    for path, places in reader.cuts_at.items():
        module = watched[path]
        bounds = sorted(places | {0, module.weight.shape[output_axis(module)]})
        reader.flow.components[path] = tuple(stop - start for start, stop in pairwise(bounds))
    return reader.flow


@dataclass
class Group:
    """Holds columns, and the row whose input stems from them."""

    columns: set[str]
    row: str

    @property
    def members(self) -> set[str]:
        return {self.row, *self.columns}


def find_groups(flow: Flow, taken: Callable[[str], bool]) -> list[Group]:
    """Returns groups of columns with their row, none in two groups; later rows choose first.

    Args:
        taken: returns whether a linear already has a role.
    """
    found: list[Group] = []
    used: set[str] = set()
    for row in reversed(flow.feeds):
        columns = set(flow.feeds[row])
        group = Group(columns, row)
        if not columns or row in flow.mixed or group.members & used or any(map(taken, group.members)):
            continue
        found.append(group)
        used |= group.members
    return found
