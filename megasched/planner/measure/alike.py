"""Stages of the same kinds of layers have everything in common; what is found of one is found of all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasched.trainer.stages.stage import Stage


class Alike:
    """Remembers what was found of stages.

    Args:
        kinds: for each layer the first one that is like it.
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        self.kinds = kinds
        self._found: dict[Hashable, Any] = {}

    def look(self, stage: Stage) -> Hashable:
        """The same for stages that are alike."""
        return (*self.kinds[stage.start : stage.stop], stage.first, stage.last)

    def once[Found](self, find: Callable[[Any, Stage], Found], stage: Stage) -> Found:
        """``find(self, stage)``, computed once for all stages that are alike."""
        key = find, self.look(stage)
        if key not in self._found:
            self._found[key] = find(self, stage)
        found: Found = self._found[key]
        return found
