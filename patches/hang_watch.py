"""``--hang-timeout-minutes``: what ranks are doing that make no step (megasched/megatron/hang_watch.py)."""

from __future__ import annotations

from functools import wraps
from typing import Any

from megasched.patches.attributes import Undo, resolve, set_attribute, undo_all
from megasched.patches.registry import Patch

_STEP = "megatron.training.training:train_step"
_PRETRAIN = "megatron.training.training:pretrain"
_watches: list[Any] = []


def _change() -> Undo:
    train_step, pretrain = resolve(_STEP), resolve(_PRETRAIN)

    @wraps(train_step)
    def watched(*given: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        limit = getattr(get_args(), "hang_timeout_minutes", None)
        if limit is None:
            return train_step(*given, **named)
        from megasched.megatron.hang_watch import HangWatch

        if not _watches:
            _watches.append(HangWatch(limit))
        _watches[0].step()
        result = train_step(*given, **named)
        _watches[0].step()
        return result

    @wraps(pretrain)
    def ended(*given: Any, **named: Any) -> Any:
        try:
            return pretrain(*given, **named)
        finally:
            while _watches:
                _watches.pop().end()

    undos = [
        set_attribute(_STEP, watched),
        set_attribute(_PRETRAIN, ended, rebind=("megatron", "megasched")),
    ]
    return lambda: undo_all(undos)


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
