"""Reads what ``make matrix`` found of each architecture, for ``megasched archs`` without an import of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasched.reading.files import Expected, is_regular
from megasched.reading.json_file import read_json

DATA = Path(__file__).with_name("compatibility.json")
MATRIX = Expected("the results of `python -m megasched.verify.matrix`")
# Those of verify/parity.py:LAYOUTS, but for one rank.
LAYOUT_NAMES = ("tp2", "tp2-sp", "pp2", "pp2-vpp2", "ep2", "tp2-pp2", "cp2", "cp2-tp2")


def load_matrix(path: Path = DATA) -> dict[str, Any]:
    """Returns the results of ``make matrix``; empty where there is no such file.

    Returns:
        ``types``: model type -> layout -> outcome, with ``facts`` beside; ``versions`` that they were made with;
        ``older``: model type -> versions, of those that have not been checked with these.
    """
    empty: dict[str, Any] = {"versions": {}, "types": {}, "older": {}}
    return empty | (read_json(path, MATRIX, {f"{key}?": {} for key in empty}) if is_regular(path) else {})
