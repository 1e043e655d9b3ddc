"""Finds the entry scripts that are installed with the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

# Only these are entry scripts; the other files beside them are modules of the library.
BUNDLED_SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_vision_classify.py")


def bundled_script(name: str) -> Path | None:
    """Returns the path of an entry script that is installed with megasched.

    Args:
        name: as the user typed it, e.g. ``pretrain_gpt.py``; with folders in it, it names the user's own file.

    Returns:
        Its absolute path, or None when megasched has no script of that name.
    """
    spec = find_spec("megasched.launch") if name in BUNDLED_SCRIPTS else None
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent / name
