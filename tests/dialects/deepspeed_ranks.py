"""Ranks that have DeepSpeed, which stands apart from the environment (requirements.txt)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks_with import RanksWith

DEEPSPEED = Path(sys.prefix) / "deepspeed"


class DeepSpeedRanks(RanksWith):
    """A pool whose ranks number what DeepSpeed numbers anew in each case."""

    def __init__(self, cwd: Path) -> None:
        assert (DEEPSPEED / "deepspeed").is_dir(), f"no DeepSpeed in {DEEPSPEED}: make setup"
        super().__init__(DEEPSPEED, cwd)

    def run(self, world_size: int, function: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        return super().run(world_size, numbered_anew, function, *given, **named)


def numbered_anew(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Calls a function of a rank.

    ZeRO-3 numbers the modules and parameters of a process, and ranks must agree on the numbers; after a case of
    two ranks, four would not.
    """
    zero = "deepspeed.runtime.zero"
    if f"{zero}.parameter_offload" in sys.modules:  # the first import chooses the accelerator
        offload = sys.modules[f"{zero}.parameter_offload"].DeepSpeedZeRoOffload
        (numbers,) = offload._register_deepspeed_module.__defaults__
        numbers[0] = sys.modules[f"{zero}.partition_parameters"].Init.param_id = 0
    return function(*given, **named)
