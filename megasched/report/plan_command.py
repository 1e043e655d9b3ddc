"""What the command ``megasched plan`` does around the search: progress, output, silence of imports."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from megasched.report.console import quiet_imports, report_console


def plan_command(hf_model: str, *, as_json: bool, top: int, **options: Any) -> bool:
    """Plans and prints; whether anything fits.

    Args:
        options: of ``planner.plan.plan``.

    Raises:
        ConfigError: whatever can't be used as given.
    """
    from rich.console import Console

    with quiet_imports():
        from megasched.planner.plan import plan

    with Console(stderr=True).status("planning") as status, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = plan(hf_model, on_group=lambda layout: status.update(f"planning {layout}"), **options)
    if as_json:
        json.dump(report.as_dict(), sys.stdout, indent=2)
        print()
    else:
        from megasched.report.plan_view import print_plan

        print_plan(report, report_console(), top)
    return bool(report.fitting)
