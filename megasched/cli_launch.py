"""The commands around a job: ``megasched status``."""

from __future__ import annotations

from typing import Annotated

import typer

from megasched.cli_options import Json
from megasched.json_output import print_json


def status(
    target: Annotated[
        str, typer.Argument(metavar="JOBID|DIR", help="A Slurm job, the folder of a run, or one of its logs.")
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again until the run has ended.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Print how a run is doing, by its logs and by Slurm.

    It needs no GPU, and reads nothing but the logs.
    """
    from megasched.launch.status import RunReader

    if watch and as_json:
        raise typer.BadParameter("--json prints one object, and --watch prints again and again: pass one of them")
    reader = RunReader(target)
    if as_json:
        print_json(reader.look().to_dict())
        return
    from megasched.report import status_view
    from megasched.report.console import report_console

    if not watch:
        status_view.print_status(reader.look(), report_console())
        return
    try:
        status_view.watch(reader.look, report_console(), interval)
    except KeyboardInterrupt:
        return  # it was asked to go on until then
