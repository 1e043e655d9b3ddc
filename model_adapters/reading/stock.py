"""Checks whether modules of a definition are unaltered classes of transformers.

Megatron's layers, attention and mixtures were compared with transformers' own classes. A class that comes with a
model folder may have altered any part of one, so its parts are compared with those of transformers' model of the
same config: types, contents of instances, and the code of classes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megasched.definition.build import build_definition
from megasched.definition.objectives import objective_of
from megasched.errors import ConfigError
from megasched.transformers_names import INIT_WEIGHTS

# How an instance is made says nothing of how it runs; what it holds then is compared.
_MAKING = frozenset(["__init__", "post_init", "init_weights", INIT_WEIGHTS, "_initialize_weights", "__new__"])
_CLASS = frozenset(
    ["__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "config_class"]
)
# Of a module of torch's: compared in ways of their own.
_PARTS = frozenset(["_parameters", "_buffers", "_modules"])
# Of a config: says how a run calls the model, not what the model computes.
_OF_RUN = frozenset(["use_cache", "dtype", "torch_dtype", "architectures", "auto_map"])

_TWINS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def why_altered(model: Any, paths: Iterable[str], *, around: bool = False) -> str:
    """Returns how the modules at these paths, or their submodules, differ from transformers'; empty if not.

    Args:
        around: also check the modules that call them, which pass them positions and masks.
    """
    paths = list(paths)
    outside = sorted({parent for path in paths for parent in _parents(path)}) if around else []
    twin = _twin(model)
    if isinstance(twin, str):
        return twin
    if twin is not model:
        others = dict(twin.named_modules())
        for path in paths:
            if reason := _unlike(model, others, path):
                return reason
        for path in outside:
            if reason := _overridden(type(model.get_submodule(path)), type(twin.get_submodule(path))):
                return reason
    inside = {type(part) for path in paths for part in model.get_submodule(path).modules()}
    for kind in sorted({*inside, *(type(twin.get_submodule(path)) for path in outside)}, key=str):
        if name := _foreign(kind):
            return f"{kind.__name__}.{name} is not transformers' own"
    return ""


def _twin(model: Any) -> Any:
    """Returns transformers' model of the same config, or the reason why there is none.

    It is the definition itself if that is transformers'.
    """
    if type(model).__module__.startswith("transformers."):
        return model
    if model not in _TWINS:
        config = copy.deepcopy(model.config)
        try:
            _TWINS[model] = build_definition(config, objective_of(model))
        except ConfigError:
            _TWINS[model] = f"transformers has no model of a {type(config).__name__} to compare it with"
    return _TWINS[model]


def _parents(path: str) -> Iterator[str]:
    """Yields the paths of the modules around one, the model included."""
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _unlike(model: nn.Module, others: Mapping[str, nn.Module], path: str) -> str:
    """Returns how a module, or one inside, differs from transformers', which are given by path; empty if not."""
    for inner, module in model.get_submodule(path).named_modules():
        place = f"{path}.{inner}" if inner else path
        other = others.get(place)
        if type(module) is not type(other):
            has = "none" if other is None else f"a {type(other).__name__}"
            return f"{place} is a {type(module).__name__}, and transformers has {has}"
        for name in sorted({*vars(module), *vars(other)} - _PARTS):
            if not _same(vars(module).get(name), vars(other).get(name)):
                return f"{place} has another {name} than transformers'"
        if not _same(_tensors(module), _tensors(other)) or module._modules.keys() != other._modules.keys():
            return f"{place} holds something else than transformers'"
    return ""


def _tensors(module: nn.Module) -> dict[str, Any]:
    """Returns the shapes of parameters and the values of buffers, by name."""
    shapes = {name: None if held is None else tuple(held.shape) for name, held in module._parameters.items()}
    return {**shapes, **module._buffers}


def _same(one: Any, other: Any) -> bool:
    from transformers import PreTrainedConfig

    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and (one.is_meta or torch.equal(one, other))
    if isinstance(one, PreTrainedConfig):
        told = [{name: value for name, value in c.to_dict().items() if name not in _OF_RUN} for c in (one, other)]
        return told[0] == told[1]
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    if hasattr(one, "__func__"):  # a method of an instance
        return one.__func__ is other.__func__
    if hasattr(one, "func"):  # a partial function
        return _same([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
    return bool(one == other)


def _overridden(own: type, other: type) -> str:
    """Returns how the class of an enclosing module overrides transformers'; empty if it does not."""
    if own is other:
        return ""
    if not issubclass(own, other):
        return f"a {own.__name__} is around it, and not transformers' {other.__name__}"
    for kind in own.__mro__[: own.__mro__.index(other)]:
        for name, value in vars(kind).items():
            called = callable(value) or hasattr(value, "__get__")
            if called and name not in _MAKING | _CLASS and hasattr(other, name):
                return f"{own.__name__}, which is around it, has a {name} of its own"
    return ""


@cache
def _foreign(kind: type) -> str:
    """Returns the name of a method, or of a global that its code uses, that is not transformers' or torch's.

    It is empty if there is none.
    """
    if not _ours(kind.__module__):
        return "__class__"
    for base in (base for base in kind.__mro__ if base.__module__.startswith("transformers.")):
        for name, value in vars(base).items():
            if name not in _CLASS and not _known(value):
                return name
    called = _called(kind)
    return next((name for name in sorted(called) if not _known(called[name])), "")


def _called(kind: type) -> dict[str, Any]:
    """Returns the values of global names in the code of a class's own methods.

    The code of functions of the same module that are used by such a name is included.
    """
    names: Mapping[str, Any] = vars(sys.modules[kind.__module__])
    found: dict[str, Any] = {}
    left = [function for value in vars(kind).values() for function in _functions(value)]
    while left:
        for name in _names(left.pop().__code__) & names.keys() - found.keys():
            found[name] = value = names[name]
            left += [function for function in _functions(value) if function.__module__ == kind.__module__]
    return found


def _functions(value: Any) -> list[FunctionType]:
    """Returns the functions that a class holds under one name, and the functions that they wrap."""
    ends = [value.fget, value.fset, value.fdel] if isinstance(value, property) else [value]
    found = []
    for end in ends:
        while end is not None:
            end = getattr(end, "__func__", end)  # of a class or static method
            if isinstance(end, FunctionType):
                found.append(end)
            end = getattr(end, "__wrapped__", None)
    return found


def _names(code: CodeType) -> set[str]:
    """Returns the global names in the code of a function, and in that of functions defined in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _known(value: Any) -> bool:
    """Returns whether a value holds only code of transformers, torch and Python.

    A function belongs to the module whose globals it uses: its own name can be set.
    """
    if functions := _functions(value):
        return all(_ours(function.__globals__.get("__name__")) for function in functions)
    if isinstance(value, dict):
        return all(_known(one) for one in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_known(one) for one in value)
    if isinstance(value, partial):
        return _known([value.func, *value.args, *value.keywords.values()])
    if isinstance(value, ModuleType):
        return _ours(value.__name__)
    if isinstance(value, type):
        return _ours(value.__module__)
    if isinstance(value, BuiltinFunctionType):  # of a module or a class; of torch's, the module is not told
        owner = value.__self__
        return _known(owner if isinstance(owner, type | ModuleType) else type(owner))
    return _ours(type(value).__module__)


def _ours(module: str | None) -> bool:
    """Returns whether a module comes with transformers, torch, kernels, megasched, numpy or Python."""
    known = ("transformers", "torch", "kernels", "megasched")
    return module is not None and module.partition(".")[0] in (*known, *_standard())


@cache
def _standard() -> frozenset[str]:
    return sys.stdlib_module_names | {"builtins", "numpy"}
