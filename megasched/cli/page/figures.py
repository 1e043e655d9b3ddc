"""Makes the figures on top of the page: step time, bubble, speed and memory, as far as they are known."""

from __future__ import annotations

from dataclasses import dataclass

from megasched.cli.output import format_bytes, format_seconds
from megasched.cli.page.page import Page, idle_share


@dataclass(frozen=True)
class Figure:
    """Represents one of the figures on top of the page; ``hint`` says how it was made, or why it is not known."""

    name: str
    value: str
    hint: str


def figures(page: Page) -> list[Figure]:
    """Returns the figures on top of the page: what is predicted, and of the rest why it is not known."""
    step = page.report.step
    missing = "name the hardware with --gpu" if step.hardware is None else step.why_not
    where = "" if step.hardware is None else f"on {step.hardware.name}"
    if step.seconds is None or step.waiting is None or step.tokens_per_second is None:
        bubble = Figure("Pipeline bubble", f"{idle_share(page):.1%}", "by FLOPs, without communication")
        times = [Figure("Step time", "not known", missing), bubble]
        times.append(Figure("Tokens/s per GPU", "not known", missing))
    else:
        sequences = step.microbatches * page.report.layout.micro_batch_size * page.report.layout.data_parallel_size
        times = [
            Figure("Step time", format_seconds(step.seconds), f"{where}, {sequences:,} sequences"),
            Figure("Pipeline bubble", f"{step.waiting:.1%}", "of the step the busiest rank waits"),
            Figure("Tokens/s per GPU", f"{step.tokens_per_second:,.0f}", where),
        ]
    if step.peak_bytes is None:
        return [*times, Figure("Peak memory of a GPU", "not known", step.why_not)]
    if step.hardware is None:
        return [
            *times,
            Figure("Peak memory of a GPU", format_bytes(step.peak_bytes), f"limit not known: {missing}"),
        ]
    room = step.hardware.usable_bytes
    fits = "fits into" if step.peak_bytes <= room else "is more than"
    limit = f"{fits} the {format_bytes(room)} for tensors"
    return [*times, Figure("Peak memory of a GPU", format_bytes(step.peak_bytes), limit)]
