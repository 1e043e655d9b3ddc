"""In a rank: a real run of the trainer in rehearsal, its live bytes counted."""

from __future__ import annotations

from typing import Any

from megasched.trainer import entry
from megasched.verify import trainer_run


def step_peak(folder: str, flags: list[str], steps: int = 2, schedule: str = "auto") -> dict[str, int]:
    """Bytes alive at the begin of the last step and the most during it; the optimizer has all its state then."""
    from megatron.training import training

    from megasched.planner.measure.live_bytes import LiveBytes

    entry.apply_patches()
    live, found = LiveBytes(), {}
    real = training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        live.reset_peak()
        found["begin"] = live.now
        result = real(*args, **kwargs)
        found["peak"], found["end"] = live.peak, live.now
        return result

    training.train_step = train_step
    try:
        with live:
            trainer_run.run_trainer(folder, flags, iterations=steps, schedule=schedule)
    finally:
        training.train_step = real
    return found
