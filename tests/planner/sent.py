"""What work sends, summed up: bytes by operation, group and whether products hide it."""

from __future__ import annotations

from collections import Counter

from megasched.planner.measure.work import Work


def sent_bytes(work: Work) -> Counter[tuple[str, str, bool]]:
    found: Counter[tuple[str, str, bool]] = Counter()
    for one, calls in work.sent.items():
        found[one.operation, one.group, one.behind] += calls * one.bytes
    return found
