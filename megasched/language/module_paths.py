"""Finds the modules of a model by their paths: those of the definition, and those that replacements bring in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from megasched.language.replacements import ReplacedModel


class ModulePaths:
    """Holds the modules of a definition by all of their paths.

    Attributes:
        of_definition: path -> module; a shared module has several.

    Args:
        model: the definition.
        trial: returns the trial of the replacements up to now; None without any.
    """

    def __init__(self, model: nn.Module, trial: Callable[[], ReplacedModel | None]) -> None:
        self.of_definition: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self._first: dict[int, str] = {}
        self._trial = trial
        for path, module in self.of_definition.items():
            self._first.setdefault(id(module), path)

    def find(self, path: str) -> nn.Module | None:
        """Returns the definition's module at a path, or else the one that a replacement brings in; or None."""
        if path in self.of_definition:
            return self.of_definition[path]
        trial = self._trial()
        return None if trial is None else trial.modules.get(path)

    def first(self, path: str) -> str:
        """Returns the first of the paths of the module at a path."""
        if path in self.of_definition:
            return self._first[id(self.of_definition[path])]
        trial = self._trial()
        return path if trial is None else trial.first_path[id(trial.modules[path])]

    def names_below(self, path: str, *, now: bool = False) -> list[str]:
        """Returns the names below a path, relative to it: of the definition, or of what a replacement brings in.

        Args:
            now: as they are after the replacements up to now.
        """
        trial = self._trial() if now or path not in self.of_definition else None
        prefix = path + "." if path else ""
        paths = self.of_definition if trial is None else trial.modules
        return [name[len(prefix) :] for name in paths if name and name.startswith(prefix)]

    def why_unknown(self, path: str) -> str:
        """Returns why it is not known whether a replacement brings in a module at a path; empty where it is."""
        trial = self._trial()
        for around, why in {} if trial is None else trial.failed.items():
            if path.startswith(around + "."):
                return f"the replacement of {around} was tried on meta, without values, and raised {why}; "
        return ""


def is_within(path: str, around: str) -> bool:
    """Returns whether a module is another one, or in it; all are in the model itself, whose path is empty."""
    return not around or path == around or path.startswith(f"{around}.")
