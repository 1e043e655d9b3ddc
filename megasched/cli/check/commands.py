"""Defines the commands that compare with Hugging Face: ``megasched verify``, ``new-adapter`` and ``archs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megasched.cli.options import (
    Adapter,
    Cp,
    Dp,
    Ep,
    HfModel,
    HfOverride,
    Json,
    ModelSchedule,
    Objective,
    Pp,
    Sp,
    Tp,
    TrustRemoteCode,
    Vp,
    check_named,
    layout_of,
)
from megasched.cli.output import print_found, report_console
from megasched.definition.objectives import find_objective
from megasched.errors import ConfigError
from megasched.imports import command_imports
from megasched.json_output import json_only, print_json

IN_BF16 = (
    "--certificate with --bf16: that compares fewer numbers, and those of one step. One that is made without "
    "--bf16 speaks for runs in bf16, too"
)


def verify(
    hf_model: Annotated[str, typer.Option(metavar="DIR", help="The Hugging Face model.")],
    schedule: ModelSchedule = "auto",
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
    adapter: Adapter = None,
    objective: Objective = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Check that a scheduled model computes what the unscheduled one does, and find out where it does not.

    Three steps of Megatron's trainer in float32, or one in bf16, rehearsed on this machine's CPUs on a small copy
    of the model with random weights: loss, logits, hidden states, every gradient, the gradient norm and the
    weights are compared with plain Hugging Face in one process. The exit status is 0 when all are equal.
    """
    check_named(hf_model, schedule, adapter=adapter, certificate=certificate)
    if bf16 and certificate is not None:
        raise ConfigError(IN_BF16)
    layout = layout_of(tp, sp, pp, cp, ep, vp=vp, dp=dp)
    with command_imports():
        from megasched.verify.report.verification import print_verification
        from megasched.verify.verify import certify, verify_schedule

    with json_only(as_json):
        found = verify_schedule(
            schedule,
            hf_model,
            layout,
            bf16=bf16,
            full_size=full_size,
            layers=layers,
            overrides=hf_override or (),
            trust_remote_code=trust_remote_code,
            objective=find_objective(objective),
            adapter=adapter,
            progress=lambda doing: print(f"{doing} ...", file=sys.stderr),
        )
        if certificate is not None:
            certify(
                found,
                certificate,
                overrides=hf_override or (),
                trust_remote_code=trust_remote_code,
                adapter=adapter,
            )
    print_found(found, print_verification, as_json=as_json)
    raise typer.Exit(0 if found.right else 1)


def new_adapter(
    hf_model: HfModel,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the adapter there instead of printing it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not run it on a small copy.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Propose an adapter for an architecture, and check it on a small copy.

    The copy has random weights; it runs one step of Megatron's trainer at TP2, TP2 with SP, and PP2, and is
    compared with the plain Hugging Face model. The exit status is 0 when all are equal, or nothing was checked.
    """
    check_named(hf_model)
    with command_imports():
        from megasched.cli.check.new_adapter import print_new_adapter
        from megasched.verify.new_adapter import new_adapter as proposing

    if output is not None:
        proposing.refuse_existing(output, force=force)
    with json_only(as_json):
        found = proposing.new_adapter(
            hf_model,
            check=not no_check,
            trust_remote_code=trust_remote_code,
            progress=lambda layout: print(f"checking {layout} ...", file=sys.stderr),
        )
    if output is not None:
        proposing.write_new(found.source, output, force=force)
    if as_json:
        print_json({**found.to_dict(), "output": output and str(output)})
    else:
        print_new_adapter(found, output, report_console())
    raise typer.Exit(0 if found.right else 1)


def archs(
    name: Annotated[
        str | None, typer.Argument(help="A model type or a class, e.g. LlamaForCausalLM, or a part of its name.")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Check it here and now; a minute or so.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of the documentation.")] = False,
    as_json: Json = False,
) -> None:
    """Print which architectures are known to compute what HF computes, at which layouts."""
    from megasched.cli.check import archs as report

    if run and name is None:
        raise typer.BadParameter("--run needs the name of an architecture")
    if as_markdown and (name is not None or as_json):
        raise typer.BadParameter("--markdown prints the page of all architectures: leave the name and --json out")
    if name is None:
        report.print_all(as_json=as_json, as_markdown=as_markdown)
        return
    if run:
        with command_imports():
            from megasched.verify.matrix import check_here
        with json_only(as_json):
            results = check_here(name)
        good = report.print_one(name, results, as_json=as_json)
    else:
        good = report.print_found(name, as_json=as_json)
    raise typer.Exit(0 if good else 1)
