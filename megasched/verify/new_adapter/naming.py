"""Gives the roles that were found names that schedules can speak of, instead of ``column`` and ``row``.

A name changes nothing of how a linear is cut, but for the head counts that go with q, k and v; where these do not
fit the linear it keeps its plain name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from megasched.definition.linears import output_axis
from megasched.language.roles import ROLES, Roles
from megasched.model_adapters.generic import head_counts

# Leaf of a column -> role; regular expressions for the whole name.
_COLUMNS: tuple[tuple[str, str], ...] = (
    (r"q_proj|q_lin|q|wq|query", "qkv.q"),
    (r"k_proj|k_lin|k|wk|key", "qkv.k"),
    (r"v_proj|v_lin|v|wv|value", "qkv.v"),
    (r"gate_proj", "mlp.gate"),
    (r"up_proj", "mlp.up"),
)
_MLP = re.compile(r"mlp|ffn|feed_forward|fc\d?|ff")


def name_roles(model: nn.Module, roles: Roles) -> dict[str, str]:
    """Maps module paths to roles, for all that have one.

    Args:
        model: the definition.
        roles: roles by HF's plan, and inferred ones.
    """
    named = {path: _column(path, roles) if role == "column" else role for path, role in roles.role.items()}
    heads = head_counts(named, model.config)
    for path, count in heads.items():
        linear = model.get_submodule(path)
        if linear.weight.shape[output_axis(linear)] % count and ROLES[named[path]] == "column":
            named[path] = "column"
    attention = {_parent(path) for path, role in named.items() if role.startswith("qkv.")}
    columns = [_parent(path) for path, role in named.items() if ROLES[role] == "column"]
    for path, role in named.items():
        inside = _parent(path)
        if role == "row" and inside in attention:
            named[path] = "attn.out"
        elif role == "row" and _is_mlp(path):
            named[path] = "mlp.down"
        elif role == "column" and _is_mlp(path) and inside not in attention and columns.count(inside) == 1:
            named[path] = "mlp.up"
    return named


def parts_of(path: str, components: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the sizes of the projections packed into a linear; empty for a single projection."""
    sizes = components.get(path, ())
    return sizes if len(sizes) > 1 else ()


def _column(path: str, roles: Roles) -> str:
    parts = parts_of(path, roles.components)
    if len(parts) == 3:
        return "qkv.packed"
    if len(parts) == 2:
        return "mlp.gate_up"
    leaf = path.rpartition(".")[2]
    return next((role for names, role in _COLUMNS if re.fullmatch(names, leaf)), "column")


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_mlp(path: str) -> bool:
    """Returns whether a name on the way to a module is one of an MLP."""
    return any(_MLP.fullmatch(word) for word in path.lower().split("."))
