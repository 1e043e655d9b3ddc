"""Annotations follow their parameter through a replacement, under whatever name it has then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from megasched.language.records import Record


def carried_annotations(
    records: Sequence[Record], renamed: Mapping[str, tuple[str, ...]], model: nn.Module
) -> Iterator[Record]:
    """The records, each annotation naming the parameters that its own has become.

    Args:
        records: of the schedule.
        renamed: parameter of a replaced module -> parameters of the definition that it is made of.
        model: after replacements. An annotation of a parameter that was dropped has nothing to go on.
    """
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for record in records:
        if record.primitive != "annotate":
            yield record
            continue
        param = record.arguments["param"]
        old = f"{record.path}.{param}" if record.path else param
        for name in [new for new, sources in renamed.items() if old in sources] or [old]:
            path, _, leaf = name.rpartition(".")
            if name in held:
                yield replace(record, path=path, arguments={**record.arguments, "param": leaf})
