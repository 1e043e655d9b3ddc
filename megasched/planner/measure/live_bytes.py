"""Counts the bytes of live tensors, as operations make them and garbage collection drops them.

The count is the same for real tensors on a CPU and for fake ones without memory, so that what a plan predicts and
what a rehearsal measures are one kind of number: storages, each counted once however many views it has. A caching
allocator's rounding, fragmentation and the workspaces of libraries are not in it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts, while it is entered, every tensor that an operation gives until its storage dies.

    Attributes:
        now: bytes alive.
        peak: the most that were alive at once since the last ``reset_peak``.
        tag: name under which tensors that are made from now on are kept apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.tag = ""
        self._alive: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.see(output)
        return output

    def see(self, output: Any) -> None:
        """Counts the tensors that an operation gave."""
        for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.add(leaf)

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = self.tag, storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        # The Python object of a storage lives as long as the storage itself.
        weakref.finalize(storage, self._drop, key).atexit = False

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes that are alive now."""
        self.peak = self.now

    def made_under(self, tag: str) -> int:
        """Returns the bytes alive that were made under a tag."""
        return sum(size for name, size in self._alive.values() if name == tag)

    def _drop(self, key: int) -> None:
        _, size = self._alive.pop(key)
        self.now -= size
