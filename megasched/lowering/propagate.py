"""Where activations are sharded, and what follows from it: derived from one run on meta, never from names.

The schedule says which linears and embeddings are cut. One forward of the definition, each tensor carrying
a label, tells the rest: which replicated parameters meet sharded activations (their gradients are partial
and must be summed over TP), which outputs must be gathered because nothing downstream can take a shard,
where a TP region begins, which dropouts must differ between ranks.

Labels: ``R`` the same on all TP ranks, ``S`` split along the sequence, ``T`` split along features or heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from megasched.errors import Problem
from megasched.lowering.dims import Along, NeedsWhole, follow
from megasched.lowering.entries import ColumnCall, columns_that_share, find_entries
from megasched.lowering.lookup import watch_lookups
from megasched.lowering.meta_call import DefaultScalars, call_hooks, run_on_meta, tensors_in
from megasched.lowering.structure import Structure
from megasched.roles import Cut

_RANDOM = ("dropout", "bernoulli", "rand", "normal_", "uniform_")


@dataclass(frozen=True)
class Label:
    """What is known of one tensor.

    Attributes:
        region: R, S or T.
        columns: paths of the column linears that a T tensor stems from.
        along: how a T tensor is cut; None where that could not be followed.
        params: replicated parameters that a tensor is made of, as long as no activation is.
        active: depends on the model's input through parameters, so that it carries a gradient.
        fed: depends on the model's input.
    """

    region: Literal["R", "S", "T"] = "R"
    columns: frozenset[str] = frozenset()
    params: frozenset[str] = frozenset()
    active: bool = False
    fed: bool = False
    along: Along | None = None


@dataclass
class Derived:
    """What one run told.

    Attributes:
        gather: column linears whose output must be gathered.
        scatter: row linears whose input is whole and must be cut.
        partial: replicated parameters whose gradient is partial because they meet T activations.
        sequence: replicated parameters whose gradient is partial because they meet S activations.
        regions: module path -> argument slot values: where a TP region begins for several columns at once.
        shared: columns in one module that read the very same tensor.
        forked: ``nn.Dropout`` modules on T activations.
        attention: attention module path -> (query heads, whether they are T).
        problems: what can't be made right.
    """

    gather: set[str] = field(default_factory=set)
    scatter: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    sequence: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    regions: dict[str, tuple[int | str, tuple[str, ...]]] = field(default_factory=dict)
    shared: list[tuple[str, ...]] = field(default_factory=list)
    forked: set[str] = field(default_factory=set)
    attention: dict[str, tuple[int, bool]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Propagation(DefaultScalars):
    """The labelling run. A dispatch mode, so that it also sees what custom autograd functions do."""

    def __init__(
        self,
        model: nn.Module,
        cuts: Mapping[str, Cut],
        structure: Structure | None,
        sequence_parallel: bool,
        gather: frozenset[str],
        forked_by_user: frozenset[str],
        components: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.model, self.cuts, self.structure = model, cuts, structure
        self.components = components
        self.sequence_parallel = sequence_parallel
        self.gather = gather
        self.forked_by_user = forked_by_user
        self.derived = Derived()
        self.labels: dict[int, Label] = {}
        self.kept: list[torch.Tensor] = []
        self.stack: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.column_calls: list[ColumnCall] = []
        self.other_uses: dict[int, set[str]] = defaultdict(set)
        self.silent = 0
        for name, parameter in model.named_parameters():
            self._set(parameter, Label(params=frozenset([name])))

    # labels -----------------------------------------------------------------------------------------

    def label(self, tensor: torch.Tensor) -> Label:
        return self.labels.get(id(tensor), Label())

    def _set(self, tensor: torch.Tensor, label: Label) -> None:
        self.labels[id(tensor)] = label
        self.kept.append(tensor)  # keeps the id from being given to another tensor

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
        outputs = tensors_in(output)
        for tensor, along in zip(outputs, self._follow(func, args, kwargs or {}, outputs, joined), strict=True):
            self._set(tensor, replace(joined, along=along))
        if any(word in func.__name__ for word in _RANDOM):
            self._random(path, joined)
        return output

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], joined: Label
    ) -> list[Along | None]:
        """How the outputs are cut; columns that the operation needs whole are gathered."""
        if joined.region == "T":
            try:
                return follow(func, args, kwargs, outputs, lambda tensor: self.label(tensor).along)
            except NeedsWhole:
                self.derived.gather |= joined.columns
        return [None] * len(outputs)

    def _join(self, labels: list[Label]) -> Label:
        """The label of what an operation makes of its operands."""
        sharded = [label for label in labels if label.region == "T"]
        split = [label for label in labels if label.region == "S"]
        params = frozenset().union(*(label.params for label in labels))
        fed = any(label.fed for label in labels)
        if sharded:
            columns = frozenset().union(*(label.columns for label in sharded))
            self.derived.partial |= params
            if any(label.active and label.region != "T" for label in labels):
                self.derived.gather |= columns
            return Label("T", columns, active=True, fed=True)
        if split:
            self.derived.sequence |= params
            if any(label.active and label.region == "R" for label in labels):
                self._problem(
                    "a whole activation meets one that is split along the sequence",
                    "switch sequence parallelism off for this architecture",
                )
            return Label("S", active=True, fed=True)
        active = any(label.active for label in labels) or bool(params and fed)
        if active:
            self.derived.complete |= params
        return Label(params=frozenset() if active else params, active=active, fed=fed)

    def _problem(self, what: str, remedy: str) -> None:
        path = self.stack[-1][0] if self.stack else ""
        if all(problem.module != path for problem in self.derived.problems):
            self.derived.problems.append(Problem(what, path, remedy=remedy))

    def _random(self, path: str, label: Label) -> None:
        """A dropout on T activations must draw other numbers on each rank; S ones are covered layer by layer."""
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

    # modules ----------------------------------------------------------------------------------------

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.stack.append((path, args, kwargs))
        changed = self._enter_layer(path, args, kwargs)
        if changed is not None:
            self.stack[-1] = (path, *changed)
        if path in self.cuts:
            if not self.silent:
                self._enter_cut(path, args, kwargs)
            self.silent += 1
        return changed

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        _, args, kwargs = self.stack.pop()
        handed = {id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(output):
            if id(tensor) in handed:  # what it was given goes out again, to whoever uses it next
                self.other_uses[id(tensor)].add(path)
        if path in self.cuts:
            self.silent -= 1
            if not self.silent:
                result = tensors_in(output)[0]
                self._set(result, self._cut_output(path, result.dim() - 1))
        if (
            self.sequence_parallel
            and self.structure
            and path == self.structure.layer_path(self.structure.count - 1)
        ):
            hidden = self.structure.slot.result(output)
            with self._silently():
                whole = hidden.view_as(hidden)
            self._set(whole, Label(active=True, fed=True))
            return self.structure.slot.rewrap(output, whole)
        return None

    def _enter_layer(self, path: str, args: Any, kwargs: Any) -> Any:
        """Under sequence parallelism the hidden state is split when it enters the first layer."""
        if not (self.sequence_parallel and self.structure) or path != self.structure.layer_path(0):
            return None
        hidden = self.structure.slot.get(args, kwargs)
        with self._silently():
            split = hidden.view_as(hidden)
        self._set(split, Label("S", active=True, fed=True))
        return self.structure.slot.put(split, args, kwargs)

    def _enter_cut(self, path: str, args: Any, kwargs: Any) -> None:
        source = tensors_in((args, kwargs))[0]
        label = self.label(source)
        cut = self.cuts[path]
        if cut == "column":
            if label.region == "T":
                self.derived.gather |= label.columns
            self.column_calls.append(ColumnCall(path, source, list(self.stack)))
            self.kept.append(source)
        elif cut == "row" and label.region != "T":
            self.derived.scatter.add(path)
            if self._in_layers(path) and self.sequence_parallel:
                self._problem(
                    "a row-parallel linear whose input is not sharded can't run under sequence parallelism",
                    "shard the linear before it by columns, or leave this one whole",
                )
        elif cut == "row" and label.along != Along(source.dim() - 1):
            self.derived.gather |= (
                label.columns
            )  # it takes a contiguous part of the last dimension, and nothing else

    def _cut_output(self, path: str, last: int) -> Label:
        cut = self.cuts[path]
        split = self.sequence_parallel and self._in_layers(path)
        if cut == "column" and path not in self.gather:
            along = Along(last, components=self.components.get(path, ()))
            return Label("T", frozenset([path]), active=True, fed=True, along=along)
        if cut == "column" and split:
            self._problem(
                "the gathered output of a column-parallel linear is whole along the sequence",
                "pair it with a row-parallel linear, or switch sequence parallelism off",
            )
        return Label("S" if split and cut == "row" else "R", active=True, fed=True)

    def attend(self, real: Any, module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attention is heads apart: it takes q, k and v [b, heads, s, d] that are cut along their heads."""
        operands = tensors_in((query, args, kwargs))
        label = self._join([self.label(tensor) for tensor in operands])
        if label.region == "T":
            cut = [self.label(tensor).along for tensor in operands if self.label(tensor).region == "T"]
            whole = [tensor for tensor in operands if self.label(tensor).region != "T"]
            of_heads = [t for t in whole if t.dim() == 1 or (t.dim() == 4 and t.shape[1] > 1)]  # sinks, biases
            if any(along != Along(1) for along in cut) or of_heads:
                self.derived.gather |= label.columns
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


def propagate(
    model: nn.Module,
    inputs: Mapping[str, Any],
    cuts: Mapping[str, Cut],
    *,
    structure: Structure | None = None,
    sequence_parallel: bool = False,
    loss_takes_shards: bool = False,
    forked_by_user: frozenset[str] = frozenset(),
    gathered_by_user: frozenset[str] = frozenset(),
    components: Mapping[str, tuple[int, ...]] | None = None,
) -> Derived:
    """Labels one forward and says what follows.

    Args:
        model: a ``meta_copy`` of the definition, replacements made.
        inputs: arguments of its forward, tensors on meta.
        cuts: path -> how the linear or embedding there is cut.
        structure: where the layers are; needed for sequence parallelism.
        loss_takes_shards: the loss function takes logits that are cut over the vocabulary.
        forked_by_user: modules with a ``fork_rng`` record.
        gathered_by_user: column linears whose output the user wants gathered.
        components: path of a column linear -> sizes of the projections packed into its output.
    """
    gather = gathered_by_user
    lookups = None
    while True:
        run = _Propagation(model, cuts, structure, sequence_parallel, gather, forked_by_user, components or {})
        for tensor in tensors_in(dict(inputs)):
            # A float input is an activation; what is made of ids alone (masks, positions) carries no gradient.
            run._set(tensor, Label(fed=True, active=tensor.is_floating_point()))
        lookups = watch_lookups(model, cuts) if lookups is None else lookups
        with _recorded_loss(model, run, loss_takes_shards), call_hooks(model, run.before, run.after):
            output = run_on_meta(model, inputs, run)
        if not loss_takes_shards:
            for tensor in tensors_in(output):
                run.derived.gather |= run.label(tensor).columns
        if run.derived.gather <= gather:
            break
        gather |= run.derived.gather
    run.derived.gather = set(gather)
    run.derived.regions = find_entries(run.column_calls, run.other_uses, cuts, structure)
    run.derived.shared = columns_that_share(run.column_calls)
    run.derived.problems += lookups()
    for name in sorted((run.derived.partial | run.derived.sequence) & run.derived.complete):
        what = f"parameter {name} meets sharded activations in one place and whole ones in another"
        run.derived.problems.append(Problem(what, remedy="shard the modules that use it alike"))
    return run.derived


@contextmanager
def _recorded_loss(model: nn.Module, run: _Propagation, takes_shards: bool) -> Any:
    """Stands in for HF's loss function: logits may stay sharded up to it if the real one takes shards.

    It also stands in for the attention function, to see how many heads a module hands over.
    """
    from megasched.lowering import attention

    def loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not takes_shards:
            run.derived.gather |= run.label(logits).columns
        with run._silently():
            return logits.new_zeros(())

    def attend(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        path = run.stack[-1][0]
        run.derived.attention[path] = (query.shape[1], run.label(query).region == "T")
        kwargs["dropout"] = 0.0  # drawn inside our attention function, which forks by itself
        return run.attend(real, module, query, *args, **kwargs)

    from transformers.modeling_utils import AttentionInterface

    real = attention.attention_forward
    AttentionInterface.register(attention.NAME, attend)
    had = hasattr(model, "loss_function")
    if had:
        model.loss_function = loss
    try:
        yield
    finally:
        AttentionInterface.register(attention.NAME, real)
