"""Replacing modules of a definition: the new one gets the old one's weights, hooks and place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.lowering.lower import _carry_hooks, _put
from megasched.primitives.replace_all import matches
from megasched.records import Record
from megasched.schedule import Schedule


def replace_modules(schedule: Schedule, model: nn.Module) -> dict[str, str]:
    """Makes the replacements that the records ask for, in the model.

    Returns:
        full name of each parameter of a new module -> name of the definition's parameter it stands for.

    Raises:
        ScheduleError: every replacement that can't be made, and why.
    """
    renamed: dict[str, str] = {}
    problems: list[Problem] = []
    used: dict[int, str] = {}
    for record, path in _replacements(schedule):
        old = model.get_submodule(path)
        factory = record.arguments["factory"]
        new = factory if isinstance(factory, nn.Module) else factory(old)
        found = _refusals(old, new, path, record, used)
        if not found:
            found, names = _carry_weights(old, new, path, record)
            renamed.update(names)
        problems += found
        if not found:
            _carry_hooks(old, new)
            _put(model, path, new.train(old.training))
    if problems:
        raise ScheduleError(problems)
    return renamed


def _replacements(schedule: Schedule) -> list[tuple[Record, str]]:
    found = []
    for record in schedule.records:
        if record.primitive == "replace":
            found.append((record, record.path))
        elif record.primitive == "replace_all":
            node = schedule.root[record.path] if record.path else schedule.root
            found += [(record, path) for path in matches(node, record.arguments["what"])]
    return found


def _refusals(old: nn.Module, new: Any, path: str, record: Record, used: dict[int, str]) -> list[Problem]:
    if not isinstance(new, nn.Module):
        return [Problem(f"the factory returned {type(new).__name__}, not a module", path, record.source)]
    if not path:
        return [Problem("the whole model can't be replaced", path, record.source, "replace a module inside it")]
    if id(new) in used:
        what = f"the same module instance already stands at {used[id(new)]}"
        return [Problem(what, path, record.source, "pass a function that makes a new module each time")]
    used[id(new)] = path
    wrong = _wrong_call(old, new)
    if wrong:
        remedy = f"a forward that takes what {type(old).__name__}.forward takes: {inspect.signature(old.forward)}"
        return [
            Problem(
                f"{type(new).__name__}.forward can't take its parent's call: {wrong}",
                path,
                record.source,
                remedy,
            )
        ]
    return []


def _wrong_call(old: nn.Module, new: nn.Module) -> str:
    """Why the new forward can't be called as the old one is; empty if it can."""
    args, kwargs = [], {}
    for parameter in inspect.signature(old.forward).parameters.values():
        if parameter.default is inspect.Parameter.empty:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                args.append(None)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = None
    try:
        inspect.signature(new.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _carry_weights(
    old: nn.Module, new: nn.Module, path: str, record: Record
) -> tuple[list[Problem], dict[str, str]]:
    """Gives every parameter and buffer of the new module its value; complete on both sides."""
    given: Mapping[str, Any] = record.arguments.get("weights", {})
    before = dict(old.named_parameters())
    after = dict(new.named_parameters())
    mapping = {name: given.get(name, name) for name in after}
    named = {source for source in mapping.values() if isinstance(source, str)}
    by_function = any(callable(source) for source in mapping.values())
    missing = [n for n, source in mapping.items() if isinstance(source, str) and source not in before]
    left = [n for n in before if n not in named and n not in record.arguments.get("drop", ())]
    strange = [n for n in given if n not in after]
    problems = []
    if missing:
        remedy = "give each an old name in weights={new: old}"
        problems.append(Problem(f"no weights for {', '.join(missing)}", path, record.source, remedy))
    if left and not by_function:
        remedy = "use each in weights={new: old}, or name it in drop="
        problems.append(
            Problem(f"weights of the old module are lost: {', '.join(left)}", path, record.source, remedy)
        )
    if strange:
        problems.append(
            Problem(f"weights names no parameter of the new module: {', '.join(strange)}", path, record.source)
        )
    if problems:
        return problems, {}
    names = {}
    for name, source in mapping.items():
        owner, _, leaf = name.rpartition(".")
        value = before[source] if isinstance(source, str) else _computed(source, before, after[name])
        if tuple(value.shape) != tuple(after[name].shape):
            what = f"{name} has shape {list(after[name].shape)}, its weights {list(value.shape)}"
            return [Problem(what, path, record.source)], {}
        new.get_submodule(owner)._parameters[leaf] = value
        if isinstance(source, str):
            names[f"{path}.{name}"] = f"{path}.{source}"
    _carry_buffers(old, new)
    return [], names


def _computed(function: Any, before: dict[str, nn.Parameter], like: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        value = function({name: parameter.detach() for name, parameter in before.items()})
    return nn.Parameter(value.clone(), requires_grad=any(p.requires_grad for p in before.values()))


def _carry_buffers(old: nn.Module, new: nn.Module) -> None:
    held = dict(old.named_buffers())
    for name, _ in list(new.named_buffers()):
        if name in held:
            owner, _, leaf = name.rpartition(".")
            new.get_submodule(owner)._buffers[leaf] = held[name]
