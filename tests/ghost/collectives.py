"""Whether the ranks of a run agree on what they send to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest


def disagreements(ranks: Sequence[Sequence[str]]) -> Iterator[str]:
    """Says what NCCL would hang or fail at: another order, size or dtype on some rank of a group; one line each.

    Args:
        ranks: events of each rank.
    """
    collectives: dict[str, dict[str, list[str]]] = defaultdict(dict)
    messages: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for events in ranks:
        for event in events:
            if not event.startswith("nccl:"):
                continue
            what, count, dtype, group, place, *peer = event.removeprefix("nccl:").split()
            me, size = place.split("/")
            sizes[group] = int(size)
            if what in ("Send", "Recv"):
                ends = (me, peer[1]) if what == "Send" else (peer[1], me)
                messages[(group, *ends, what)].append(f"{count} {dtype}")
            else:
                collectives[group].setdefault(me, []).append(" ".join([what, count, dtype, *peer]))
    for group, by_rank in collectives.items():
        if len(by_rank) != sizes[group]:
            yield f"{group}: {len(by_rank)} of {sizes[group]} ranks take part"
        for number, row in enumerate(zip_longest(*by_rank.values(), fillvalue="nothing")):
            if len(set(row)) > 1:
                yield f"{group}: collective {number}: {dict(zip(by_rank, row, strict=True))}"
                break
    for (group, sender, receiver, what), sent in list(messages.items()):
        if what == "Send" and sent != messages.get((group, sender, receiver, "Recv")):
            yield f"{group}: {sender} sends {len(sent)} messages, of which {receiver} does not receive each"
        if what == "Recv" and (group, sender, receiver, "Send") not in messages:
            yield f"{group}: {receiver} waits for {sender}, which sends nothing"
