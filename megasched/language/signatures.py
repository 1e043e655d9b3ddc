"""Tells with how many arguments a user's function can be called, and whether arguments are what is declared."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_SCALARS: dict[Any, type] = {bool: bool, int: Integral, float: Real, str: str, None: NoneType, NoneType: NoneType}
_PLAIN = (bool, int, float, str, NoneType, dict, list, tuple)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Returns whether a function, a class, or a module's forward can be called with so many arguments by position.

    A function without a signature, as some of torch's are, is taken for one of a single argument.
    """
    called = function if isinstance(function, type) else getattr(function, "forward", function)
    try:
        inspect.signature(called).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return count == 1
    return True


def unfit(function: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name of each argument that is not of the type that a function declares for it, and that type.

    Numbers, texts, functions and collections of them are told from others; an object fits any class.

    Args:
        arguments: by the names of the function's parameters; its annotations are texts.
    """
    imported = {"torch": sys.modules.get("torch"), "nn": sys.modules.get("torch.nn")}  # for type checkers alone
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in arguments or not isinstance(parameter.annotation, str):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        try:
            declared = eval(parameter.annotation, imported | function.__globals__)
        except Exception:  # a type that is nowhere when it runs
            continue
        if not _fits(arguments[name], declared):
            yield name, parameter.annotation


def _fits(value: Any, declared: Any) -> bool:
    """Returns whether a value is of a declared type, as far as ``unfit`` says."""
    origin, inner = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if declared in _SCALARS:
        return isinstance(value, _SCALARS[declared]) and (declared is bool or not isinstance(value, bool))
    base: Any = origin or declared
    if declared is Any or not isinstance(base, type) or getattr(base, "_is_protocol", False):
        return True
    if base is Callable:
        return callable(value)
    if issubclass(base, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(each, one) for pair in value.items() for each, one in zip(pair, inner, strict=False)
        )
    if base in (list, tuple) or base.__module__ == "collections.abc":
        items = inner[0] if inner and inner[1:] in ((), (...,)) else Any
        several = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
        return several and (isinstance(value, Iterator) or all(_fits(each, items) for each in value))
    return type(value) not in _PLAIN or isinstance(value, base)
