"""Changes other packages' modules at run time; each change has one file, and ``megasched doctor`` lists them."""

from megasched.patches.registry import Patch, active, apply, available, undo

__all__ = ["Patch", "active", "apply", "available", "undo"]
