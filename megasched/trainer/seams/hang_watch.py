"""Watches the steps of each rank for ``--hang-timeout-minutes`` (megasched/trainer/hang_watch.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megasched.attributes import Undo, call_after, wrap_attribute
from megasched.patches.registry import Patch
from megasched.trainer.hang_watch import HangWatch

_STEP = "megatron.training.training:train_step"
_PRETRAIN = "megatron.training.training:pretrain"
_watches: list[HangWatch] = []


def _change() -> list[Undo]:
    def watched(train_step: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        limit = getattr(get_args(), "hang_timeout_minutes", None)
        if limit is None:
            return train_step(*given, **named)
        if not _watches:
            _watches.append(HangWatch(limit))
        _watches[0].step()
        result = train_step(*given, **named)
        _watches[0].step()
        return result

    return [
        wrap_attribute(_STEP, watched),
        call_after(_PRETRAIN, _end, rebind=("megatron", "megasched")),
    ]


def _end() -> None:
    while _watches:
        _watches.pop().end()


PATCH = Patch(
    name="hang_watch",
    targets=(_STEP, _PRETRAIN),
    why=(
        "--hang-timeout-minutes: where a collective hangs, megatron/training/initialize.py:336 waits for "
        "--distributed-timeout-minutes, and then one rank tells what it waited for and none what it was doing"
    ),
    change=_change,
    signature={_STEP: ("optimizer", "config", "iteration")},
)
