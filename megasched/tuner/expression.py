"""Defines arithmetic on symbols without values yet: ``tp * pp <= 8``, worked out for each assignment."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from megasched.errors import ConfigError

# A symbol whose condition does not hold has no value, nor has what is computed from it.
INACTIVE = type("Inactive", (), {"__repr__": lambda self: "inactive"})()

Assignment = Mapping[str, Any]


class Expression:
    """Represents a formula that has a value for each assignment of values to symbols.

    Attributes:
        symbols: names of the symbols in it.
    """

    # Equality makes an expression, so that expressions can only be told apart by identity.
    __hash__ = object.__hash__

    def __init__(self, text: str, symbols: frozenset[str], compute: Callable[[Assignment], Any]) -> None:
        self._text, self.symbols, self._compute = text, symbols, compute

    def evaluate(self, assignment: Assignment) -> Any:
        """Returns its value; ``INACTIVE`` where a symbol that it needs has none.

        Raises:
            ConfigError: it can't be computed for these values.
        """
        try:
            return self._compute(assignment)
        except (TypeError, ZeroDivisionError) as error:
            values = ", ".join(f"{name} = {assignment[name]!r}" for name in sorted(self.symbols & set(assignment)))
            raise ConfigError(f"{self} can't be computed for {values}: {error}") from error

    def __str__(self) -> str:
        return self._text.removeprefix("(").removesuffix(")") if self._text.startswith("(") else self._text

    def __repr__(self) -> str:
        return f"<{self}>"

    def __bool__(self) -> NoReturn:
        raise ConfigError(
            f"{self} has no value while the space is written; say & for `and`, | for `or`, ~ for `not`, each side "
            "in parentheses, and write 1 < x < 4 as (1 < x) & (x < 4)"
        )

    def __invert__(self) -> Expression:
        return _apply("~", operator.not_, self)

    def __neg__(self) -> Expression:
        return _apply("-", operator.neg, self)


def _both(left: Any, right: Any) -> bool:
    return bool(left and right)


def _either(left: Any, right: Any) -> bool:
    return bool(left or right)


def _text(operand: Any) -> str:
    return operand._text if isinstance(operand, Expression) else repr(operand)


def _symbols(*operands: Any) -> frozenset[str]:
    return frozenset().union(*(one.symbols for one in operands if isinstance(one, Expression)))


def _value(operand: Any, assignment: Assignment) -> Any:
    return operand._compute(assignment) if isinstance(operand, Expression) else operand


def _apply(sign: str, function: Callable[..., Any], *operands: Any) -> Expression:
    def compute(assignment: Assignment) -> Any:
        values = [_value(operand, assignment) for operand in operands]
        return INACTIVE if any(value is INACTIVE for value in values) else function(*values)

    if len(operands) == 1:
        text = f"{sign}{_text(operands[0])}"
    else:
        text = f"({_text(operands[0])} {sign} {_text(operands[1])})"
    return Expression(text, _symbols(*operands), compute)


def _binary(sign: str, function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (
        lambda self, other: _apply(sign, function, self, other),
        lambda self, other: _apply(sign, function, other, self),
    )


for _sign, _name, _function in (
    ("+", "add", operator.add),
    ("-", "sub", operator.sub),
    ("*", "mul", operator.mul),
    ("/", "truediv", operator.truediv),
    ("//", "floordiv", operator.floordiv),
    ("%", "mod", operator.mod),
    ("**", "pow", operator.pow),
    ("&", "and", _both),
    ("|", "or", _either),
):
    _forward, _reflected = _binary(_sign, _function)
    setattr(Expression, f"__{_name}__", _forward)
    setattr(Expression, f"__r{_name}__", _reflected)

# Python turns a comparison around by itself when the symbol stands on the right.
for _sign, _name in (("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge")):
    setattr(Expression, f"__{_name}__", _binary(_sign, getattr(operator, _name))[0])
