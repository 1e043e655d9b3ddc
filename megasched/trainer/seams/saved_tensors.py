"""Writes every shard of what ``--save-wgrads-interval`` and its like ask for, also without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megasched.attributes import Undo, resolve, set_attribute, wrap_attribute
from megasched.patches.registry import Patch

_SAVE = "megatron.training.checkpointing:save_grads"
_RANK = "megatron.core.parallel_state:get_expert_data_parallel_rank"
_LINEARS = (
    "megatron.training.activation_logging:LINEAR_TYPES",
    "megatron.training.dgrad_logging:LINEAR_TYPES",
)


def _change() -> list[Undo]:
    def save_every_shard(save: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        from megatron.core import parallel_state

        if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
            return save(*given, **named)
        # As ``save_checkpoint`` has it (checkpointing.py:727): by one of both, and never by two ranks.
        restore = set_attribute(_RANK, lambda: 0)
        try:
            return save(*given, **named)
        finally:
            restore()

    undo = [wrap_attribute(_SAVE, save_every_shard, rebind=("megatron", "megasched"))]
    # Without Transformer Engine some of them are no classes: they derive from a mock of its own.
    kept = {target: tuple(one for one in resolve(target) if isinstance(one, type)) for target in _LINEARS}
    return [*undo, *(set_attribute(target, classes) for target, classes in kept.items())]


PATCH = Patch(
    name="saved_tensors",
    targets=(_SAVE, _RANK, *_LINEARS),
    why=(
        "experts are whole, so that those who hold the same ones are of several TP ranks, and of these "
        "megatron/training/checkpointing.py:527 has one write gradients, parameters and activations; without "
        "Transformer Engine megatron/training/dgrad_logging.py:89 looks for modules by mocks of its classes"
    ),
    change=_change,
    signature={_SAVE: ("save_dir", "state_dict", "iteration", "grad_label")},
)
