"""Defines the commands that tell what a schedule is and does: ``megasched primitives``, ``show``, ``explain``."""

from __future__ import annotations

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
from megasched.cli.show.primitives import (
    describe_primitive,
    describe_primitives,
    print_primitives,
)
from megasched.imports import quiet_imports
from megasched.json_output import json_only, print_json
from megasched.language.parallel_dims import Fp8

Fp8Recipe = Annotated[
    str | None, typer.Option(metavar="RECIPE", help="8-bit training: delayed, tensorwise, blockwise, mxfp8.")
]
SeqLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens in a sequence; weighs attention's FLOPs. By default 4096, or the model's positions.",
        show_default=False,
    ),
]
VocabMultiple = Annotated[int, typer.Option(help="The vocabulary is padded to a multiple of this times TP.")]
Diff = Annotated[
    str | None, typer.Option(metavar="SCHEDULE", help="Print what this schedule does otherwise instead.")
]
Records = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Save the schedule's calls, to compare or replay them.")
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with all of it and a step in time instead.")
]
GlobalBatchSize = Annotated[
    int | None, typer.Option(min=1, help="Sequences in a step; for --html.", show_default=False)
]
TraceFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Lay a run's --megasched-trace over it; with --html.")
]


def primitives(
    name: Annotated[str | None, typer.Argument(help="Print all about this one.")] = None, as_json: Json = False
) -> None:
    """Print what a schedule can be made of."""
    with json_only(as_json):
        found = describe_primitives() if name is None else [describe_primitive(name)]
    if as_json:
        rows = [primitive.to_dict() for primitive in found]
        print_json({"primitives": rows} if name is None else rows[0])
    elif name is None:
        print_primitives(found, report_console())
    else:
        print(found[0].documentation)


def show(
    hf_model: HfModel,
    schedule: ModelSchedule = "auto",
    tp: Tp = 1,
    sp: Sp = False,
    pp: Pp = 1,
    vp: Vp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    dp: Dp = 1,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences in one forward.")] = 1,
    fp8_recipe: Fp8Recipe = None,
    seq_length: SeqLength = None,
    make_vocab_size_divisible_by: VocabMultiple = 128,
    hf_override: HfOverride = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = False,
    objective: Objective = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, layers unfolded.")] = False,
    diff: Diff = None,
    records: Records = None,
    html: Html = None,
    global_batch_size: GlobalBatchSize = None,
    trace: TraceFile = None,
) -> None:
    """Print what a schedule does to a model.

    No GPU, no process group and no weights are needed.
    """
    if html is None and (trace is not None or global_batch_size is not None):
        raise typer.BadParameter("--trace and --global-batch-size are for --html")
    if html is not None and (as_json or diff is not None):
        raise typer.BadParameter("--html writes a page of its own; leave --json and --diff out")
    check_named(hf_model, schedule, diff, adapter=adapter)
    fp8 = Fp8(fp8_recipe=fp8_recipe) if fp8_recipe is not None else None
    layout = layout_of(tp, sp, pp, cp, ep, vp=vp, dp=dp, micro_batch_size=micro_batch_size, fp8=fp8)
    with quiet_imports():
        from megasched.cli.show.report_view import show_schedule

    show_schedule(
        schedule,
        hf_model,
        layout,
        sequence_length=seq_length,
        overrides=hf_override or (),
        trust_remote_code=trust_remote_code,
        objective=objective,
        adapter=adapter,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        as_json=as_json,
        diff=diff,
        records=records,
        html=html,
        global_batch_size=global_batch_size,
        trace=trace,
    )


def explain(
    hf_model: HfModel,
    schedule: ModelSchedule = "auto",
    parameter: Annotated[
        str, typer.Option(metavar="GLOB", help="Explain these alone, e.g. `model.layers.0.**`; `**` is all.")
    ] = "**",
    tp: Tp = 2,
    sp: Sp = False,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    seq_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in a sequence. By default 4096, or the model's positions.", show_default=False
        ),
    ] = None,
    hf_override: HfOverride = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = False,
    objective: Objective = None,
    as_json: Json = False,
) -> None:
    """Print for each parameter how it lies over the ranks, what decided so, and what was not done, and why.

    No GPU, no process group and no weights are needed.
    """
    check_named(hf_model, schedule, adapter=adapter)
    layout = layout_of(tp, sp, pp, cp, ep)
    with quiet_imports():
        from megasched.cli.show.explain import explain_schedule, print_explanation

    with json_only(as_json):
        explanation = explain_schedule(
            schedule,
            hf_model,
            layout,
            only=parameter,
            sequence_length=seq_length,
            overrides=hf_override or (),
            trust_remote_code=trust_remote_code,
            objective=objective,
            adapter=adapter,
        )
    print_found(explanation, print_explanation, as_json=as_json)
