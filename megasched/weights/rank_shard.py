"""Marks the shards in a built model's state dict, which ``torch.distributed.checkpoint`` would take for copies.

It keeps one rank's tensor of each name. What it takes as it is comes from ``megasched.get_state_dict``.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megasched.errors import ConfigError


class RankShard(torch.Tensor):
    """Holds a rank's shard of a parameter; a plain tensor to all but ``torch.distributed.checkpoint``.

    Results of operations, and what is pickled or copied, are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __create_write_items__(self, fqn: str, tensor: Any) -> Any:
        """Refuses to be saved; see torch/distributed/_checkpointable.py."""
        raise ConfigError(
            f"{fqn}: this is a rank's shard, and torch.distributed.checkpoint would keep that of one rank alone. "
            "Give it what megasched.get_state_dict(model, optimizer) returns"
        )

    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return deepcopy(self.plain(), memo)


def mark_shards(model: nn.Module, names: Collection[str]) -> None:
    """Has a module's state dict mark these parameters, each time that it is made."""

    def mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in names:
            tensor = state.get(f"{prefix}{name}")
            if isinstance(tensor, DTensor):  # of FSDP2, made anew for a state dict as any other tensor there
                tensor._local_tensor = tensor._local_tensor.as_subclass(RankShard)
            elif isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
                state[f"{prefix}{name}"] = tensor.as_subclass(RankShard)

    if names:
        model.register_state_dict_post_hook(mark)
