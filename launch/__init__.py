"""Starts runs, and holds the entry scripts that are installed with the package."""

from __future__ import annotations

from megasched.bundled_scripts import BUNDLED_SCRIPTS, bundled_script

__all__ = ["BUNDLED_SCRIPTS", "bundled_script"]
