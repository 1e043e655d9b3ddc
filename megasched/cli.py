"""The command ``megasched``; also ``python -m megasched``.

``megasched pretrain_gpt.py ...`` runs a Megatron training script under a schedule; its arguments are Megatron's
and never pass through the parser here. Everything else is a command of its own. Only what a command needs is
imported, when it needs it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megasched.cli_options import Cp, Dp, Ep, HfModel, HfOverride, Json, Objective, Pp, Sp, Tp, TrustRemoteCode, Vp
from megasched.cli_search import plan, tune
from megasched.errors import MegaschedError

if TYPE_CHECKING:
    from megasched.layout import Layout
    from megasched.report.show import ShowReport

# Set to 1, the traceback of an error is printed too; entry.py reads it for the runs of scripts.
TRACEBACK = "MEGASCHED_TRACEBACK"
OVERRIDE = "--hf-override"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; ends in ``SystemExit``, except after a script.

    Exit status: 0; 1 for an error, told in one message on stderr; 2 for wrong usage; a script's own.

    Args:
        argv: the arguments after the program's name; the process's own by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0].endswith(".py"):
        from megasched.megatron.entry import run_script

        run_script(arguments[0], arguments[1:])
        return
    try:
        app(_one_value_an_option(arguments), prog_name="megasched")
    except MegaschedError as error:
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exception(error)
        print(f"megasched: error: {error}", file=sys.stderr)
        sys.exit(1)


def _one_value_an_option(arguments: list[str]) -> list[str]:
    """``--hf-override a=1 b=2``, as Megatron's parser takes it, with the option before each value."""
    found: list[str] = []
    inside = False
    for argument in arguments:
        inside = argument == OVERRIDE or (inside and "=" in argument and not argument.startswith("-"))
        if inside and argument != OVERRIDE and found[-1] != OVERRIDE:
            found.append(OVERRIDE)
        found.append(argument)
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        from megasched import __version__

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


@app.command()
def primitives(name: Annotated[str | None, typer.Argument(help="Print all about this one.")] = None) -> None:
    """Print what a schedule can be made of."""
    from megasched.report.primitives_view import print_primitive, print_primitives

    if name is None:
        print_primitives()
    else:
        print_primitive(name)


def _layout(tp: int, sp: bool, pp: int, cp: int, ep: int, *, vp: int = 1, dp: int = 1, **more: Any) -> Layout:
    from megasched.layout import Layout

    return Layout(
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp != 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        data_parallel_size=dp,
        **more,
    )


@app.command()
def show(
    schedule: Annotated[
        str, typer.Argument(help="`auto`, a schedule file, FILE:name, or the name of a registered schedule.")
    ],
    hf_model: HfModel,
    tp: Tp = 1,
    sp: Sp = False,
    pp: Pp = 1,
    vp: Vp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    dp: Dp = 1,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences in one forward.")] = 1,
    fp8_recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="8-bit training: delayed, tensorwise, blockwise, mxfp8.")
    ] = None,
    seq_length: Annotated[int, typer.Option(help="Tokens in a sequence; weighs attention's FLOPs.")] = 4096,
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(help="The vocabulary is padded to a multiple of this times TP.")
    ] = 128,
    hf_override: HfOverride = None,
    trust_remote_code: TrustRemoteCode = False,
    objective: Objective = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, layers unfolded.")] = False,
    diff: Annotated[
        str | None, typer.Option(metavar="SCHEDULE", help="Print what this schedule does otherwise instead.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the schedule's calls, to compare or replay them.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with all of it and a step in time instead.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a step; for --html.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of --megasched-trace of a run; for --html, laid over it.")
    ] = None,
) -> None:
    """Print what a schedule does to a model.

    No GPU, no process group and no weights are needed.
    """
    from megasched.layout import Fp8
    from megasched.report.console import quiet_imports, report_console

    if html is None and (trace is not None or global_batch_size is not None):
        raise typer.BadParameter("--trace and --global-batch-size are for --html")
    if html is not None and (as_json or diff is not None):
        raise typer.BadParameter("--html writes a page of its own; leave --json and --diff out")
    fp8 = Fp8(fp8_recipe=fp8_recipe) if fp8_recipe is not None else None
    layout = _layout(tp, sp, pp, cp, ep, vp=vp, dp=dp, micro_batch_size=micro_batch_size, fp8=fp8)
    with quiet_imports():
        from megasched.report.show import inspect_schedule
        from megasched.report.show_view import print_report

    def inspect(name: str) -> ShowReport:
        return inspect_schedule(
            name,
            hf_model,
            layout,
            sequence_length=seq_length,
            overrides=hf_override or (),
            trust_remote_code=trust_remote_code,
            objective=objective,
            make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        )

    report = inspect(schedule)
    if records is not None:
        from megasched.records import save_records

        save_records(report.records, records)
    if html is not None:
        from megasched.report.page import build_page
        from megasched.report.page_html import write_page

        write_page(build_page(report, global_batch_size=global_batch_size, trace=trace), html)
        print(f"wrote {html}")
    elif diff is not None:
        from megasched.report.diff import compare_reports
        from megasched.report.diff_view import print_diff

        found = compare_reports(report, inspect(diff))
        if as_json:
            print(json.dumps(found.to_dict(), indent=1))
        else:
            print_diff(found, report_console())
    elif as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_report(report, report_console())


@app.command()
def explain(
    hf_model: HfModel,
    schedule: Annotated[str, typer.Argument(help="As for `show`.")] = "auto",
    tp: Tp = 2,
    sp: Sp = False,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    hf_override: HfOverride = None,
    trust_remote_code: TrustRemoteCode = False,
    objective: Objective = None,
    as_json: Json = False,
) -> None:
    """Print for each parameter how it lies over the ranks, what decided so, and what was not done.

    No GPU, no process group and no weights are needed.
    """
    from megasched.report.console import quiet_imports, report_console

    layout = _layout(tp, sp, pp, cp, ep)
    with quiet_imports():
        from megasched.report.explain import explain_schedule

    explanation = explain_schedule(
        schedule,
        hf_model,
        layout,
        overrides=hf_override or (),
        trust_remote_code=trust_remote_code,
        objective=objective,
    )
    if as_json:
        print(json.dumps(explanation.to_dict(), indent=1))
    else:
        from megasched.report.explain_view import print_explanation

        print_explanation(explanation, report_console())


@app.command()
def verify(
    schedule: Annotated[str, typer.Argument(help="As for `show`.")],
    hf_model: Annotated[str, typer.Option(metavar="DIR", help="The Hugging Face model.")],
    tp: Tp = 1,
    sp: Sp = False,
    pp: Pp = 1,
    vp: Vp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    dp: Dp = 1,
    bf16: Annotated[bool, typer.Option("--bf16", help="In bf16, as near to float64 as plain HF in bf16.")] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the small copy; 4, or one a stage.")] = None,
    full_size: Annotated[bool, typer.Option("--full-size", help="No small copy: the model as it is.")] = False,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was found, for --require-certificate of a run.")
    ] = None,
    hf_override: HfOverride = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Check that a scheduled model computes what the unscheduled one does, and find out where it does not.

    One step of Megatron's trainer, rehearsed on this machine's CPUs in float32, on a small copy of the model with
    random weights: loss, logits, hidden states, every gradient, the gradient norm and the optimizer's step are
    compared with plain Hugging Face in one process. The exit status is 0 when all are equal.
    """
    from megasched.report.console import quiet_imports, report_console

    layout = _layout(tp, sp, pp, cp, ep, vp=vp, dp=dp)
    with quiet_imports():
        from megasched.report.verify_view import print_verification
        from megasched.verify.verify import certify, verify_schedule

    found = verify_schedule(
        schedule,
        hf_model,
        layout,
        bf16=bf16,
        full_size=full_size,
        layers=layers,
        overrides=hf_override or (),
        trust_remote_code=trust_remote_code,
        progress=lambda doing: print(f"{doing} ...", file=sys.stderr),
    )
    if certificate is not None:
        certify(found, certificate, overrides=hf_override or (), trust_remote_code=trust_remote_code)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print_verification(found, report_console())
    raise typer.Exit(0 if found.right else 1)


@app.command("new-adapter")
def new_adapter(
    hf_model: HfModel,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the adapter there instead of printing it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not run it on a small copy.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Propose an adapter for an architecture, and check it on a small copy.

    The copy has random weights; it runs one step of Megatron's trainer at TP2, TP2 with SP, and PP2, and is
    compared with the plain Hugging Face model. The exit status is 0 when all are equal, or nothing was checked.
    """
    from megasched.report.console import quiet_imports, report_console

    with quiet_imports():
        from megasched.report.new_adapter_view import print_new_adapter
        from megasched.verify import new_adapter as proposing

    if output is not None:
        proposing.refuse_existing(output, force=force)
    found = proposing.new_adapter(
        hf_model,
        check=not no_check,
        trust_remote_code=trust_remote_code,
        progress=lambda layout: print(f"checking {layout} ...", file=sys.stderr),
    )
    if output is not None:
        proposing.write_new(found.source, output, force=force)
    print_new_adapter(found, output, report_console())
    raise typer.Exit(0 if found.right else 1)


@app.command()
def archs(
    name: Annotated[str | None, typer.Argument(help="Print all about this model type.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Check it here and now; a minute or so.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of the documentation.")] = False,
    as_json: Json = False,
) -> None:
    """Print which architectures are known to compute what HF computes, at which layouts."""
    from megasched.report.console import quiet_imports, report_console

    with quiet_imports():
        from megasched.compatibility import load_matrix
        from megasched.report import archs as report
        from megasched.verify.matrix import check_here

    if run and name is None:
        raise typer.BadParameter("--run needs the name of an architecture")
    if name is None:
        if as_json:
            print(json.dumps(load_matrix(), indent=1))
        elif as_markdown:
            print(report.markdown(load_matrix()), end="")
        else:
            report.print_matrix(report_console())
        return
    results = check_here(name) if run else report.known_results(name)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        report.print_architecture(name, results, report_console())
    good = all(outcome["verdict"] in report.FINE for kind, outcome in results.items() if kind != "facts")
    raise typer.Exit(0 if good else 1)


app.command()(plan)
app.command(epilog="The study is kept in --dir: stopped by Ctrl-C, the same command goes on.")(tune)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check versions, devices and patches.

    The exit status is 0 when a run can start here.
    """
    from megasched.report.console import quiet_imports, report_console

    with quiet_imports():
        from megasched.report.doctor import diagnose

        diagnosis = diagnose()
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=1))
    else:
        from megasched.report.doctor_view import print_diagnosis

        print_diagnosis(diagnosis, report_console())
    raise typer.Exit(0 if diagnosis.runnable else 1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def quickstart(context: typer.Context) -> None:
    """Train a small Llama here and now."""
    from megasched.launch import quickstart

    raise typer.Exit(quickstart.main(context.args))
