"""State dicts of a built model and its optimizer that ``torch.distributed.checkpoint`` saves, at any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from megasched.dialects.held_pieces import HeldPieces, held_pieces
from megasched.dialects.saving import refuse_others
from megasched.dialects.stages import StageModule
from megasched.errors import ConfigError
from megasched.lowering.build import placements_in_state_dict, plan_of
from megasched.lowering.groups import group_of
from megasched.plan.placement import Placement
from megasched.weights.rank_shard import RankShard

type StateDict = dict[str, Any]
# As a dict of its own for each parameter: stages and EP ranks have different ones.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE, _GROUPS = "state.", "param_groups."


def get_state_dict(
    model: nn.Module | Sequence[nn.Module], optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> tuple[StateDict, StateDict]:
    """Returns the state dicts of model and optimizer as ``torch.distributed.checkpoint`` saves and loads them.

    As torch's function of that name, by HF's names: a tensor that TP or EP cuts stands there in its whole shape,
    and has the rank's pieces. So what one layout has saved, another one loads: TP, EP, FSDP2, stages, replicas.

    Args:
        model: what ``build`` or ``build_stage`` returned, or all stages of this rank; under DDP the one inside.
        optimizers: PyTorch's, of its parameters; a state that is no number has the parameter's shape.

    Raises:
        ConfigError: the model was not built, or has got another parameter since; or an optimizer is not PyTorch's;
            or a cut parameter has a state of another shape.
    """
    names = _Names(model)
    _refuse_other_optimizers(optimizers)
    weights, states = of_torch.get_state_dict(names.model, optimizers, options=_OPTIONS)
    pieces = {names.saved(name): names.pieces(name, value, name) for name, value in weights.items()}
    return pieces, {
        names.saved_state(key): names.pieces(names.of_state(key), value, key) for key, value in states.items()
    }


def set_state_dict(
    model: nn.Module | Sequence[nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
) -> None:
    """Sets model and optimizer to what ``get_state_dict`` returned and ``torch.distributed.checkpoint`` loaded.

    Args:
        model, optimizers: as for ``get_state_dict``.
        model_state_dict, optim_state_dict: what that returned for them.

    Raises:
        ConfigError: as ``get_state_dict``.
        RuntimeError, KeyError: from torch, where the dicts are not of this model and optimizer.
    """
    names = _Names(model)
    _refuse_other_optimizers(optimizers)
    weights = of_torch.get_model_state_dict(names.model)
    states = of_torch.get_optimizer_state_dict(names.model, optimizers, options=_OPTIONS)
    of_torch.set_state_dict(
        names.model,
        optimizers,
        model_state_dict={name: _held(model_state_dict[names.saved(name)]) for name in weights},
        optim_state_dict={key: _held(optim_state_dict[names.saved_state(key)]) for key in states},
        options=_OPTIONS,
    )


def _held(value: Any) -> Any:
    value = value.held if isinstance(value, HeldPieces) else value
    return value.plain() if isinstance(value, RankShard) else value


def _refuse_other_optimizers(given: Any) -> None:
    for optimizer in given if isinstance(given, Sequence) else [given]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            what = f"a {type(optimizer).__name__} is no optimizer of torch.optim"
            raise ConfigError(f"{what}; DeepSpeed's engine saves its own: engine.save_checkpoint")


class _Names:
    """Knows how names in a checkpoint follow from those in a rank's modules, and how each tensor lies.

    Attributes:
        model: one module for all chunks of the model on this rank.
    """

    def __init__(self, given: nn.Module | Sequence[nn.Module]) -> None:
        chunks = [given] if isinstance(given, nn.Module) else list(given)
        self.model = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
        self._hf_names: dict[str, str] = {}
        self._canonical: dict[str, str] = {}
        self._placements: dict[str, Placement] = {}
        for index, chunk in enumerate(chunks):
            refuse_others(chunk)
            self._add(chunk, "" if len(chunks) == 1 else f"{index}.")

    def _add(self, chunk: nn.Module, prefix: str) -> None:
        below = "definition." if isinstance(chunk, StageModule) else ""
        plan, placements = plan_of(chunk), placements_in_state_dict(chunk)
        for name in chunk.state_dict():
            hf_name = name.removeprefix(below)
            self._hf_names[prefix + name] = plan.replaced.saved_as.get(hf_name, hf_name)
            canonical = plan.canonical.get(hf_name, hf_name)
            self._canonical[prefix + name] = plan.renamed.get(canonical, canonical)
            if (placement := placements.get(name)) is not None:
                self._placements[prefix + name] = placement

    def saved(self, name: str) -> str:
        """Returns a tensor's name in a checkpoint."""
        return self._hf_names.get(name, name)

    def of_state(self, key: str) -> str:
        """Returns the parameter's name in a key of the optimizer's state: ``state.a.weight.exp_avg``."""
        name = key.removeprefix(_STATE).removeprefix(_GROUPS)
        while name and name not in self._hf_names:
            name = name.rpartition(".")[0]
        return name

    def saved_state(self, key: str) -> str:
        """Returns a state's key in a checkpoint, where a tied parameter's has one name at every layout."""
        name, head = self.of_state(key), _STATE if key.startswith(_STATE) else _GROUPS
        return f"{head}{self._canonical[name]}{key.removeprefix(head + name)}"

    def pieces(self, name: str, value: Any, key: str) -> Any:
        """Returns what stands for a whole tensor, or the value itself where a rank has that as HF does."""
        placement = self._placements.get(name)
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or placement is None:
            return value
        if not (placement.sharded or placement.transposed):
            return value
        group = group_of(placement.group)
        if tuple(value.shape) != placement.local_shape(group.size()):
            raise ConfigError(
                f"{key}: it has the shape {list(value.shape)}, and a rank's shard of the parameter "
                f"{list(placement.local_shape(group.size()))}, so that nobody knows how the ranks' are put "
                "together; save a file of each rank by torch.save"
            )
        plain = value if isinstance(value, DTensor) else value.as_subclass(torch.Tensor)
        return held_pieces(plain, placement, group.rank(), group.size())
