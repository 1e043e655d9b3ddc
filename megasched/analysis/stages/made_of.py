"""What each tensor of a tape is made of, and what was written to its values later."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from megasched.analysis.recording.operators import fills_storage, storage_of


class MadeOf[Item: Hashable]:
    """Sets of items, by tensors; a tensor that nobody has told of is made of nothing."""

    def __init__(self) -> None:
        self._items: dict[int, frozenset[Item]] = {}
        self._written: dict[int, frozenset[Item]] = {}  # storage -> of what was written to it, under whatever view
        self._told: list[torch.Tensor] | None = []  # until ``renew``

    def of(self, tensor: torch.Tensor) -> frozenset[Item]:
        """What a tensor is made of, with what was written to its values."""
        items = self._items.get(id(tensor), frozenset())
        return items | self._written.get(storage_of(tensor), frozenset()) if self._written else items

    def tell(self, tensor: torch.Tensor, items: frozenset[Item]) -> None:
        """It is made of these."""
        self._items[id(tensor)] = items
        if self._told is not None:
            self._told.append(tensor)

    def pass_on(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """A tensor goes on as another one of the same values."""
        self.tell(alias, self._items.get(id(source), frozenset()))

    def write(self, storage: int, items: frozenset[Item]) -> None:
        """All tensors that have their values there are made of these, too."""
        if items:
            self._written[storage] = self._written.get(storage, frozenset()) | items

    def tell_whole(self, tensor: torch.Tensor, items: frozenset[Item]) -> None:
        """It is made of these; what was written to it does not count any more, if it fills its storage."""
        self.tell(tensor, items)
        if fills_storage(tensor):
            self._written.pop(storage_of(tensor), None)

    def renew(self, tensor: torch.Tensor, items: frozenset[Item]) -> None:
        """It stands for one with a storage of its own, made of these: what was written to its values before counts
        for the tensors that there were, and not for it. Can be done once."""
        storage = storage_of(tensor)
        if (written := self._written.pop(storage, None)) is not None:
            for told in self._told or ():
                if storage_of(told) == storage:
                    self._items[id(told)] |= written
        self._told = None
        self.tell(tensor, items)
