"""Spans of one rank while they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megasched.trace.clocks import Clock
from megasched.trace.timeline import Kind, Span


@dataclass(frozen=True)
class _Open:
    """A span whose ends are still marks of the clock."""

    kind: Kind
    microbatch: int | None
    chunk: int | None
    name: str
    start: Any
    end: Any


@dataclass
class Recorder:
    """Collects spans by iteration; the times are looked up at the end.

    Attributes:
        rank: global one.
        iteration: that what is recorded now belongs to, counted as in Megatron's log.
    """

    rank: int
    clock: Clock
    iteration: int = 0
    _open: dict[int, list[_Open]] = field(default_factory=dict)
    _running: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)

    @contextmanager
    def span(
        self, kind: Kind, microbatch: int | None = None, chunk: int | None = None, name: str = ""
    ) -> Iterator[None]:
        """Records what runs inside; nothing when it raises."""
        start = self.clock.mark()
        yield
        found = _Open(kind, microbatch, chunk, name, start, self.clock.mark())
        self._open.setdefault(self.iteration, []).append(found)

    def remember(self, output: Any, microbatch: int | None, chunk: int | None) -> None:
        """Which forward an output is of: its backward is given the output, and told nothing else."""
        self._running[_identity(output)] = (microbatch, chunk)

    def recall(self, output: Any) -> tuple[int | None, int | None]:
        """(micro-batch, chunk) of the forward that made an output, once."""
        return self._running.pop(_identity(output), (None, None))

    def spans(self) -> dict[int, list[Span]]:
        """Iteration -> spans in the order in which they ended, in seconds on this rank's clock."""
        return {
            iteration: [
                Span(
                    self.rank,
                    one.kind,
                    one.microbatch,
                    one.chunk,
                    self.clock.seconds(one.start),
                    self.clock.seconds(one.end),
                    one.name,
                )
                for one in spans
            ]
            for iteration, spans in self._open.items()
        }


def _identity(output: Any) -> int:
    """Of the tensor itself: Megatron's schedules keep it from the forward to the backward."""
    return id(output[0] if isinstance(output, list) else output)
