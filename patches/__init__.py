"""Changes other packages' modules at run time; each change has one file, and ``megasched doctor`` lists them."""

from megasched.patches.registry import Patch, active, apply, apply_each, available, undo, undo_each

__all__ = ["Patch", "active", "apply", "apply_each", "available", "undo", "undo_each"]
