"""Collects the spans of one rank while they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megasched.trace.clocks import Clock
from megasched.trace.timeline import Kind, Span


@dataclass(frozen=True)
class _Open:
    """Holds a span whose ends are still marks of the clock."""

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
        rank: global rank.
        iteration: the iteration that is being recorded, counted as in Megatron's log.
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
        """Runs its body and records it as a span; nothing when it raises."""
        start = self.clock.mark()
        yield
        found = _Open(kind, microbatch, chunk, name, start, self.clock.mark())
        self._open.setdefault(self.iteration, []).append(found)

    def remember(self, output: Any, microbatch: int | None, chunk: int | None) -> None:
        """Notes which forward made an output: its backward is given the output, and nothing else."""
        self._running[_identity(output)] = (microbatch, chunk)

    def recall(self, output: Any) -> tuple[int | None, int | None]:
        """Returns (micro-batch, chunk) of the forward that made an output, once; after that (None, None)."""
        return self._running.pop(_identity(output), (None, None))

    def spans(self) -> dict[int, list[Span]]:
        """Returns iteration -> spans in the order in which they ended, in seconds on this rank's clock."""
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
    """Returns the id of the tensor itself, which Megatron's schedules keep from the forward to the backward."""
    return id(output[0] if isinstance(output, list) else output)
