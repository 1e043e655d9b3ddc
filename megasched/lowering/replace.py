"""Replaces modules of a definition; the new module gets the old one's weights, hooks and places."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.meta_call import call_hooks, example_inputs, meta_copy, run_on_meta, to_meta
from megasched.analysis.trials.replaced_names import NamesBefore
from megasched.analysis.trials.replacements import Registered
from megasched.definition.module_copy import transfer_hooks
from megasched.errors import Problem, ScheduleError
from megasched.language.records import Record
from megasched.language.replacements import ReplacedNames, call_factory, replacements
from megasched.language.schedule import Schedule

Call = tuple[tuple[Any, ...], dict[str, Any]]


def replace_modules(
    schedule: Schedule,
    model: nn.Module,
    *,
    inputs: Mapping[str, Any] | None = None,
    undo: ExitStack | None = None,
) -> ReplacedNames:
    """Makes the replacements that the records ask for, in the model.

    Args:
        schedule: provides the records; ``renamed`` in it is set to what each new parameter is made of.
        model: the definition, or a copy of it.
        inputs: example arguments of its forward; token ids for an HF model that generates text.
        undo: receives the callbacks that take the replacements back.

    Raises:
        ScheduleError: every replacement that can't be made, and why; the model is unchanged then.
    """
    schedule.renamed.clear()
    asked = list(replacements(schedule.records, schedule.root))
    if not asked:
        return ReplacedNames()
    before = NamesBefore(model)
    calls = _calls(model, {path for _, path in asked}, inputs)
    problems: list[Problem] = []
    made: dict[str, Record] = {}
    places = Registered(model)
    with ExitStack() as steps:
        for record, path in asked:
            problems += _replace_one(schedule, model, places, record, path, calls.get(path, []), made, steps)
            made.setdefault(path, record)
        if problems:
            raise ScheduleError(problems)
        kept = steps.pop_all()
    if undo is not None:
        undo.push(kept)
    return before.compare(model)


def _calls(model: nn.Module, paths: set[str], inputs: Mapping[str, Any] | None) -> dict[str, list[Call]]:
    """Finds how each of these modules is called in one forward on meta; empty where no inputs are known."""
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
    places: Registered,
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
    new, found = _make(old, model, places, path, record)
    if new is None:
        return found
    found = _wrong_call(old, new, path, record, calls)
    found += _transfer_weights(old, new, model, path, record, schedule.renamed)
    if found:
        return found
    if all(module is not old for module in new.modules()):  # the old one would run its hooks itself
        transfer_hooks(old, new)
    modes = [(module, module.training) for module in new.modules() if places.holds(module)]
    new.train(old.training)
    for module, mode in modes:  # a module of the definition keeps its own: a dropout or a norm that is frozen
        module.training = mode
    for parent, name in places.replace(old, new):
        undo.callback(setattr, parent, name, old)
    return []


def _make(
    old: nn.Module, model: nn.Module, places: Registered, path: str, record: Record
) -> tuple[nn.Module | None, list[Problem]]:
    """Returns the new module, or None and why there is none."""
    try:
        new = call_factory(record, path, old)
    except Exception as error:
        what = f"the factory raised {type(error).__name__}: {error}"
        return None, [Problem(what, path, record.source)]
    if not isinstance(new, nn.Module):
        return None, [Problem(f"the factory returned {type(new).__name__}, not a module", path, record.source)]
    if any(isinstance(module, torch.jit.ScriptModule) for module in new.modules()):
        what = (
            f"the factory returned {type(new).__name__}, a module of TorchScript: its weights can't be exchanged"
        )
        return None, [Problem(what, path, record.source, "a module of Python, or torch.compile")]
    paths = (p for p, m in model.named_modules() if m is new)
    stands = next(paths, None) if new is not old and places.holds(new) else None
    if stands is not None:
        what = f"the same module instance already stands at {stands}"
        remedy = "pass a function that makes a new module each time"
        return None, [Problem(what, path, record.source, remedy)]
    return new, []


def _wrong_call(old: nn.Module, new: nn.Module, path: str, record: Record, calls: list[Call]) -> list[Problem]:
    """Returns a problem where the new forward can't take the recorded calls or, without any, the old signature."""
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
    """Returns the fewest arguments that a module's forward must be given, each None."""
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


Source = str | Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class _ParameterReads(Mapping[str, torch.Tensor]):
    """Shows the old parameters to a function of the user's, and notes which of them it reads."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.seen: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.seen.setdefault(name, self.parameters[name].detach())

    def given(self, value: object) -> str | None:
        """Returns the name of the old parameter that a value is, as it was shown; None for another tensor."""
        return next((name for name, shown in self.seen.items() if shown is value), None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def _transfer_weights(
    old: nn.Module,
    new: nn.Module,
    model: nn.Module,
    path: str,
    record: Record,
    renamed: MutableMapping[str, tuple[str, ...]],
) -> list[Problem]:
    """Gives every parameter and persistent buffer of the new module its value, and returns the problems.

    No weight may be missing in the new module or left over in the old one. A parameter that the new module holds
    already (it wraps the old one) stays as it is. One that is taken over is the old ``Parameter`` itself, so that
    ties, ``requires_grad`` and attributes stay.

    Args:
        renamed: is filled with full new name -> full old names that the parameter is made of.
    """
    before = dict(old.named_parameters(remove_duplicate=False))
    after = dict(new.named_parameters(remove_duplicate=False))
    given: Mapping[str, Source] = record.arguments.get("weights", {})
    sources = {name: given.get(name) or _default(name, parameter, before) for name, parameter in after.items()}
    missing = [name for name, source in sources.items() if isinstance(source, str) and source not in before]
    strange = [name for name in given if name not in after]
    problems = []
    if missing:
        remedy = "give each an old name, or a function of the old parameters, in weights={new: old}"
        problems.append(Problem(f"no weights for {', '.join(missing)}", path, record.source, remedy))
    if strange:
        what = f"weights names no parameter of the new module: {', '.join(strange)}"
        problems.append(Problem(what, path, record.source, f"its parameters are: {', '.join(after) or 'none'}"))
    if problems:
        return problems
    values: dict[str, nn.Parameter] = {}
    used: dict[str, tuple[str, ...]] = {}
    for name, source in sources.items():
        try:
            values[name], used[name] = _value(source, before, after[name])
        except Exception as error:
            what = f"the function that gives {name} raised {type(error).__name__}: {error}"
            return [Problem(what, path, record.source)]
        if values[name].shape != after[name].shape:
            what = f"{name} has shape {list(after[name].shape)}, its weights {list(values[name].shape)}"
            problems.append(Problem(what, path, record.source))
    buffers = _persistent_buffers(old), _persistent_buffers(new)
    problems += _untied(values, used, before, model, path, record)
    problems += _left_behind(before, used, buffers, path, record)
    if problems:
        return problems
    # Names that replacements inside of the old module have made are gone with it.
    inner = {name: renamed.pop(name) for name in [*renamed] if name.startswith(f"{path}.")}
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        new.get_submodule(owner)._parameters[leaf] = value
        sources = (f"{path}.{source}" for source in used[name])
        renamed[f"{path}.{name}"] = tuple(one for source in sources for one in inner.get(source, (source,)))
    for name in buffers[0].keys() & buffers[1].keys():
        owner, _, leaf = name.rpartition(".")
        new.get_submodule(owner)._buffers[leaf] = buffers[0][name]
    return []


def _default(name: str, parameter: nn.Parameter, before: Mapping[str, nn.Parameter]) -> str:
    """Returns the source of a parameter that is not in ``weights``: the old name of this object, or its own."""
    return next((old for old, held in before.items() if held is parameter), name)


def _value(
    source: Source, before: Mapping[str, nn.Parameter], like: nn.Parameter
) -> tuple[nn.Parameter, tuple[str, ...]]:
    """Returns the parameter for one place of the new module, and the names of old ones that it is made of."""
    if isinstance(source, str):
        return before[source], (source,)
    reads = _ParameterReads(before)
    with torch.no_grad():
        value = source(reads)
    if (same := reads.given(value)) is not None:
        return before[same], (same,)
    trained = any(before[name].requires_grad for name in reads.seen) if reads.seen else like.requires_grad
    made = nn.Parameter(value.clone(), requires_grad=trained)
    for name in reversed(reads.seen):
        made.__dict__.update(before[name].__dict__)
    return made, tuple(reads.seen)


def _untied(
    values: Mapping[str, nn.Parameter],
    used: Mapping[str, tuple[str, ...]],
    before: Mapping[str, nn.Parameter],
    model: nn.Module,
    path: str,
    record: Record,
) -> list[Problem]:
    """Returns a problem for each new parameter that a function has made of a tied one.

    Args:
        values: of the new module, by name.
        used: name of such a parameter -> old names that it is made of.
        model: the old module stands in it.
    """
    held_before = {id(parameter) for parameter in before.values()}
    made = {name: used[name] for name, value in values.items() if id(value) not in held_before}
    if not made:
        return []
    problems, holders = [], defaultdict[int, list[str]](list)
    for owner, module in model.named_modules():
        for leaf, held in module._parameters.items():
            holders[id(held)].append(f"{owner}.{leaf}" if owner else leaf)
    for name, sources in made.items():
        source = next((one for one in sources if len(holders[id(before[one])]) > 1), None)
        if source is not None:
            names = " and ".join(holders[id(before[source])])
            what = f"a function makes {name} of a tied parameter ({names}), which would be two then"
            remedy = (
                f'the parameter itself, weights={{"{name}": "{source}"}}, or a model whose weights are not tied'
            )
            problems.append(Problem(what, path, record.source, remedy))
    return problems


def _left_behind(
    before: Mapping[str, nn.Parameter],
    used: Mapping[str, tuple[str, ...]],
    buffers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    path: str,
    record: Record,
) -> list[Problem]:
    """Returns problems for weights of the old module that are lost, unless the user drops them by name."""
    drop = record.arguments.get("drop", ())
    taken = {id(before[name]) for names in used.values() for name in names}
    old_buffers, new_buffers = buffers
    lost = [name for name, held in before.items() if id(held) not in taken and name not in drop]
    held_now = {id(buffer) for buffer in new_buffers.values()}
    carried = {name for name, held in old_buffers.items() if name in new_buffers or id(held) in held_now}
    lost += [name for name in old_buffers if name not in carried and name not in drop]
    unknown = [name for name in drop if name not in before and name not in old_buffers]
    problems = []
    if lost:
        what = f"weights of the old module are lost: {', '.join(lost)}"
        remedy = "use each in weights={new: old}, or name it in drop="
        problems.append(Problem(what, path, record.source, remedy))
    if unknown:
        what = f"drop names nothing of the old module: {', '.join(unknown)}"
        remedy = f"it has: {', '.join([*before, *old_buffers]) or 'none'}"
        problems.append(Problem(what, path, record.source, remedy))
    for name in old_buffers.keys() & new_buffers.keys():
        old_shape, new_shape = list(old_buffers[name].shape), list(new_buffers[name].shape)
        if old_shape != new_shape:
            what = f"buffer {name} has shape {new_shape}, its values {old_shape}"
            problems.append(Problem(what, path, record.source))
    return problems


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    kept = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in kept}
