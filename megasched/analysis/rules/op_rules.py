"""Registers rules for third parties' operators, which say along which dimension the outputs are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megasched.errors import ConfigError

OpRule = Callable[[Mapping[str, int], Mapping[str, Any]], int | None]
_REGISTERED: dict[torch._ops.OpOverload, OpRule] = {}


def register_op_rule(op: torch._ops.OpOverload) -> Callable[[OpRule], OpRule]:
    """Registers a function that says how an operator's outputs are cut over ranks, for an operator without a rule.

    Without a rule an operator takes its tensors whole: columns are gathered before it. Example::

        @megasched.register_op_rule(torch.ops.mylib.scale.default)
        def scale(cut, arguments):
            return cut.get("x")  # each element by itself

    Args:
        op: an overload, ``torch.ops.NAMESPACE.NAME.default``.

    The function gets ``cut``, the name of each tensor argument that is cut -> its dimension, counted from the left
    (all are cut alike), and ``arguments``, all arguments by the names of the schema, tensors on meta and whole in
    their shapes. An argument that is not in ``cut`` is the same, and whole, on every rank. It returns the
    dimension along which every output is cut then, or None where the operator needs the whole. Gradients must lie
    as the values do: those of a part are computed from a part.

    Raises:
        ConfigError: another function is registered for it, or ``op`` is no overload.
    """
    if not isinstance(op, torch._ops.OpOverload):
        raise ConfigError(f"{op} is no overload of an operator; give torch.ops.NAMESPACE.NAME.default")

    def decorate(rule: OpRule) -> OpRule:
        known = _REGISTERED.get(op, rule)
        if (known.__module__, known.__qualname__) != (rule.__module__, rule.__qualname__):
            raise ConfigError(f"a rule of {op} is registered already, by {known.__module__}")
        _REGISTERED[op] = rule
        return rule

    return decorate


def op_rule(op: Any) -> OpRule | None:
    """Returns the rule that was registered for an operator, or None."""
    return _REGISTERED.get(op) if _REGISTERED else None
