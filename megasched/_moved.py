"""Keeps moved modules importable under their documented old names for one more release, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "megasched.layout": "megasched.language.parallel_dims",
    "megasched.weights.hf_folder": "megasched.weights.hf.folder",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        names = {name: value for name, value in vars(import_module(new)).items() if not name.startswith("__")}
        vars(module).update(names)
        what = f"{module.__name__} is {new} now; megasched itself exports what is documented of it"
        warnings.warn(what, DeprecationWarning, stacklevel=2)


def keep_old_names() -> None:
    """Registers a finder, behind all others, that imports the modules in ``MOVED`` under their old names."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
