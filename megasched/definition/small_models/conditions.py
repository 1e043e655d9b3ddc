"""Reads the conditions by which a module's code decides what it computes from itself alone, e.g. its number."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

# What such a condition is made of: no call, which might do something.
_PIECES = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Compare, ast.BinOp, ast.UnaryOp),
    *(ast.Tuple, ast.List, ast.Set, ast.expr_context, ast.operator, ast.cmpop, ast.unaryop),
)


def conditions_of(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yields the text of each such condition in the code of a module's classes, and whether it holds."""
    for cls in type(module).__mro__:
        for text, code, names in _conditions(cls):
            try:
                yield text, bool(eval(code, names, {"self": module}))
            except Exception:  # of whatever kind: it is code that another condition may keep from being run
                continue


@cache
def _conditions(cls: type) -> tuple[tuple[str, CodeType, dict[str, Any]], ...]:
    """Returns text, code and global names of each condition in the functions of a class but its ``__init__``."""
    functions = [one for name, one in vars(cls).items() if isinstance(one, FunctionType) and name != "__init__"]
    if cls.__module__.partition(".")[0] == "torch":
        return ()
    return tuple(
        (ast.unparse(node), compile(ast.Expression(node), "<condition>", "eval"), function.__globals__)
        for function in functions
        for node in _tests(function)
        if _of_self(node, function)
    )


def _tests(function: FunctionType) -> Iterator[ast.expr]:
    """Yields what a function tests, each operand of `and`, `or` and `not` by itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # without source there is nothing to be read
        return
    open_ones = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While)]
    while open_ones:
        node = open_ones.pop()
        if isinstance(node, ast.BoolOp):
            open_ones += node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            open_ones.append(node.operand)
        else:
            yield node


def _of_self(node: ast.expr, function: FunctionType) -> bool:
    """Returns whether a condition is made of the module's attributes, of constants and of global names alone."""
    if not all(isinstance(piece, _PIECES) for piece in ast.walk(node)):
        return False
    names = {piece.id for piece in ast.walk(node) if isinstance(piece, ast.Name)}
    own = {*function.__code__.co_varnames, *function.__code__.co_cellvars} - {"self"}
    return (
        "self" in names
        and not names & own
        and names - {"self"} <= function.__globals__.keys() | vars(builtins).keys()
    )
