"""Defines the table of operators: one rule for each says how its outputs are cut when its operands are.

The same rule serves a cut of features over TP and of a sequence over TP or CP. They differ only in what happens
where an operator needs the whole. An operator that is not in the table is taken for one that does.
"""

from __future__ import annotations

from collections.abc import Callable

from megasched.analysis.rules.op_call import OpCall
from megasched.language.tensor_types import ShardDim

# How every output is cut, or each of them; raises NeedsWhole where the operation can't be done part by part.
Rule = Callable[[OpCall], ShardDim | list[ShardDim]]

RULES: dict[str, Rule] = {}
# Names whose in-place form, with a ``_`` at the end, has the same rule.
IN_PLACE: set[str] = set()


def rule(*names: str, in_place: bool = True) -> Callable[[Rule], Rule]:
    """Registers the rule of the operators of torch's ``aten`` with these names, in all their overloads.

    Args:
        in_place: whether it holds for ``name_``, too; False where that changes the shape of its operand.
    """

    def decorate(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"{name} has a rule already"
            RULES[name] = function
        IN_PLACE.update(names if in_place else ())
        return function

    return decorate
