"""What a run makes, where its report does not say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def instances_of(kind: type) -> Iterator[list[Any]]:
    """The instances of a class that are made inside, in their order."""
    made: list[Any] = []
    real = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        made.append(self)

    kind.__init__ = init
    try:
        yield made
    finally:
        kind.__init__ = real
