"""Runtime changes to other people's modules, each declared in one file and listed by ``megasched doctor``."""

from megasched.patches.registry import Patch, active, apply, available, undo

__all__ = ["Patch", "active", "apply", "available", "undo"]
