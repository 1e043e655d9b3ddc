"""Whether a subclass of ``nn.Embedding`` looks up through its base, which is where a vocabulary shard is put."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from megasched.errors import Problem
from megasched.roles import Cut


class _Counted(nn.Embedding):
    """Stands between a subclass and ``nn.Embedding``, as ``ShardedLookup`` does once it is lowered."""

    lookups = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.lookups += 1
        return super().forward(ids)


def watch_lookups(model: nn.Module, cuts: Mapping[str, Cut]) -> Callable[[], list[Problem]]:
    """Watches the vocabulary embeddings of a model that is about to run (a ``meta_copy``: classes are changed).

    Returns:
        What says afterwards which of them ran without looking up through ``nn.Embedding.forward``.
    """
    calls: dict[str, int] = {}
    watched: dict[str, _Counted] = {}
    for path, module in model.named_modules():
        if cuts.get(path) != "vocab" or type(module).forward is nn.Embedding.forward:
            continue
        module.__class__ = type(type(module).__name__, (type(module), _Counted), {})
        watched[path] = module
        module.register_forward_hook(lambda module, args, output, path=path: calls.update({path: 1}))

    def problems() -> list[Problem]:
        what = "{} looks up in a way of its own, not through nn.Embedding.forward, and can't be sharded"
        return [
            Problem(what.format(type(module).__name__), path, remedy="leave it whole, or replace it first")
            for path, module in watched.items()
            if path in calls and not module.lookups
        ]

    return problems
