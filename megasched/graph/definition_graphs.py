"""Traces the definition's modules on meta while a schedule is written, with inputs from one model call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megasched.analysis.notes.attribute_values import attributes_of
from megasched.analysis.notes.restorable_state import restored
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    call_hooks,
    example_inputs,
    meta_copy,
    run_on_meta,
)
from megasched.analysis.trials.attention_switch import form_of
from megasched.analysis.trials.replacements import ReplacementTrial
from megasched.definition.build import switch_cache_off
from megasched.definition.linears import may_be_replaced
from megasched.definition.undisturbed import undisturbed
from megasched.errors import Problem, ScheduleError
from megasched.graph.capture import Graph, capture
from megasched.graph.intercept import Limits
from megasched.language.records import Record, caller_source
from megasched.language.schedule import matches_glob

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


class DefinitionGraphs:
    """Holds a copy of a model on meta, and how each of its modules is called.

    Attributes:
        model: the copy, in training mode.
        graphs: path of a traced module -> its graph.
        decomposed: paths of linears that graphs show as product and bias.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = meta_copy(model)
        self.graphs: dict[str, Graph] = {}
        self.decomposed: set[str] = set()
        self._alike: dict[Any, Graph] = {}
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        switch_cache_off(self.model)
        inputs = example_inputs(self.model)
        if inputs is not None:
            # What code makes in its first call is seen in a trace.
            with restored(self.model, values=False, outside=False), call_hooks(self.model, self._note):
                run_on_meta(self.model, inputs)
        self.model.train()

    def _note(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.setdefault(path, (args, kwargs))

    def trace(self, path: str, leaves: frozenset[str], inputs: Shapes | None) -> Graph:
        """Traces the module at ``path``; modules that differ only in their number are traced once.

        Raises:
            ScheduleError: it can't be traced, or it is unknown how it is called.
        """
        module = self.model.get_submodule(path)
        if inputs is not None:
            given = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                for name, (dtype, shape) in inputs.items()
            }
            args, kwargs = (), given
        elif path in self._calls:
            args, kwargs = self._calls[path]
        else:
            what = "nothing tells how this module is called"
            remedy = "say it: trace(inputs={parameter: example tensor})"
            raise ScheduleError(Problem(what, path, caller_source(), remedy))
        limits = Limits(leaves, self._decomposed(path))
        key = (
            _fingerprint(module),
            leaves,
            tuple(limits.decomposed),
            tuple(limits.hooked(module)),
            form_of((args, kwargs)),
        )
        if key not in self._alike:
            with torch.device("meta"), undisturbed(module):
                self._alike[key] = capture(
                    module,
                    module.forward,
                    args,
                    kwargs,
                    limits,
                    path=path,
                    source=caller_source(),
                    probe=ScalarAnswers,
                    trial=True,
                )
        self.graphs[path] = self._alike[key]
        return self.graphs[path]

    def _decomposed(self, path: str) -> dict[str, bool]:
        prefix = path + "." if path else ""
        return {name.removeprefix(prefix): False for name in self.decomposed if name.startswith(prefix)}


def _fingerprint(module: nn.Module) -> Any:
    """Returns a key that is equal for modules of a model that differ only in their number and in weights."""
    return tuple(
        (
            path,
            type(inner),
            tuple((k, v) for k, v in attributes_of(inner) if k not in ("layer_idx", "layer_id", "layer_number")),
            tuple((n, p.shape, p.dtype) for n, p in inner.named_parameters(recurse=False)),
            tuple((n, b.shape, b.dtype) for n, b in inner.named_buffers(recurse=False)),
        )
        for path, inner in module.named_modules()
    )


def replacement_trial(model: nn.Module) -> ReplacementTrial:
    """Returns the trial of the replacements that a schedule of this model asks for."""
    return ReplacementTrial(model)


def trial_of(node: Any) -> DefinitionGraphs:
    """Returns the ``DefinitionGraphs`` of a schedule's model, made at the first request."""
    memory = node.root.memory
    if "trial" not in memory:
        memory["trial"] = DefinitionGraphs(node.root.mod)
    return memory["trial"]


def graph_of(node: Any) -> Graph:
    """Returns the graph of a module that ``trace`` was called on.

    Raises:
        ScheduleError: it was not called.
    """
    trial = node.root.memory.get("trial")
    if trial is None or node.path not in trial.graphs:
        remedy = f'call sch["{node.path}"].trace() before'
        raise ScheduleError(Problem("the module is not traced", node.path, caller_source(), remedy))
    return trial.graphs[node.path]


def standing_leaves(module: nn.Module) -> set[str]:
    """Returns submodules that always stay calls, as a parallel layer may replace them."""
    return {path for path, inner in module.named_modules() if path and may_be_replaced(inner)}


def replaced_by(node: Any) -> Record | None:
    """Returns the record that has other code compute this very module in a run; None where there is none.

    It is a parallel layer, or what sends tokens to experts of other ranks.
    """
    return shards(node).get(node.path) if may_be_replaced(node.mod) or node.root.layout.ep > 1 else None


def shards(node: Any) -> dict[str, Record]:
    """Returns the last ``shard`` record of each module that has one, by the module's path."""
    return {record.path: record for record in node.root.records if record.primitive == "shard"}


def chosen_leaves(module: nn.Module, leaves: Sequence[Any], path: str) -> tuple[str, ...]:
    """Returns the paths below ``module`` that these leaves select.

    A leaf is a path, a glob, a regular expression, a class or the name of one.

    Raises:
        ScheduleError: one of them selects nothing here.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: list[str] = []
    for leaf in leaves:
        if isinstance(leaf, type):
            hits = [name for name, inner in module.named_modules() if name and isinstance(inner, leaf)]
        else:
            # As in sch["..."], * is one name of a path; only what is no such glob is a regular expression.
            hits = [name for name in names if matches_glob(leaf.split("."), name.split("."))]
            hits = hits or [name for name in names if _full(leaf, name)]
            hits = hits or [name for name in names if type(module.get_submodule(name)).__name__ == leaf]
        if not hits:
            what = f"leaves: nothing below this module is {leaf!r}"
            remedy = f"a class, a path or a regular expression; there are: {', '.join(names)}"
            raise ScheduleError(Problem(what, path, caller_source(), remedy))
        found += hits
    outer = list(dict.fromkeys(found))
    return tuple(name for name in outer if not any(name.startswith(other + ".") for other in outer))


def _full(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def shapes_of(inputs: Mapping[str, torch.Tensor] | None) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Returns the types and shapes of example tensors by name, as a record keeps them; those of a record stay."""
    if inputs is None:
        return None
    return {
        name: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if isinstance(value, torch.Tensor)
        else (value[0], tuple(value[1]))
        for name, value in inputs.items()
    }


Predicate = Callable[[str, nn.Module], bool]


def reached(module: nn.Module, where: str | Predicate, path: str) -> tuple[str, ...]:
    """Returns the outermost modules below that ``where`` names (a glob) or holds for.

    Raises:
        ScheduleError: there is none.
    """
    if isinstance(where, str):
        return chosen_leaves(module, [where], path)
    found: list[str] = []
    for name, inner in module.named_modules():
        if name and not any(name.startswith(other + ".") for other in found) and where(name, inner):
            found.append(name)
    if not found:
        raise ScheduleError(Problem("trace_until: no module below is to stay a call", path, caller_source()))
    return tuple(found)
