"""Defines the command ``megasched``, also called by ``python -m megasched``.

``megasched pretrain_gpt.py ...`` runs a Megatron training script under a schedule; its arguments are Megatron's
and never pass through this parser. Everything else is a subcommand. Modules that take long to import are imported
by the commands that need them, when they run.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from megasched import __version__
from megasched.cli.check.commands import archs, new_adapter, verify
from megasched.cli.launch import launch
from megasched.cli.options import Json, with_schedule_options
from megasched.cli.output import print_found
from megasched.cli.search.commands import plan, tune
from megasched.cli.show.commands import explain, primitives, show
from megasched.cli.status import status
from megasched.cli.tokenize import tokenize
from megasched.cli.weights import export, import_, inspect
from megasched.errors import MegaschedError
from megasched.files import NO_ROOM
from megasched.imports import command_imports, end_quickly
from megasched.json_output import json_only
from megasched.reading.files import printable

# Set to 1, the traceback of an error is printed too; entry.py reads it for the runs of scripts.
TRACEBACK = "MEGASCHED_TRACEBACK"
SEVERAL = ("--hf-override", "--schedule-option")  # take values until the next option

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command, and ends with ``SystemExit`` unless the command is a script.

    The exit status is 0; 1 after an error, which is printed to stderr as one message; 2 after wrong usage. A
    script has its own status.

    Args:
        argv: the arguments after the program's name; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    print_anything()
    atexit.register(end_quickly)
    if arguments and arguments[0].endswith(".py"):
        from megasched.trainer.entry import run_script

        run_script(arguments[0], arguments[1:])
        return
    try:
        app(_one_value_an_option(arguments), prog_name="megasched")
    except MegaschedError as error:
        _end_with(str(error))
    except OSError as error:  # of a path: not there, not to be written, a name that no file can have
        if error.filename is None and error.errno not in NO_ROOM:
            raise
        _end_with(f"{error.filename or 'a file'}: {error.strerror}")


def _end_with(message: str) -> NoReturn:
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exc()
    print(f"megasched: error: {printable(message)}", file=sys.stderr)
    sys.exit(1)


def print_anything() -> None:
    """Makes stdout and stderr escape bytes that have no text in UTF-8, as names of files may contain."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook or a test puts something else there
            stream.reconfigure(errors="backslashreplace")


def _one_value_an_option(arguments: list[str]) -> list[str]:
    """Returns ``--hf-override a=1 b=2``, as Megatron's parser takes it, with the option before each value."""
    found: list[str] = []
    option = ""  # whose values these are
    for argument in arguments:
        if argument in SEVERAL:
            option = argument
        elif "=" not in argument or argument.startswith("-"):
            option = ""
        elif option and found[-1] != option:
            found.append(option)
        found.append(argument)
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"megasched {__version__}")
        raise typer.Exit


@app.callback(
    epilog="megasched SCRIPT.py --model-schedule FILE --hf-model DIR <Megatron's flags> runs a Megatron training "
    "script, e.g. pretrain_gpt.py, under a schedule."
)
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train unmodified Hugging Face models with Megatron-LM's own trainer, told by a schedule file."""


app.command()(primitives)
app.command()(with_schedule_options(show))
app.command()(with_schedule_options(explain))
app.command()(with_schedule_options(verify))
app.command("new-adapter")(new_adapter)
app.command()(archs)
app.command()(with_schedule_options(plan))
app.command(epilog="The study is kept in --dir: stopped by Ctrl-C, the same command goes on.")(tune)
app.command()(tokenize)
app.command("import")(import_)
app.command()(export)
app.command()(inspect)
app.add_typer(launch, name="launch")
app.command()(status)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check versions, devices and patches.

    The exit status is 0 when a run can start here.
    """
    with command_imports(), json_only(as_json):  # a diagnosis consists of imports, most of all
        from megasched.cli.doctor import diagnose, print_diagnosis

        diagnosis = diagnose()
    print_found(diagnosis, print_diagnosis, as_json=as_json)
    raise typer.Exit(0 if diagnosis.runnable else 1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def quickstart(context: typer.Context) -> None:
    """Train a small Llama here and now."""
    from megasched.launch.quickstart.command import main

    raise typer.Exit(main(context.args))
