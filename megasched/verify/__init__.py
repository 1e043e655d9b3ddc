"""Verifies schedules; the package itself can be called: ``megasched.verify(sch, inputs=...)``.

Python gives a package the name of each package inside of it, and so the function could not have this name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasched.verify.report.verification import Verification


class _Callable(ModuleType):
    def __call__(self, *args: Any, **named: Any) -> Verification:
        """Verifies the schedule of any module; see ``library/verify_module.py``."""
        from megasched.verify.library.verify_module import verify

        return verify(*args, **named)


sys.modules[__name__].__class__ = _Callable
