"""Follows cut channels into modules that take channels by themselves: batch norms and grouped convolutions.

Nobody need ask for their cut. Such a module gets the cut of what it takes, with all of its tensors; and so does
the weight of a row-parallel convolution that takes several components side by side. Where a module takes cut
channels in one call and whole ones in another, what gives the cut ones is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from torch import nn

from megasched.analysis.tp.facts import TpSpec
from megasched.definition.images.convolutions import feature_dim, group_width, is_channelwise, output_channels
from megasched.language.tensor_types import FEATURE_SHARD, ShardDim


class CutChannels:
    """Keeps which modules of a labelled run take cut channels.

    Attributes:
        components: path -> sizes of the components of the channels that the module takes.
        columns: path -> what gave it these channels.
        whole: paths of modules that take whole tensors in some call.
    """

    def __init__(self, model: nn.Module, left_whole: Container[str]) -> None:
        found = dict(model.named_modules())
        self._modules = {path: one for path, one in found.items() if is_channelwise(one)}
        self._left_whole = left_whole
        self.components: dict[str, tuple[int, ...]] = {}
        self.columns: dict[str, frozenset[str]] = defaultdict(frozenset)
        self.whole: set[str] = set()

    def weights(self) -> dict[int, str]:
        """Maps the ids of parameters and buffers of modules that take channels by themselves to their paths."""
        return {
            id(tensor): path
            for path, module in self._modules.items()
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }

    def is_channelwise(self, path: str) -> bool:
        return path in self._modules

    def enter(self, path: str, module: nn.Module, dims: int, label: TpSpec) -> bool:
        """Notes a call, and returns whether it works on cut channels.

        Args:
            dims: number of dimensions of the input.
            label: label of the input.
        """
        along, components = label.along, None
        if label.type == FEATURE_SHARD and along is not None and along.dim == feature_dim(module, dims):
            components = None if along.outer > 1 or along.heads else along.components
        width = group_width(module)
        if components is None or any(size % width for size in components):
            self.whole.add(path)
            return False
        if path in self._left_whole or path in self.whole:
            return False
        if self.components.setdefault(path, components) != components:
            return False
        self.columns[path] |= label.columns
        return True

    def of_both(self, path: str) -> frozenset[str]:
        """Returns what gave a module cut channels that takes whole tensors in another call; and forgets it."""
        if path not in self.whole:
            return frozenset()
        self.components.pop(path, None)
        return self.columns.pop(path, frozenset())


def given_channels(module: nn.Module, dims: int, taken: tuple[int, ...]) -> ShardDim:
    """Returns how the output of a module is cut that takes components of channels by themselves.

    Args:
        dims: number of dimensions of the output.
        taken: sizes of the components that it takes.
    """
    out, channels = output_channels(module)
    return ShardDim(feature_dim(module, dims), components=tuple(size * out // channels for size in taken))
