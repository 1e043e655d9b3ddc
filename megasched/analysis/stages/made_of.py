"""Tracks the items that each tensor of a tape is made of, with later writes to its storage."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from megasched.analysis.recording.operators import fills_storage, storage_of


class MadeOf[Item: Hashable]:
    """Maps tensors to sets of items; a tensor without an entry is made of nothing."""

    def __init__(self) -> None:
        self._items: dict[int, frozenset[Item]] = {}
        self._written: dict[int, frozenset[Item]] = {}  # storage -> of what was written to it, under whatever view
        self._told: list[torch.Tensor] | None = []  # until ``renew``

    def of(self, tensor: torch.Tensor) -> frozenset[Item]:
        """Returns the items that a tensor is made of, with those that were written to its storage."""
        items = self._items.get(id(tensor), frozenset())
        return items | self._written.get(storage_of(tensor), frozenset()) if self._written else items

    def tell(self, tensor: torch.Tensor, items: frozenset[Item]) -> None:
        """Sets the items that a tensor is made of."""
        self._items[id(tensor)] = items
        if self._told is not None:
            self._told.append(tensor)

    def pass_on(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """Copies a tensor's items to another tensor of the same values."""
        self.tell(alias, self._items.get(id(source), frozenset()))

    def write(self, storage: int, items: frozenset[Item]) -> None:
        """Adds items to all tensors with this storage."""
        if items:
            self._written[storage] = self._written.get(storage, frozenset()) | items

    def tell_whole(self, tensor: torch.Tensor, items: frozenset[Item]) -> None:
        """Sets a tensor's items, and drops earlier writes to its storage if it fills that."""
        self.tell(tensor, items)
        if fills_storage(tensor):
            self._written.pop(storage_of(tensor), None)

    def renew(self, tensor: torch.Tensor, items: frozenset[Item]) -> None:
        """Sets the items of a tensor that stands for one with a storage of its own.

        Earlier writes to its storage count for the older tensors there, and not for it. It can be called once.
        """
        storage = storage_of(tensor)
        if (written := self._written.pop(storage, None)) is not None:
            for told in self._told or ():
                if storage_of(told) == storage:
                    self._items[id(told)] |= written
        self._told = None
        self.tell(tensor, items)
