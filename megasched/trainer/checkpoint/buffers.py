"""Persistent buffers (a router's bias, running statistics): part of a checkpoint, as they are of an HF folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import nn

from megasched.plan.plan import Plan
from megasched.trainer.stages.stage import Stage
from megasched.weights.source import WeightSource, fill_buffers


def persistent_buffers(definition: nn.Module) -> dict[str, torch.Size]:
    """Name -> shape, of what a definition's ``state_dict`` has beside parameters."""
    parameters = {name for name, _ in definition.named_parameters(remove_duplicate=False)}
    return {name: value.shape for name, value in definition.state_dict().items() if name not in parameters}


def buffers_by_name(definition: nn.Module, renamed: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The buffers of a lowered definition, by their names before.

    Args:
        renamed: name in the lowered definition -> name before, where it differs.
    """
    return {renamed.get(name, name): buffer for name, buffer in definition.named_buffers()}


def materialize_buffers(
    definition: nn.Module,
    source: WeightSource,
    names: Sequence[str],
    renamed: Mapping[str, str],
    device: torch.device,
) -> None:
    """``fill_buffers``, and moves all of them to the device."""
    fill_buffers(definition, source, names, renamed)
    for module in definition.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


class SavedBuffers:
    """The buffers of a stage that checkpoints hold; every rank has them whole.

    What a rank has a part of alone (a constant for each head) is computed from the config and not saved.

    Args:
        shapes: of the definition's persistent buffers, before it was lowered.
        definition: the lowered one.
        renamed: as for ``buffers_by_name``.
        stages: all of them, in the order in which the model runs.
        stage: this one.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        definition: nn.Module,
        renamed: Mapping[str, str],
        plan: Plan,
        stages: Sequence[Stage],
        stage: Stage,
    ) -> None:
        self._definition, self._renamed = definition, renamed
        # Name -> whether an earlier stage has it, too.
        self._copies: dict[str, bool] = {}
        for name, buffer in buffers_by_name(definition, renamed).items():
            assert plan.structure is not None
            path = name.rpartition(".")[0]
            if shapes.get(name) == buffer.shape and stage.holds(plan.structure, path):
                first = next((one for one in stages if one.holds(plan.structure, path)), stage)
                self._copies[name] = first != stage

    def values(self) -> dict[str, torch.Tensor]:
        """Name -> buffer."""
        held = buffers_by_name(self._definition, self._renamed)
        return {name: held[name] for name in self._copies}

    def entries(self, tp_rank: int, dp_rank: int) -> dict[str, ShardedTensor]:
        """Name -> what goes to a checkpoint; ranks as in ``megasched.trainer.checkpoint.entries.ShardOwner``."""
        return {
            name: ShardedTensor.from_rank_offsets(
                name, buffer, replica_id=(int(self._copies[name]), tp_rank, dp_rank)
            )
            for name, buffer in self.values().items()
        }
