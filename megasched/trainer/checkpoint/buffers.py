"""Saves persistent buffers (a router's bias, running statistics) in checkpoints, as HF folders have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import nn

from megasched.plan.plan import Plan
from megasched.trainer.stages.stage import Stage
from megasched.weights.source import WeightSource, fill_buffers


def persistent_buffers(definition: nn.Module) -> dict[str, torch.Size]:
    """Maps names of a definition's persistent buffers, the non-parameters of its ``state_dict``, to shapes."""
    parameters = {name for name, _ in definition.named_parameters(remove_duplicate=False)}
    return {name: value.shape for name, value in definition.state_dict().items() if name not in parameters}


def buffers_by_name(definition: nn.Module, renamed: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Returns the buffers of a lowered definition, by the names that they have in HF's.

    Args:
        renamed: name in the lowered definition -> name in HF's, where it differs.
    """
    return {renamed.get(name, name): buffer for name, buffer in definition.named_buffers()}


def materialize_buffers(
    definition: nn.Module,
    source: WeightSource,
    names: Sequence[str],
    renamed: Mapping[str, str],
    device: torch.device,
) -> None:
    """Fills the named buffers by ``fill_buffers``, and moves all buffers to the device."""
    fill_buffers(definition, source, names, renamed)
    for module in definition.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


class SavedBuffers:
    """Holds the buffers of a stage that checkpoints save; every rank has them whole.

    A buffer of which a rank has only a part (a constant for each head) is computed from the config and not saved.

    Args:
        shapes: shapes of the definition's persistent buffers, by HF's names.
        definition: the lowered definition.
        renamed: as for ``buffers_by_name``.
        stages: all stages, in the order in which the model runs.
        stage: the stage of this definition.
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
        for own, buffer in definition.named_buffers():
            name, path = renamed.get(own, own), own.rpartition(".")[0]
            if shapes.get(name) == buffer.shape and stage.holds(plan.stack, path):
                first = next((one for one in stages if one.holds(plan.stack, path)), stage)
                self._copies[name] = first != stage

    def values(self) -> dict[str, torch.Tensor]:
        """Maps the names of the saved buffers to the buffers."""
        held = buffers_by_name(self._definition, self._renamed)
        return {name: held[name] for name in self._copies}

    def entries(self, tp_rank: int, dp_rank: int) -> dict[str, ShardedTensor]:
        """Maps names to checkpoint entries; ranks as in ``megasched.trainer.checkpoint.entries.ShardOwner``."""
        return {
            name: ShardedTensor.from_rank_offsets(
                name, buffer, replica_id=(int(self._copies[name]), tp_rank, dp_rank)
            )
            for name, buffer in self.values().items()
        }
