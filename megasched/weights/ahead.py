"""Reading the next part while the last one is written: at most one disk waits for the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

# Results that wait to be taken, beside the one that is being made.
DEPTH = 2


def ahead[T](calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What the calls give, in their order; a thread makes the next ones while the caller is at work.

    What a call raises is raised here, when its turn has come; later ones are not begun then.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > DEPTH:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
