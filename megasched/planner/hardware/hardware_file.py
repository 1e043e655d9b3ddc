"""Writes hardware as the text of a TOML file, in which each figure says where it is from."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from megasched.planner.hardware.hardware import Hardware

LINKS = ("node", "network")
# Columns that a value takes at most, before its comment.
_WIDTH = 30


def hardware_text(hardware: Hardware, measured: Collection[str], source: str, head: Sequence[str]) -> str:
    """Returns the text of a file that ``load_hardware`` reads as this very hardware.

    Args:
        measured: figures that were measured, by field; of links as ``node.efficiency``, and ``node.gpus``.
        source: origin of all other figures, e.g. ``h100-80gb``.
        head: lines of a comment at the top.
    """

    def line(field: str, key: str, value: Any) -> str:
        origin = "measured" if field in measured else f"of {source}"
        return f"{f'{key} = {_literal(value)}':{_WIDTH}} # {origin}"

    lines = [f"# {words}" for words in head]
    lines += [line(key, key, value) for key, value in _figures(hardware)]
    for name in LINKS:
        lines += ["", f"[{name}]"]
        link = asdict(getattr(hardware, name))
        figures = {"gpus": hardware.gpus_per_node, **link} if name == "node" else link
        lines += [line(f"{name}.{key}", key, value) for key, value in figures.items()]
    return "\n".join(lines) + "\n"


def _figures(hardware: Hardware) -> Iterator[tuple[str, Any]]:
    for field in fields(Hardware):
        value = getattr(hardware, field.name)
        if field.name not in (*LINKS, "gpus_per_node") and value is not None:
            yield field.name, value


def _literal(value: Any) -> str:
    """Returns a value in TOML, where strings, numbers and lists of them are written as in JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
