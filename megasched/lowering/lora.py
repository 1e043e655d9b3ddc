"""Adds LoRA to a definition: adapted linears get two more linears as children, and the rest is frozen.

This comes before the plan, so that the cuts of adapters and their communication are derived with all others. A
hook on the linear adds the adapter's output: it stays, whichever layer takes the linear's place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megasched.definition.linears import is_linear, output_axis
from megasched.errors import Problem, ScheduleError
from megasched.language.lora import DROPOUT, A, B, Lora, is_conv1d, is_linear_class
from megasched.language.module_paths import is_within
from megasched.language.records import Record
from megasched.language.schedule import Schedule
from megasched.weights.lora import initial_value


@dataclass(frozen=True)
class AddLora:
    """Adds the adapter's output to that of an adapted linear, as its forward hook."""

    lora: Lora

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        """Returns ``output`` [..., out] plus what the adapter makes of the linear's input [..., in]."""
        x = args[0] if args else next(iter(kwargs.values()))
        return output + module.lora_B(module.lora_A(module.lora_dropout(x))) * self.lora.scaling


def adapt_modules(schedule: Schedule, model: nn.Module, undo: ExitStack | None = None) -> bool:
    """Adds the adapters that the schedule asks for to the model, and freezes the rest of it.

    Args:
        schedule: provides the records.
        model: the definition after replacements, or a copy of it; on meta its adapters are on meta, too.
        undo: receives the callbacks that take the adapters back.

    Returns:
        Whether there are any adapters.

    Raises:
        ScheduleError: with every linear that can't be adapted; the model is unchanged then.
    """
    records = [record for record in schedule.records if record.primitive == "adapt"]
    if not records:
        return False
    unfrozen = [record for record in schedule.records if record.primitive == "unfreeze"]
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    problems = [problem for record in records for problem in _check(model, record, names)]
    problems += [problem for record in unfrozen for problem in _check_unfrozen(model, record, names, records)]
    problems = problems or _unlike(schedule, records)
    if problems:
        raise ScheduleError(problems)
    steps = ExitStack() if undo is None else undo
    for parameter in model.parameters():
        steps.callback(parameter.requires_grad_, parameter.requires_grad)
        parameter.requires_grad_(False)
    for record in unfrozen:
        model.get_submodule(record.path).requires_grad_(True)
    for record in records:
        _adapt(model.get_submodule(record.path), record, steps)
    return True


def _check(model: nn.Module, record: Record, names: Mapping[int, int]) -> list[Problem]:
    try:
        module: Any = model.get_submodule(record.path)
    except AttributeError:
        what = "adapt: there is no such module any more after the replacements"
        return [Problem(what, record.path, record.source, "adapt a module that stays")]
    if not is_linear_class(module):
        what = f"adapt: after the replacements this is a {type(module).__name__}"
        return [Problem(what, record.path, record.source, "replace it by an nn.Linear, or do not adapt it")]
    if not is_linear(module):
        what = f"adapt: {type(module).__name__} computes or holds more than nn.Linear does, so that no weight "
        what += "computes the same as it and its adapter"
        return [Problem(what, record.path, record.source, "leave it out, or replace it by an nn.Linear")]
    if names[id(module.weight)] > 1:
        what = "adapt: the weight is tied to another module's, which a merged adapter would change, too"
        return [Problem(what, record.path, record.source, "leave it out, or untie them (tie_word_embeddings)")]
    return []


def _check_unfrozen(
    model: nn.Module, record: Record, names: Mapping[int, int], adapted: Sequence[Record]
) -> list[Problem]:
    """Returns a problem where a parameter to unfreeze is tied to one outside of the module, or has an adapter.

    PEFT keeps a copy of each module that it trains whole, which a tie would not survive, and in which it loads no
    adapter.
    """
    try:
        inside = Counter(
            id(p) for _, p in model.get_submodule(record.path).named_parameters(remove_duplicate=False)
        )
    except AttributeError:
        what = "unfreeze: there is no such module any more after the replacements"
        return [Problem(what, record.path, record.source, "unfreeze a module that stays")]
    if inner := next((one.path for one in adapted if is_within(one.path, record.path)), None):
        what = f"unfreeze: {inner}, which is adapted, is in it, and PEFT trains a module whole or by an adapter"
        return [Problem(what, record.path, record.source, "unfreeze what is beside the adapted linears")]
    if all(names[parameter] == count for parameter, count in inside.items()):
        return []
    what = "unfreeze: a parameter is tied to one outside of the module, and a PEFT adapter does not keep the tie"
    return [Problem(what, record.path, record.source, "leave it frozen, or untie them (tie_word_embeddings)")]


def _unlike(schedule: Schedule, records: Sequence[Record]) -> list[Problem]:
    """Returns a problem where records differ in what a PEFT adapter has once: dropout, rsLoRA, kind of linear."""
    first = records[0]
    for record in records[1:]:
        for name in ("dropout", "use_rslora"):
            one, other = first.arguments[name], record.arguments[name]
            if one != other:
                what = f"adapt: {name}={other!r} here and {name}={one!r} at {first.source}, and a PEFT adapter "
                return [Problem(f"{what}has one for all", record.path, record.source, f"one {name} for all")]
        if is_conv1d(schedule[record.path].mod) != is_conv1d(schedule[first.path].mod):
            what = f"adapt: of Linear and HF's Conv1D ({first.path}) a PEFT adapter has one (fan_in_fan_out)"
            return [Problem(what, record.path, record.source, "adapt one of the two kinds")]
    return []


def adapters_in(model: nn.Module) -> dict[str, Lora]:
    """Returns the adapter of each adapted linear of a model by its path; of hollow ones, too."""
    hooks = ((path, hook) for path, module in model.named_modules() for hook in module._forward_hooks.values())
    return {path: hook.lora for path, hook in hooks if isinstance(hook, AddLora)}


def make_dropout(lora: Lora) -> nn.Module:
    """Returns the module that ``lora_A`` reads its input through: dropout, or the identity."""
    return nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()


def _adapt(module: Any, record: Record, undo: ExitStack) -> None:
    weight, axis = module.weight, output_axis(module)
    out_features, in_features = weight.shape[axis], weight.shape[1 - axis]
    lora = Lora(**record.arguments, fan_in_fan_out=is_conv1d(module))
    like: dict[str, Any] = {"bias": False, "device": "meta", "dtype": weight.dtype}
    children: dict[str, nn.Module] = {
        A: nn.Linear(in_features, lora.rank, **like),
        B: nn.Linear(lora.rank, out_features, **like),
        DROPOUT: make_dropout(lora),
    }
    for name, child in children.items():
        if isinstance(child, nn.Linear) and not weight.is_meta:
            value = initial_value(f"{record.path}.{name}.weight", tuple(child.weight.shape))
            child.weight = nn.Parameter(value.to(weight.device, weight.dtype))
        module.add_module(name, child.train(module.training))
        undo.callback(module.__delattr__, name)
    undo.callback(module.register_forward_hook(AddLora(lora), with_kwargs=True).remove)
