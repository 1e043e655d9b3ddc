"""Runs ``megasched plan``: the search of the planner with its progress, and the printing of its result."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasched.cli.output import format_seconds, print_found
from megasched.cli.page.html import write_page
from megasched.cli.page.page import build_page
from megasched.cli.show.report import inspect_schedule
from megasched.cli.show.step import StepOptions
from megasched.json_output import json_only
from megasched.planner.hardware.hardware import GIB
from megasched.planner.memory import ERROR, RankMemory
from megasched.planner.plan import PlanReport, plan, run_words, slurm_words
from megasched.planner.predict import StepFlags
from megasched.planner.search import Candidate
from megasched.printing.console import plain_console

# Before the memory of a layout that may not fit after all.
TIGHT = "~"
_PARTS = ("parameters", "gradients", "optimizer", "held", "activations")


def plan_command(hf_model: str, *, as_json: bool, top: int, html: Path | None = None, **options: Any) -> bool:
    """Plans a job, prints the result, and returns whether any layout fits.

    Args:
        html: file for a page about the fastest layout.
        options: keyword arguments of ``planner.plan.plan``.

    Raises:
        ConfigError: an argument can't be used as given.
    """
    status = plain_console(stderr=True).status("planning")
    with status, warnings.catch_warnings(), json_only(as_json):
        warnings.simplefilter("ignore")
        report = plan(hf_model, on_group=lambda layout: status.update(f"planning {layout}"), **options)
    print_found(report, partial(print_plan, top=top), as_json=as_json)
    if html is not None and report.fitting:
        _write_page(report, html, options)
        print(f"wrote {html}", file=sys.stderr)
    return bool(report.fitting)


def _write_page(report: PlanReport, path: Path, options: Mapping[str, Any]) -> None:
    """Writes the page of the fastest layout."""
    best, job = report.fitting[0], report.job
    flags = StepFlags(
        best.recompute_granularity,
        best.recompute_num_layers,
        use_distributed_optimizer=True,
        grad_reduce_in_bf16=options["grad_reduce_in_bf16"],
    )
    shown = inspect_schedule(
        report.schedule,
        report.hf_model,
        best.layout,
        sequence_length=job.sequence_length,
        overrides=options["overrides"] or (),
        trust_remote_code=options["trust_remote_code"],
        adapter=options["adapter"],
        step=StepOptions(flags, job.hardware, best.microbatches, wanted=True),
    )
    write_page(build_page(shown), path)


def print_plan(report: PlanReport, console: Console, top: int) -> None:
    """Prints the fastest layouts, the best one's memory and command, and why other layouts are out."""
    job = report.job
    bits = "bf16" if job.fp8 is None else f"8 bits ({job.fp8.fp8_recipe})"
    console.print(
        f"{job.gpus} x {job.hardware.name}, {bits}, {job.sequence_length:,} tokens in a sequence, "
        f"{job.global_batch_size:,} sequences in a step; tensors may take "
        f"{job.hardware.usable_bytes / GIB:.1f} GiB of a GPU",
        soft_wrap=True,
    )
    if report.fitting:
        console.print(_table(report, top))
        if any(report.is_tight(one) for one in report.ranked()[:top]):
            console.print(
                f"{TIGHT} fits by less than the {ERROR:.0%} that predictions of memory may be off: it may run out "
                "of memory; try one without the mark first",
                soft_wrap=True,
            )
        best = report.fitting[0]
        console.print(Text("\nmemory of the first one, on its fullest pipeline rank", "bold"))
        console.print(_memory(best.fullest))
        console.print(Text("\nits flags", "bold"))
        console.print(shlex.join(run_words(report, best)), soft_wrap=True)
        console.print(Text("\nby Slurm, with your data, learning rate and --save", "bold"))
        console.print(shlex.join(slurm_words(report, best)), soft_wrap=True)
    console.print(Text(f"\n{len(report.out)} layouts are out", "bold"))
    for reason, count in report.reasons():
        console.print(f"  {count}: {reason}", soft_wrap=True)


def _table(report: PlanReport, top: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layout")
    for heading in ("micro-batch", "recompute", "GiB", "step", "tokens/s/GPU", "waiting", "sending"):
        table.add_column(heading, justify="right")
    for candidate in report.ranked()[:top]:
        table.add_row(*_row(report, candidate))
    return table


def _row(report: PlanReport, candidate: Candidate) -> list[str]:
    time = candidate.time
    assert time is not None
    return [
        str(replace(candidate.layout, fp8=None)),  # which is the same for all
        str(candidate.layout.micro_batch_size),
        _recompute(candidate),
        f"{TIGHT if report.is_tight(candidate) else ''}{candidate.fullest.total / GIB:.2f}",
        format_seconds(time.total),
        f"{report.tokens_per_second(candidate):,.0f}",
        f"{time.waiting / time.total:.0%}",
        f"{(time.sending + time.gradients) / time.total:.0%}",
    ]


def _recompute(candidate: Candidate) -> str:
    count = candidate.recompute_num_layers
    return (candidate.recompute_granularity or "") if count is None else f"{count} a stage"


def _memory(memory: RankMemory) -> str:
    parts = ", ".join(f"{name} {getattr(memory, name) / GIB:.2f}" for name in _PARTS)
    return f"{memory.total / GIB:.2f} GiB: {parts}"
