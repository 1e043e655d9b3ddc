"""What the command ``megasched plan`` does around the search: progress, output, silence of imports."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.cli.console import quiet_imports, report_console
from megasched.json_output import json_only, print_json

if TYPE_CHECKING:
    from megasched.planner.plan import PlanReport


def plan_command(hf_model: str, *, as_json: bool, top: int, html: Path | None = None, **options: Any) -> bool:
    """Plans and prints; whether anything fits.

    Args:
        html: a page of the fastest layout is written there.
        options: of ``planner.plan.plan``.

    Raises:
        ConfigError: whatever can't be used as given.
    """
    from rich.console import Console

    with quiet_imports():
        from megasched.planner.plan import plan

    status = Console(stderr=True).status("planning")
    with status, warnings.catch_warnings(), json_only(as_json):
        warnings.simplefilter("ignore")
        report = plan(hf_model, on_group=lambda layout: status.update(f"planning {layout}"), **options)
    if as_json:
        print_json(report.as_dict())
    else:
        from megasched.cli.search.plan_view import print_plan

        print_plan(report, report_console(), top)
    if html is not None and report.fitting:
        with quiet_imports():
            _write_page(report, html, options)
        print(f"wrote {html}", file=sys.stderr)
    return bool(report.fitting)


def _write_page(report: PlanReport, path: Path, options: Mapping[str, Any]) -> None:
    """Of the fastest layout, with its predicted memory and its step in seconds."""
    from megasched.cli.page.html import write_page
    from megasched.cli.page.page import build_page
    from megasched.cli.show.report import inspect_schedule
    from megasched.planner.pipeline import simulate

    best = report.fitting[0]
    assert best.time is not None
    shown = inspect_schedule(
        report.schedule,
        report.hf_model,
        best.layout,
        sequence_length=report.job.sequence_length,
        overrides=options["overrides"] or (),
        trust_remote_code=options["trust_remote_code"],
    )
    page = build_page(
        shown,
        global_batch_size=report.job.global_batch_size,
        memory=[asdict(memory) for memory in best.memory],
        predicted=simulate(best.time.chunks, best.microbatches),
    )
    write_page(page, path)
