"""Launchers, and the entry scripts that are installed with the package."""

from __future__ import annotations

from pathlib import Path

# Only these are entry scripts; the other files here are modules of the library.
BUNDLED_SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_vision_classify.py")


def bundled_script(name: str) -> Path | None:
    """The entry script of that name that megasched brings along.

    Args:
        name: what the user typed, e.g. ``pretrain_gpt.py``; with folders in it, it names the user's own file.

    Returns:
        Its absolute path, or None when megasched brings no script of that name.
    """
    return Path(__file__).resolve().parent / name if name in BUNDLED_SCRIPTS else None
