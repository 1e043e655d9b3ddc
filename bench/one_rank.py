"""The environment of a run that has one process and no launcher."""

from __future__ import annotations


def one_rank() -> dict[str, str]:
    """What torchrun would tell the only process of a run; torch finds a port, as nobody else has to know it."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
