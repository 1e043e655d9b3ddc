"""Plays a step of Megatron's pipeline schedules, event by event: what runs on each pipeline rank, and when.

The orders are those of ``megatron/core/pipeline_parallel/schedules.py``: 1F1B without interleaving, and the
interleaved schedule where a rank has several model chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megasched.trace.timeline import Span


@dataclass(frozen=True)
class Chunk:
    """Holds the seconds of one micro-batch in one model chunk.

    Attributes:
        send: seconds to bring the hidden state to the next chunk, or its gradient to the one before.
    """

    forward: float
    backward: float
    send: float = 0.0


@dataclass(frozen=True)
class Work:
    """Represents one forward or backward of a micro-batch in a model chunk of a rank."""

    forward: bool
    microbatch: int
    chunk: int


def order_of(rank: int, pp: int, vpp: int, microbatches: int, group: int | None = None) -> list[Work]:
    """Returns the forwards and backwards of a pipeline rank in one step, in order.

    Args:
        group: micro-batches that go through a chunk in a row, where there are several; PP by default.

    Raises:
        ValueError: interleaving with micro-batches whose last group is smaller than PP, which Megatron refuses.
    """
    group = group or pp
    if vpp > 1 and 0 < microbatches % group < pp:
        raise ValueError(f"the last of {microbatches} micro-batches in groups of {group} are fewer than PP {pp}")
    table = _table(group, vpp, microbatches)
    warm_up = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * group
    warm_up = min(warm_up, len(table))
    forwards = [Work(True, microbatch, chunk) for microbatch, chunk in table]
    backwards = [Work(False, microbatch, vpp - 1 - chunk) for microbatch, chunk in table]
    steady = [
        one for pair in zip(forwards[warm_up:], backwards[: len(table) - warm_up], strict=True) for one in pair
    ]
    return [*forwards[:warm_up], *steady, *backwards[len(table) - warm_up :]]


def _table(group: int, vpp: int, microbatches: int) -> list[tuple[int, int]]:
    """Returns (micro-batch, chunk) of the forwards, in order: a group goes through all chunks at a time."""
    if vpp == 1:
        return [(microbatch, 0) for microbatch in range(microbatches)]
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def in_flight(rank: int, pp: int, vpp: int, microbatches: int) -> list[tuple[int, ...]]:
    """Returns how many micro-batches of each chunk are alive on a rank, at each work of a step.

    A micro-batch is alive from the start of its forward to the end of its backward.
    """
    alive = [0] * vpp
    found = []
    for work in order_of(rank, pp, vpp, microbatches):
        if work.forward:
            alive[work.chunk] += 1
        found.append(tuple(alive))
        if not work.forward:
            alive[work.chunk] -= 1
    return found


def simulate(chunks: Sequence[Sequence[Chunk]], microbatches: int) -> list[Span]:
    """Simulates one step, and returns its forwards and backwards.

    A rank does one thing at a time, in Megatron's order, and waits for what it needs: the hidden state of the
    chunk before, the gradient of the chunk after. ``send`` seconds pass between their end and its start.

    Args:
        chunks: [PP][VPP], the model's chunks by rank.
        microbatches: micro-batches of the step.

    Returns:
        Spans of all ranks, ordered by rank and start.
    """
    pp, vpp = len(chunks), len(chunks[0])
    todo = [order_of(rank, pp, vpp, microbatches) for rank in range(pp)]
    done = [0] * pp
    clock = [0.0] * pp
    ready: dict[tuple[bool, int, int], float] = {}  # (forward, micro-batch, stage) -> when its input is there
    waiting: dict[tuple[bool, int, int], int] = {}  # the same -> rank that waits for it
    spans: list[list[Span]] = [[] for _ in range(pp)]
    runnable = list(range(pp))
    last = pp * vpp - 1
    while runnable:
        rank = runnable.pop()
        while done[rank] < len(todo[rank]):
            work = todo[rank][done[rank]]
            stage = work.chunk * pp + rank
            needs = (work.forward, work.microbatch, stage)
            first = stage == 0 if work.forward else stage == last
            if not first and needs not in ready:
                waiting[needs] = rank
                break
            cost = chunks[rank][work.chunk]
            start = max(clock[rank], 0.0 if first else ready[needs])
            end = start + (cost.forward if work.forward else cost.backward)
            spans[rank].append(
                Span(rank, "forward" if work.forward else "backward", work.microbatch, work.chunk, start, end)
            )
            clock[rank] = end
            done[rank] += 1
            given = (work.forward, work.microbatch, stage + (1 if work.forward else -1))
            ready[given] = end + cost.send
            if given in waiting:
                runnable.append(waiting.pop(given))
    return [span for of_rank in spans for span in of_rank]
