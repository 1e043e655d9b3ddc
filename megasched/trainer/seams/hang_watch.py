"""``--hang-timeout-minutes``: what ranks are doing that make no step (megasched/trainer/hang_watch.py)."""

from __future__ import annotations

from functools import wraps
from typing import Any

from megasched.patches.attributes import Undo, call_after, resolve, set_attribute, undo_all
from megasched.patches.registry import Patch

_STEP = "megatron.training.training:train_step"
_PRETRAIN = "megatron.training.training:pretrain"
_watches: list[Any] = []


def _change() -> Undo:
    train_step = resolve(_STEP)

    @wraps(train_step)
    def watched(*given: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        limit = getattr(get_args(), "hang_timeout_minutes", None)
        if limit is None:
            return train_step(*given, **named)
        from megasched.trainer.hang_watch import HangWatch

        if not _watches:
            _watches.append(HangWatch(limit))
        _watches[0].step()
        result = train_step(*given, **named)
        _watches[0].step()
        return result

    undos = [
        set_attribute(_STEP, watched),
        call_after(_PRETRAIN, _end, rebind=("megatron", "megasched")),
    ]
    return lambda: undo_all(undos)


def _end() -> None:
    while _watches:
        _watches.pop().end()


PATCH = Patch(
    name="hang_watch",
    targets=(_STEP, _PRETRAIN),
    versions={"megatron-core": ">=0.19,<0.20"},
    why=(
        "--hang-timeout-minutes: where a collective hangs, megatron/training/initialize.py:336 waits for "
        "--distributed-timeout-minutes, and then one rank tells what it waited for and none what it was doing"
    ),
    change=_change,
    signature={_STEP: ("optimizer", "config", "iteration")},
)
