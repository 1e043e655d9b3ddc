"""Runs context parallelism: gathers whole sequences for modules that need them, and splits them again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.core.parallel_state import get_hierarchical_context_parallel_groups
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn

from megasched.analysis.cp.facts import CpRegion
from megasched.analysis.stages.hooked_outputs import LeafPath, change_leaves
from megasched.definition.mask_interface import whole_sequence
from megasched.definition.sequence_split import Zigzag
from megasched.errors import MegaschedError
from megasched.language.tensor_types import ShardDim
from megasched.layers.batch import HasBatch
from megasched.layers.te.attention import TeCpArgs
from megasched.layers.wrap import Forward, wrap_forward


class CpGroup(HasBatch):
    """Represents the ranks that share a sequence, and exchanges tensors between them.

    Attributes:
        group: Megatron's CP group.
        zigzag: this rank's part of the sequence.
    """

    def __init__(self, group: Any, *, whole_loss: bool = False) -> None:
        """Describes the ranks.

        Args:
            whole_loss: each rank computes the whole loss, not that of its part of the sequence, so that what is
                gathered for it gets its whole gradient on every rank.
        """
        super().__init__()
        self.group, self._whole_loss = group, whole_loss
        self.zigzag = Zigzag(group.size(), group.rank())

    def gather(self, part: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """Gathers a tensor that is split along the sequence, and returns it whole, in the order of the sequence.

        Each rank has a part of the whole's gradient, so these are summed and split again (reduce-scatter).
        """
        return self._gather(part, along, summed=True)

    def gather_result(self, part: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """Gathers as ``gather`` does, of what the loss is computed from."""
        return self._gather(part, along, summed=not self._whole_loss)

    def _gather(self, part: torch.Tensor, along: ShardDim, *, summed: bool) -> torch.Tensor:
        first = self.zigzag.sequence_first(part, along)
        gathered = gather_from_sequence_parallel_region(
            first, tensor_parallel_output_grad=summed, group=self.group
        )
        return self.zigzag.sequence_back(self.zigzag.in_order(gathered), along)

    def gather_together(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers keys and values [b, heads, s, d] of the whole sequence from their parts, in one collective."""
        together = self.gather(torch.cat([key, value], dim=-1), ShardDim(2))
        return together.split([key.shape[-1], value.shape[-1]], dim=-1)

    def for_te(self, config: Any, layer: int | None) -> TeCpArgs:
        """Returns the CP arguments of Transformer Engine's attention, like Megatron's ``TEDotProductAttention``.

        See megatron/core/extensions/transformer_engine.py.

        Args:
            config: Megatron's config, for ``cp_comm_type``.
            layer: number of the layer, for which Megatron may name a type of its own.
        """
        kind = comm_type(config, layer or 0)
        group = get_hierarchical_context_parallel_groups() if kind == "a2a+p2p" else self.group
        ranks = torch.distributed.get_process_group_ranks(self.group)
        return TeCpArgs(group, ranks, _stream(), kind, self.zigzag.size)


def comm_type(config: Any, layer: int) -> str:
    """Returns how Transformer Engine exchanges keys and values in a layer, by ``--cp-comm-type`` in the config."""
    kind = getattr(config, "cp_comm_type", None)  # which the config of a library model does not have
    return (kind[layer] if isinstance(kind, list) else kind) or "p2p"


@cache
def _stream() -> Any:
    """Returns the one stream on which Transformer Engine exchanges keys and values."""
    return torch.cuda.Stream()


def enter_sequence_region(path: str, module: nn.Module, region: CpRegion, context: CpGroup) -> None:
    """Makes a module compute whole sequences, redundantly on every CP rank, and return this rank's part.

    A rank's gradient inside is that of its own part of the output; the sum over data parallelism, which includes
    context parallelism, completes the gradients of parameters.
    """

    def run(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        inputs, outputs = (_in_batch(places, context.batch) for places in region)
        args, kwargs = _mapped((args, kwargs), inputs, context.gather, path)
        with whole_sequence():
            output = forward(*args, **kwargs)
        return _mapped(output, outputs, context.zigzag.local_sequence, path)

    wrap_forward(module, run, node="sequence_region")


def gather_recorded(path: str, module: nn.Module, places: Mapping[LeafPath, ShardDim], context: CpGroup) -> None:
    """Makes whole the sequences of tensors that HF's hooks recorded inside layers.

    Args:
        module: the module around the layers, which returns the tensors.
        places: dimension of the sequence in those leaves of its output.
    """

    def gathered(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        inside = _in_batch(places, context.batch)
        changes = {leaf: functools.partial(context.gather_result, along=along) for leaf, along in inside.items()}
        return change_leaves(path, forward(*args, **kwargs), changes)

    wrap_forward(module, gathered)


def _in_batch[Leaf](places: Mapping[Leaf, ShardDim], batch: int) -> dict[Leaf, ShardDim]:
    """Returns the places adjusted to the size of this batch, which differs from the trial call's."""
    return {index: replace(along, outer=batch if along.outer > 1 else 1) for index, along in places.items()}


def _mapped(value: Any, places: Mapping[int, ShardDim], function: Any, path: str) -> Any:
    """Applies ``function`` to the tensors that the trial call found to be split; the structure stays."""
    leaves, structure = torch.utils._pytree.tree_flatten(value)
    for index, along in places.items():
        if index >= len(leaves) or not isinstance(leaves[index], torch.Tensor):
            raise MegaschedError(
                f"{path} is called, or returns, otherwise than in the trial call: context parallelism looks for a "
                f"tensor that is split along the sequence at place {index}, and there is none. Run it without "
                "--context-parallel-size"
            )
        leaves[index] = function(leaves[index], along)
    return torch.utils._pytree.tree_unflatten(leaves, structure)
