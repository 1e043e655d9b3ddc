"""Tells with how many arguments a user's function can be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


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
