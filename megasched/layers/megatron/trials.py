"""Tries all modules of a definition that Megatron's are to replace: one trial for those that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from megasched.definition.instances import Itself
from megasched.imports import quiet_imports
from megasched.language.module_specs import AttentionSpec, LayerSpec
from megasched.plan.megatron.fit import TrialSubject
from megasched.plan.megatron.params import mixture_in
from megasched.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

# A definition -> what was found of it: a plan is made anew for each layout that a search looks at.
_KNOWN: WeakKeyDictionary[Any, dict[Hashable, str]] = WeakKeyDictionary()
_OF_MODULES = frozenset(["_parameters", "_buffers", "_modules"])


class Trials:
    """Finds why Megatron's modules do not compute the same as a definition's; empty if they do.

    Args:
        subjects: all modules that may be tried.
    """

    def __init__(self, plan: Plan, model: nn.Module, subjects: Iterable[TrialSubject]) -> None:
        self.plan, self.model = plan, model
        self.subjects = list(subjects)
        self.known = _KNOWN.setdefault(model, {})
        self._keys: dict[TrialSubject, Hashable] = {}

    def __call__(self, subject: TrialSubject) -> str:
        key = self._key(subject)
        if key not in self.known:
            alike = [other for other in self.subjects if other.kind == subject.kind and self._key(other) == key]
            self.known[key] = self._try(dict.fromkeys([subject, *alike[-1:]]))
        return self.known[key]

    def _try(self, subjects: Iterable[TrialSubject]) -> str:
        """Tries the first and the last of the modules that differ only in number, as code may scale by depth."""
        with quiet_imports():
            from megasched.layers.megatron.trial import why_another  # with which Megatron is imported

            for subject in subjects:
                if reason := why_another(self.plan, self.model, subject):
                    return f"it computes something else than Megatron's: {reason}"
        return ""

    def _key(self, subject: TrialSubject) -> Hashable:
        if subject not in self._keys:
            self._keys[subject] = self._found(subject)
        return self._keys[subject]

    def _found(self, subject: TrialSubject) -> Hashable:
        """Returns a key that is equal for modules that compute the same, whatever their layer's number."""
        structure, roles = self.plan.stack, self.plan.roles
        index = structure.index_of(subject.path)
        if subject.kind == "layer":
            mixture = mixture_in(self.plan, subject.layer)
            assert isinstance(roles.layer, LayerSpec)
            attention: AttentionSpec | None = roles.layer.attention
            said: Any = (replace(roles.layer, attention=_of_layer(roles.layer.attention, index)), mixture)
        elif subject.kind == "attention":
            assert isinstance(roles.attention, AttentionSpec)
            attention = roles.attention
            said = _of_layer(attention, index)
        else:
            attention, said = None, roles.moe
        state = _state(self.model.get_submodule(subject.path), index)
        rotary = self.model.get_submodule(attention.rotary) if attention is not None and attention.rotary else None
        return subject.kind, said, state, rotary and _state(rotary, None)


def _of_layer(attention: AttentionSpec, index: int | None) -> AttentionSpec:
    """Returns the attention spec with the values of one layer."""
    assert index is not None

    def of_layer(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values[index : index + 1]

    return replace(
        attention,
        windows=of_layer(attention.windows),
        rotated=of_layer(attention.rotated),
        frequencies=of_layer(attention.frequencies),
    )


def _state(module: nn.Module, index: int | None) -> Hashable:
    """Returns types, attributes, shapes of parameters and values of buffers of a module and its submodules.

    Args:
        index: number of the layer; attributes named after a layer that have this value are ignored.
    """
    found = []
    for path, part in module.named_modules():
        plain = tuple(
            (name, _alike(value))
            for name, value in sorted(vars(part).items())
            if name not in _OF_MODULES
            and not (name.startswith("_") and not value)
            and not ("layer" in name and type(value) is int and value == index)
        )
        shapes = tuple((name, held is not None and tuple(held.shape)) for name, held in part._parameters.items())
        values = tuple((name, held is not None and _value(held)) for name, held in part._buffers.items())
        found.append((path, type(part), plain, shapes, values))
    return tuple(found)


def _alike(value: Any) -> Hashable:
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(_alike(one) for one in value)
    if isinstance(value, dict):
        return type(value), tuple((_alike(key), _alike(one)) for key, one in value.items())
    if hasattr(value, "__func__"):  # a method of an instance
        return Itself(value.__self__), Itself(value.__func__)
    return Itself(value)


def _value(buffer: torch.Tensor) -> Hashable:
    shape = tuple(buffer.shape), buffer.dtype
    return shape if buffer.is_meta else (shape, buffer.detach().cpu().contiguous().flatten().tolist().__repr__())
