"""Copies modules like ``copy.deepcopy``, but faster and including the objects that functions on them hold.

``copy.deepcopy`` shares functions between copies. If a function on a module (its ``forward``, a hook) holds
another module in its closure or its defaults, a copy would run the original's weights.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megasched.errors import MegaschedError, Problem, ScheduleError

PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))  # types that nobody changes
_OF_EVERY_MODULE = vars(nn.Module()).keys()  # mostly hooks, of which there are none
_FUNCTIONS = (FunctionType, MethodType, partial)
_SAYS_HOW: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_OF_TORCH = ("torch.", "transformers.", "megatron.")


def copy_module(module: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """Returns a copy of a module and of all its submodules.

    Args:
        memo: id of an object -> its copy, as in ``copy.deepcopy``.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    kind = type(module)
    if _says_how(kind):
        return copy.deepcopy(module, memo)
    made = memo[id(module)] = kind.__new__(kind)
    for name, value in vars(module).items():
        if type(value) in PLAIN:
            own: Any = value
        elif name == "_modules":
            own = type(value)(
                (key, None if child is None else copy_module(child, memo)) for key, child in value.items()
            )
        elif name in _OF_EVERY_MODULE and not value:
            own = type(value)()
        else:
            own = copy_value(value, memo)
        made.__dict__[name] = own
    return made


def holds_tensor(model: nn.Module) -> str | None:
    """Returns the path of a module with a function that holds a parameter or buffer of the model, or None.

    Such a function would keep the old tensor, while the model gets another in its place.
    """
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        held = [
            value for name, value in vars(module).items() if name not in ("_modules", "_parameters", "_buffers")
        ]
        hooks = [item for value in held if type(value) in (dict, OrderedDict) for item in value.values()]
        if any(_holds(function, tensors, set()) for function in (*held, *hooks) if type(function) in _FUNCTIONS):
            return path
    return None


def _holds(value: Any, tensors: set[int], seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return id(value) in tensors
    if id(value) in seen or isinstance(value, nn.Module):
        return False
    seen.add(id(value))
    return any(_holds(item, tensors, seen) for item in _inside(value))


def _inside(value: Any) -> list[Any]:
    """Returns the objects that a function or a container holds."""
    if type(value) is FunctionType:
        return [*held_in_closure(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if type(value) is MethodType:
        return [value.__func__, value.__self__]
    if type(value) is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) in (list, tuple, set):
        return list(value)
    return list(value.values()) if type(value) in (dict, OrderedDict) else []


def _says_how(kind: type) -> bool:
    """Returns whether a class of torch, transformers or Megatron defines how it is copied.

    Methods of a definition's own class are ignored: plain HF never copies the modules that it runs.
    """
    if kind not in _SAYS_HOW:
        _SAYS_HOW[kind] = _defines_copying(kind)
    return _SAYS_HOW[kind]


def _defines_copying(kind: type) -> bool:
    for way in ("__deepcopy__", "__reduce__", "__reduce_ex__", "__setstate__", "__getstate__"):
        home = next(base for base in (*kind.__mro__, None) if base is None or way in vars(base))
        if home not in (None, nn.Module, object) and f"{home.__module__}.".startswith(_OF_TORCH):
            return True
    return False


def copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy of an attribute of a module, or of what a record of a schedule holds.

    Args:
        memo: as for ``copy_module``; with that of a model, what belongs to the model becomes its copy's.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in _FUNCTIONS or isinstance(value, torch.Tensor):
        return _held(value, memo)
    if kind in (dict, OrderedDict) and any(type(item) in _FUNCTIONS for item in value.values()):  # hooks
        return kind((key, copy_value(item, memo)) for key, item in value.items())
    try:
        return copy.deepcopy(value, memo)
    except MegaschedError:
        raise
    except Exception as error:  # of whatever kind, of the value's own code
        what = f"it holds a {kind.__name__} that can't be copied ({type(error).__name__}: {error})"
        remedy = "make it where it is used, or in a global: a run works on a copy of the model"
        raise ScheduleError(Problem(what, remedy=remedy)) from error


def _held(value: Any, memo: dict[int, Any]) -> Any:
    """Returns the copy's version of a value held by a function; only parts of the model and containers change."""
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if isinstance(value, nn.Module):
        return copy_module(value, memo)
    if isinstance(value, torch.Tensor):
        if not value.is_leaf:  # a hook makes it before each forward, as weight_norm's does
            memo[id(value)] = value.detach().clone()
        return copy.deepcopy(value, memo)
    if kind is FunctionType:
        return _function(value, memo)
    if kind is MethodType:
        return MethodType(_held(value.__func__, memo), _held(value.__self__, memo))
    if kind is partial:
        keywords = {name: _held(item, memo) for name, item in value.keywords.items()}
        return partial(_held(value.func, memo), *(_held(item, memo) for item in value.args), **keywords)
    if kind in (tuple, set):
        return kind(_held(item, memo) for item in value)
    if kind is list:
        made = memo[id(value)] = []
        made.extend(_held(item, memo) for item in value)
        return made
    if kind in (dict, OrderedDict):
        named = memo[id(value)] = kind()
        named.update((key, _held(item, memo)) for key, item in value.items())
        return named
    return value


def _function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    cells = function.__closure__ or ()
    if not cells and not function.__defaults__ and not function.__kwdefaults__:
        return function
    own = tuple(memo.setdefault(id(cell), CellType()) for cell in cells)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, own)
    memo[id(function)] = made
    for cell, copied in zip(cells, own, strict=True):
        if not _is_filled(copied) and _is_filled(cell):
            copied.cell_contents = _held(cell.cell_contents, memo)
    made.__defaults__ = _held(function.__defaults__, memo)
    made.__kwdefaults__ = _held(function.__kwdefaults__, memo)
    made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
    made.__annotations__ = function.__annotations__
    made.__dict__.update(function.__dict__)
    return made


def held_in_closure(function: Any) -> list[Any]:
    """Returns the values of a function's closure variables; empty for other objects."""
    return [cell.cell_contents for cell in filled_cells(function).values()]


def filled_cells(function: Any) -> dict[str, CellType]:
    """Returns the closure variables of a function that have a value, with their cells; empty for other objects."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell for name, cell in zip(names, cells, strict=True) if _is_filled(cell)}


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a name that has no value yet
        return False
    return True


def transfer_hooks(old: nn.Module, new: nn.Module) -> None:
    """Registers the old module's forward and backward hooks on the new one, after those that it has."""
    if old._is_full_backward_hook is not None and new._is_full_backward_hook is None:
        new._is_full_backward_hook = old._is_full_backward_hook
    for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, table).update(getattr(old, table))
    for table in (
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        getattr(new, table).update(getattr(old, table))
