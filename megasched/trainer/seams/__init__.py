"""What megasched adds to Megatron's trainer by changing functions of it: features, declared as patches are."""

from megasched.patches import registry
from megasched.patches.registry import Patch

registry.declare(
    __name__,
    *("arguments", "model_flops", "run_trace", "one_writer", "hang_watch", "load_check", "data_check"),
    *("weight_decay", "context_parallel_loss"),
)


def available() -> list[Patch]:
    """All that a run changes in others' modules: what mends their faults, then these features."""
    return registry.available()
