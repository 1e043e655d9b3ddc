"""Ranks that find packages of a folder before those of the environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megasched.verify.ranks.pool import RankPool


class RanksWith:
    """A pool of its own, whose ranks look into a folder before the installed packages."""

    def __init__(self, folder: Path, cwd: Path) -> None:
        self._first = str(folder)
        self._pool = RankPool(cwd=cwd)
        self.plain = self._pool.plain

    def run(self, *given: Any, **named: Any) -> list[Any]:
        """As ``RankPool.run``, which hands this process's search path on."""
        before = next(place for place, path in enumerate(sys.path) if path.endswith("site-packages"))
        sys.path.insert(before, self._first)  # behind this project, whose `tests` a folder may have, too
        try:
            return self._pool.run(*given, **named)
        finally:
            sys.path.remove(self._first)

    def close(self) -> None:
        self._pool.close()
