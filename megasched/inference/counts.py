"""Attributes by which a module counts heads or features, found by trial: with what columns hand out on one rank,
its operations must give what the labelled run says that one rank has."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from megasched.linears import output_axis
from megasched.lowering.local_attributes import local_count
from megasched.lowering.propagate import recorded_calls
from megasched.roles import Cut
from megasched.trial.dims import Along
from megasched.trial.labelling import Labelling
from megasched.trial.labels import Label
from megasched.trial.meta_call import (
    DefaultScalars,
    call_hooks,
    meta_copy,
    run_on_meta,
    tensors_in,
)
from megasched.trial.parts import Argument, Part
from megasched.trial.structure import Structure

# So many attributes at most must be divided together.
_AT_MOST = 3
# Which layer a module is of, as HF calls it: no count, and other than that all layers may be the same.
_PLACES = frozenset(["layer_idx", "layer_id", "layer_number", "block_idx"])
# They say nothing of shapes, and are not always there: a reshape copies where it can give no view, which may be
# otherwise for one head of several; whether a new constant is detached depends on the modes that are on.
_SAME = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)


@dataclass
class _Call:
    """One call of a module in the labelled run: its arguments, and the shapes that one rank's operations give."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)


class _Spans(Labelling):
    """A labelled run that keeps, for each module whose own code works on shards, what it does."""

    def __init__(self, tp: int, *known: Any, **more: Any) -> None:
        super().__init__(*known, **more)
        self.tp = tp
        self.open: list[_Call] = []
        self.calls: dict[str, _Call] = {}

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        changed = super().before(path, module, args, kwargs)
        args, kwargs = changed if changed is not None else (args, kwargs)
        self.open.append(_Call(self._local((args, kwargs))[0], self._local((args, kwargs))[1]))
        return changed

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        call = self.open.pop()
        if call.columns:
            self.calls.setdefault(path, call)
        return super().after(path, module, output)

    def _set(self, tensor: torch.Tensor, label: Label) -> None:
        super()._set(tensor, label)
        if getattr(self, "open", None) and label.region == "T":
            self.open[-1].columns |= label.columns

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.silent and func not in _SAME:
            shapes = [self._local_shape(tensor) for tensor in tensors_in(output)]
            for call in self.open:
                call.shapes += shapes
        return output

    def _local_shape(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """The shape on one rank; None where it is not known."""
        label = self.label(tensor)
        if label.region != "T":
            # What is expanded was made as large as another tensor, which may be cut.
            expanded = any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            return None if expanded else tuple(tensor.shape)
        if label.along is None:
            return None
        shape = list(tensor.shape)
        shape[label.along.dim] = label.along.on_rank(shape[label.along.dim], self.tp)
        return tuple(shape)

    def _local(self, value: Any) -> Any:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            shape = self._local_shape(tensor)
            same = shape is None or shape == tuple(tensor.shape)
            return tensor if same else torch.empty(shape, dtype=tensor.dtype, device="meta")

        with self._silently():
            return torch.utils._pytree.tree_map_only(torch.Tensor, local, value)


@dataclass(frozen=True)
class _Rank:
    """What one rank has of each linear, and of what a module counts."""

    tp: int
    cuts: Mapping[str, Cut]
    components: Mapping[str, tuple[int, ...]]
    heads: Mapping[str, tuple[int, ...]]

    def sizes(self, path: str, linear: nn.Module) -> tuple[int, int]:
        """(features that the linear at ``path`` hands out, and takes)."""
        axis = output_axis(linear)
        out, taken = linear.weight.shape[axis], linear.weight.shape[1 - axis]
        if self.cuts[path] == "row":
            return out, taken // self.tp
        along = Along(0, components=self.components.get(path, ()), heads=self.heads.get(path, ()))
        return along.on_rank(out, self.tp), taken

    def count(self, path: str, whole: int) -> int | None:
        """What a rank has of a count of the module at ``path``; None where it can have no part of it."""
        replicated = {n for inner, heads in self.heads.items() if inner.startswith(f"{path}.") for n in heads if n}
        return local_count(whole, self.tp, replicated)


class _Mismatch(Exception):
    """A module does not do on a rank what it must."""


class _Replay(DefaultScalars):
    """One module's forward with a rank's tensors; every operation is compared with what it must give."""

    def __init__(self, expected: list[tuple[int, ...] | None]) -> None:
        super().__init__()
        self.expected, self.done, self.silent = expected, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.silent and func not in _SAME:
            for tensor in tensors_in(output):
                if self.done == len(self.expected):
                    raise _Mismatch
                wanted = self.expected[self.done]
                self.done += 1
                if wanted is not None and wanted != tuple(tensor.shape):
                    raise _Mismatch
        return output


def find_counts(
    model: nn.Module,
    structure: Structure,
    cuts: Mapping[str, Cut],
    components: Mapping[str, tuple[int, ...]],
    heads: Mapping[str, tuple[int, ...]],
    parts: Mapping[Argument, Part],
    tp: int,
    inferred: set[str],
) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Attributes that must be divided by TP, by module; and columns for which nothing helps.

    Args:
        cuts: path -> how the linear there is cut; nothing of it needs to be gathered.
        heads: columns with fewer heads than ranks; see ``propagate``.
        parts: arguments of which each rank takes its part.
        inferred: columns and rows to look at; what others have decided is theirs to know.
    """
    probe = meta_copy(model)
    known = (structure, False, frozenset(), frozenset(), components)
    run = _Spans(tp, probe, cuts, *known, parts=parts, heads=heads)
    for tensor in tensors_in(structure.trial_inputs()):
        run._set(tensor, Label(fed=True))
    with recorded_calls(probe, run, takes_shards=True), call_hooks(probe, run.before, run.after):
        run_on_meta(probe, structure.trial_inputs(), run)
    found: dict[str, tuple[str, ...]] = {}
    hopeless: set[str] = set()
    seen: dict[Any, tuple[str, ...] | None] = {}
    rank = _Rank(tp, cuts, components, heads)
    for path, call in run.calls.items():
        module = probe.get_submodule(path)
        if path in cuts or not call.columns & inferred or not _own_code(structure, path):
            continue
        kind = (type(module), tuple(sorted(_candidates(module).items())), tuple(call.shapes))
        if kind not in seen:
            seen[kind] = _attributes(module, path, call, rank)
        names = seen[kind]
        if names is None:
            hopeless |= call.columns
        elif names:
            found[path] = names
    return found, hopeless


def _own_code(structure: Structure, path: str) -> bool:
    """Whether a module lies below a layer: layers and what is around them only hand things on."""
    index = structure.index_of(path)
    return index is not None and path != structure.layer_path(index)


def _candidates(module: nn.Module) -> dict[str, int]:
    """Attributes that may count heads or features: integers of a module, and of its config."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 1}
    own = {name: value for name, value in numbers.items() if name not in _PLACES}
    config = vars(module).get("config")
    fields = vars(config) if config is not None else {}
    counted = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "hidden_size")
    return {**own, **{f"config.{name}": fields[name] for name in counted if type(fields.get(name)) is int}}


def _attributes(module: nn.Module, path: str, call: _Call, rank: _Rank) -> tuple[str, ...] | None:
    """The fewest attributes that, divided by TP, make a module do what it must; None where none do."""
    counts = {name: rank.count(path, value) for name, value in _candidates(module).items()}
    local = {name: count for name, count in counts.items() if count is not None}
    for number in range(_AT_MOST + 1):
        for chosen in combinations(local, number):
            with _divided(module, {name: local[name] for name in chosen}), _local_linears(module, path, rank):
                if _fits(module, path, call, rank.cuts):
                    return chosen
    return None


@contextmanager
def _divided(module: nn.Module, counts: Mapping[str, int]) -> Iterator[None]:
    before = dict(vars(module))
    if any(name.startswith("config.") for name in counts):
        module.config = copy.copy(module.config)
    for name, count in counts.items():
        owner = module.config if name.startswith("config.") else module
        setattr(owner, name.removeprefix("config."), count)
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


@contextmanager
def _local_linears(module: nn.Module, path: str, rank: _Rank) -> Iterator[None]:
    """Linears inside hand out, and take, what they do on one rank."""
    changed = []
    for inner, linear in module.named_modules():
        full = f"{path}.{inner}" if inner else path
        if rank.cuts.get(full) not in ("column", "row"):
            continue
        features, taken = rank.sizes(full, linear)

        def forward(x: torch.Tensor, features: int = features, taken: int = taken) -> torch.Tensor:
            if x.shape[-1] != taken:
                raise _Mismatch
            return torch.empty(*x.shape[:-1], features, dtype=x.dtype, device="meta")

        linear.forward = forward
        changed.append(linear)
    try:
        yield
    finally:
        for linear in changed:
            del linear.forward


def _fits(module: nn.Module, path: str, call: _Call, cuts: Mapping[str, Cut]) -> bool:
    from megasched.lowering import attention

    replay = _Replay(call.shapes)
    real = attention.attention_forward

    def silently(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        replay.silent += 1
        sinks = kwargs.get("s_aux")
        if sinks is not None and sinks.dim() == 1:  # of which a rank takes those of its heads
            kwargs["s_aux"] = sinks[: query.shape[1]]
        try:
            return real(module, query, *args, **{**kwargs, "dropout": 0.0})
        finally:
            replay.silent -= 1

    def before(inner: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        replay.silent += (f"{path}.{inner}" if inner else path) in cuts

    def after(inner: str, child: nn.Module, output: Any) -> None:
        replay.silent -= (f"{path}.{inner}" if inner else path) in cuts

    try:
        with (
            attention.stand_in(silently),
            call_hooks(module, before, after),
            torch.no_grad(),
            torch.device("meta"),
            replay,
        ):
            module(*call.args, **call.kwargs)
    except Exception:  # whatever a forward raises over shapes that do not fit
        return False
    return replay.done == len(replay.expected)
