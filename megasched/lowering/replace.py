"""Replacing modules of a definition: the new one gets the old one's weights, hooks and place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from megasched.analysis.meta_call import call_hooks, example_inputs, meta_copy, run_on_meta, to_meta
from megasched.definition.module_copy import transfer_hooks
from megasched.errors import Problem, ScheduleError
from megasched.language.primitives.replace_all import matches
from megasched.language.records import Record
from megasched.language.schedule import Schedule
from megasched.lowering.transfer import module_places, transfer_weights

Call = tuple[tuple[Any, ...], dict[str, Any]]


def replace_modules(
    schedule: Schedule,
    model: nn.Module,
    *,
    inputs: Mapping[str, Any] | None = None,
    undo: ExitStack | None = None,
) -> dict[str, str]:
    """Makes the replacements that the records ask for, in the model.

    Args:
        schedule: the records; what became of which parameter is noted in it.
        model: the definition, or a copy of it.
        inputs: example arguments of its forward; token ids for an HF model that generates text.
        undo: gets what takes the replacements back.

    Returns:
        full name of each parameter of a new module -> name of the definition's parameter it stands for.

    Raises:
        ScheduleError: every replacement that can't be made, and why; the model is unchanged then.
    """
    schedule.renamed.clear()
    asked = list(_replacements(schedule))
    if not asked:
        return {}
    calls = _calls(model, {path for _, path in asked}, inputs)
    problems: list[Problem] = []
    made: dict[str, Record] = {}
    with ExitStack() as steps:
        for record, path in asked:
            problems += _replace_one(schedule, model, record, path, calls.get(path, []), made, steps)
            made.setdefault(path, record)
        if problems:
            raise ScheduleError(problems)
        kept = steps.pop_all()
    if undo is not None:
        undo.push(kept)
    return {new: sources[0] for new, sources in schedule.renamed.items() if len(sources) == 1}


def _replacements(schedule: Schedule) -> Iterator[tuple[Record, str]]:
    for record in schedule.records:
        if record.primitive == "replace" and "subgraph" not in record.arguments:
            yield record, record.path
        elif record.primitive == "replace_all":
            node = schedule.root[record.path] if record.path else schedule.root
            yield from ((record, path) for path in matches(node, record.arguments["what"]))


def _calls(model: nn.Module, paths: set[str], inputs: Mapping[str, Any] | None) -> dict[str, list[Call]]:
    """How each of these modules is called in one forward; nothing where no inputs are known."""
    inputs = example_inputs(model) if inputs is None else inputs
    found: dict[str, list[Call]] = {}
    if inputs is None:
        return found

    def note(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if path in paths:
            found.setdefault(path, []).append((args, kwargs))

    probe = meta_copy(model)
    with call_hooks(probe, note, lambda path, module, output: None):
        run_on_meta(probe, to_meta(dict(inputs)))
    return found


def _replace_one(
    schedule: Schedule,
    model: nn.Module,
    record: Record,
    path: str,
    calls: list[Call],
    made: Mapping[str, Record],
    undo: ExitStack,
) -> list[Problem]:
    if not path:
        remedy = "replace a module inside it"
        return [Problem("the whole model can't be replaced", path, record.source, remedy)]
    if path in made:
        what = f"is replaced twice: at {made[path].source}, and again"
        return [Problem(what, path, record.source, "remove one of the two calls")]
    try:
        old = model.get_submodule(path)
    except AttributeError:
        what = "there is no such module any more: a module around it was replaced before"
        return [Problem(what, path, record.source, "replace the inner module first, or not at all")]
    new, found = _make(old, model, path, record)
    if new is None:
        return found
    found = _wrong_call(old, new, path, record, calls)
    found += transfer_weights(old, new, path, record, schedule.renamed)
    if found:
        return found
    if all(module is not old for module in new.modules()):  # the old one would run its hooks itself
        transfer_hooks(old, new)
    new.train(old.training)
    for parent, name in module_places(model)[old]:
        setattr(parent, name, new)
        undo.callback(setattr, parent, name, old)
    return []


def _make(old: nn.Module, model: nn.Module, path: str, record: Record) -> tuple[nn.Module | None, list[Problem]]:
    """The new module, or why there is none."""
    factory: nn.Module | Callable[[nn.Module], Any] = record.arguments["factory"]
    try:
        new = factory if isinstance(factory, nn.Module) else factory(old)
    except Exception as error:
        what = f"the factory raised {type(error).__name__}: {error}"
        return None, [Problem(what, path, record.source)]
    if not isinstance(new, nn.Module):
        return None, [Problem(f"the factory returned {type(new).__name__}, not a module", path, record.source)]
    stands = [p for p, m in model.named_modules() if m is new and m is not old]
    if stands:
        what = f"the same module instance already stands at {stands[0]}"
        remedy = "pass a function that makes a new module each time"
        return None, [Problem(what, path, record.source, remedy)]
    return new, []


def _wrong_call(old: nn.Module, new: nn.Module, path: str, record: Record, calls: list[Call]) -> list[Problem]:
    """Whether the new forward takes the calls that the old one gets, or, where none is known, its signature."""
    takes = inspect.signature(new.forward)
    for args, kwargs in calls or [_required(old)]:
        try:
            takes.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{type(new).__name__}.forward can't take its parent's call: {error}"
            signature = inspect.signature(old.forward)
            remedy = f"a forward that takes what {type(old).__name__}.forward takes: {signature}"
            return [Problem(what, path, record.source, remedy)]
    return []


def _required(module: nn.Module) -> Call:
    """The least that a module's forward must be given."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            args.append(None)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = None
    return tuple(args), kwargs
