"""Which linears feed which: one run on meta in which every tensor knows the linears it stems from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from megasched.analysis.meta_call import ScalarAnswers, call_hooks, meta_copy, run_on_meta, tensors_in
from megasched.analysis.structure import LayerStack
from megasched.definition.linears import is_linear, output_axis


@dataclass
class Flow:
    """What one run showed of the linears inside the layers.

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


class _FlowRun(ScalarAnswers):
    def __init__(self, model: nn.Module, watched: dict[str, nn.Module]) -> None:
        super().__init__()
        self.flow = Flow()
        self.watched = watched
        self.stems: dict[int, _Stem] = {}
        self.kept: list[torch.Tensor] = []
        self.cuts_at: dict[str, set[int]] = defaultdict(set)
        self.silent = 0

    def stem(self, tensor: torch.Tensor) -> _Stem:
        return self.stems.get(id(tensor), _Stem())

    def _set(self, tensor: torch.Tensor, stem: _Stem) -> None:
        self.stems[id(tensor)] = stem
        self.kept.append(tensor)

    def carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().carry_out(func, args, kwargs)
        if self.silent:
            return output
        stems = [self.stem(tensor) for tensor in tensors_in((args, kwargs))]
        joined = _Stem(frozenset().union(*(s.linears for s in stems)), any(s.bypasses for s in stems))
        for tensor in tensors_in(output):
            self._set(tensor, joined)
        if isinstance(func, torch._ops.OpOverload) and func.overloadpacket.__name__ in _SPLITS:
            self._note_split(args[0], tensors_in(output), func, args, kwargs)
        return output

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

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if path in self.watched:
            source = self.stem(tensors_in((args, kwargs))[0])
            self.flow.feeds.setdefault(path, set()).update(source.linears)
            if source.bypasses:
                self.flow.mixed.add(path)
            self.silent += 1

    def after(self, path: str, module: nn.Module, output: Any) -> None:
        if path in self.watched:
            self.silent -= 1
            self._set(tensors_in(output)[0], _Stem(frozenset([path])))


def linears_in(model: nn.Module, structure: LayerStack) -> dict[str, nn.Module]:
    """Every linear inside the layers."""
    prefix = structure.layers + "."
    return {path: m for path, m in model.named_modules() if path.startswith(prefix) and is_linear(m)}


def watch_flow(model: nn.Module, structure: LayerStack) -> Flow:
    """Runs a causal language model once on meta.

    Args:
        model: the definition.
        structure: where its layers are; the flow begins anew in each.
    """
    probe = meta_copy(model)
    watched = linears_in(probe, structure)
    run = _FlowRun(probe, watched)
    starts = set(structure.layer_paths())

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if path in starts:
            run._set(structure.slot.get(args, kwargs), _Stem(bypasses=True))
        run.before(path, module, args, kwargs)

    with call_hooks(probe, before, run.after):
        run_on_meta(probe, structure.trial_inputs(), run)
    for path, places in run.cuts_at.items():
        module = watched[path]
        bounds = sorted(places | {0, module.weight.shape[output_axis(module)]})
        run.flow.components[path] = tuple(stop - start for start, stop in pairwise(bounds))
    return run.flow


@dataclass
class Group:
    """Columns and the row that takes what stems from them."""

    columns: set[str]
    row: str

    @property
    def members(self) -> set[str]:
        return {self.row, *self.columns}


def find_groups(flow: Flow, taken: Callable[[str], bool]) -> list[Group]:
    """Columns with their row, none in two parts; the later row has the first say.

    Args:
        taken: linears that something else has decided on.
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
