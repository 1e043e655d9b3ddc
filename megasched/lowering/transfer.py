"""What a new module takes over from the one it replaces: parameters and persistent buffers, hooks, its places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping

import torch
from torch import nn

from megasched.errors import Problem
from megasched.language.records import Record

Source = str | Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class _Reads(Mapping[str, torch.Tensor]):
    """The old parameters as a function of the user's sees them; notes which it looks at."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.seen: dict[str, None] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self.parameters[name].detach()
        self.seen[name] = None
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def transfer_weights(
    old: nn.Module, new: nn.Module, path: str, record: Record, renamed: MutableMapping[str, tuple[str, ...]]
) -> list[Problem]:
    """Gives every parameter and persistent buffer of the new module its value; complete on both sides.

    A parameter that the new module holds already (it wraps the old one) stays as it is; one that is taken over
    is the old ``Parameter`` itself, so that ties, ``requires_grad`` and attributes stay.

    Args:
        renamed: gets full new name -> full old names that the parameter is made of.
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
    problems += _left_behind(before, used, buffers, path, record)
    if problems:
        return problems
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        new.get_submodule(owner)._parameters[leaf] = value
        renamed[f"{path}.{name}"] = tuple(f"{path}.{source}" for source in used[name])
    for name in buffers[0].keys() & buffers[1].keys():
        owner, _, leaf = name.rpartition(".")
        new.get_submodule(owner)._buffers[leaf] = buffers[0][name]
    return []


def _default(name: str, parameter: nn.Parameter, before: Mapping[str, nn.Parameter]) -> str:
    """The old name of a parameter that the user says nothing about: itself, or else the same name."""
    return next((old for old, held in before.items() if held is parameter), name)


def _value(
    source: Source, before: Mapping[str, nn.Parameter], like: nn.Parameter
) -> tuple[nn.Parameter, tuple[str, ...]]:
    """The parameter for one place of the new module, and the old ones it is made of."""
    if isinstance(source, str):
        return before[source], (source,)
    reads = _Reads(before)
    with torch.no_grad():
        value = source(reads)
    trained = any(before[name].requires_grad for name in reads.seen) if reads.seen else like.requires_grad
    made = nn.Parameter(value.clone(), requires_grad=trained)
    for name in reversed(reads.seen):
        made.__dict__.update(before[name].__dict__)
    return made, tuple(reads.seen)


def _left_behind(
    before: Mapping[str, nn.Parameter],
    used: Mapping[str, tuple[str, ...]],
    buffers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    path: str,
    record: Record,
) -> list[Problem]:
    """What of the old module gets lost, unless the user lets it go by name."""
    drop = record.arguments.get("drop", ())
    taken = {id(before[name]) for names in used.values() for name in names}
    old_buffers, new_buffers = buffers
    lost = [name for name, held in before.items() if id(held) not in taken and name not in drop]
    lost += [name for name in old_buffers if name not in new_buffers and name not in drop]
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


def module_places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Module -> every (parent, name) it stands at; a shared module has several."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places[child].append((parent, name))
    return places
