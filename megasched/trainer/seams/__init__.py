"""Declares features that change functions of Megatron's trainer, in the form of patches."""

from megasched.patches import registry
from megasched.patches.registry import Patch

registry.declare(
    __name__,
    *("arguments", "model_flops", "run_trace", "one_writer", "hang_watch", "load_check", "data_check"),
    *("weight_decay", "context_parallel_loss", "expert_optimizer", "model_builder", "saved_tensors"),
)


def available() -> list[Patch]:
    """Returns all changes that a run makes to others' modules: patches of their faults, then these features."""
    return registry.available()
