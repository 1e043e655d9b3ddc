"""Holds the session of this process, which Megatron's model builder and the seams take up.

Importing this module imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasched.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from megasched.trainer.session import Session

_current: list[Session] = []
# What the command of a rehearsal says before flags are taken out of it.
_on_cluster: list[Namespace] = []


def set_cluster_flags(args: Namespace) -> None:
    """Keeps the flags that the run has on the cluster which this process rehearses."""
    _on_cluster[:] = [args]


def cluster_flags() -> Namespace | None:
    """Returns the flags on the cluster; None where this is no rehearsal."""
    return _on_cluster[0] if _on_cluster else None


def set_session(session: Session) -> None:
    """Makes a session the one of this process, which Megatron's model builder takes up."""
    _current[:] = [session]


def get_session() -> Session:
    """Returns the process's session.

    Raises:
        ConfigError: none was opened: the run was not started through megasched.
    """
    if not _current:
        raise ConfigError(
            "no schedule is open; start the run with `python -m megasched SCRIPT --model-schedule ...`"
        )
    return _current[0]


def has_session() -> bool:
    """Returns whether this process trains a definition, so that there is a session."""
    return bool(_current)
