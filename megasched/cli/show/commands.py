"""Defines the commands that tell what a schedule is and does: ``megasched primitives``, ``show``, ``explain``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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
from megasched.cli.show.layout_flags import (
    DistributedOptimizer,
    Fp8Recipe,
    GradReduceInBf16,
    LayoutFlags,
    MicroBatchSize,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeNumLayers,
    TpCommOverlap,
    names_layout,
    parse_layout,
)
from megasched.cli.show.primitives import (
    describe_primitive,
    describe_primitives,
    print_primitives,
)
from megasched.imports import command_imports
from megasched.json_output import json_only, print_json

SeqLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens in a sequence; weighs attention's FLOPs. By default 4096, or the model's positions.",
        show_default=False,
    ),
]
VocabMultiple = Annotated[
    int, typer.Option(min=1, help="The vocabulary is padded to a multiple of this times TP.")
]
Diff = Annotated[
    str | None,
    typer.Option(
        metavar="OTHER",
        help="Compare: with another schedule, or with another layout by its flags, e.g. `--diff '--tp 4 --sp'`.",
    ),
]
Records = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Save the schedule's calls, to compare or replay them.")
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with all of it and a step in time instead.")
]
GlobalBatchSize = Annotated[
    int | None, typer.Option(min=1, help="Sequences in a step; for --html and --gpu.", show_default=False)
]
Gpu = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Predict a step there: a known type, or a TOML file.")
]
TraceFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Lay a run's --megasched-trace over it; with --html.")
]
PredictedTrace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the predicted step as a trace for Perfetto; with --gpu.")
]


def primitives(
    name: Annotated[str | None, typer.Argument(help="Print all about this one.")] = None, as_json: Json = False
) -> None:
    """Print what a schedule can be made of."""
    with json_only(as_json):
        found = describe_primitives() if name is None else [describe_primitive(name)]
    if as_json:
        rows = [asdict(primitive) for primitive in found]
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
    micro_batch_size: MicroBatchSize = 1,
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
    gpu: Gpu = None,
    global_batch_size: GlobalBatchSize = None,
    use_distributed_optimizer: DistributedOptimizer = False,
    grad_reduce_in_bf16: GradReduceInBf16 = False,
    tp_comm_overlap: TpCommOverlap = False,
    recompute_granularity: RecomputeGranularity = None,
    recompute_method: RecomputeMethod = None,
    recompute_num_layers: RecomputeNumLayers = None,
    trace: TraceFile = None,
    predicted_trace: PredictedTrace = None,
) -> None:
    """Print what a schedule does to a model.

    No GPU, no process group and no weights are needed.
    """
    if gpu is None and predicted_trace is not None:
        raise typer.BadParameter("--predicted-trace is for --gpu: without it times have no unit")
    given = LayoutFlags(
        *(tp, sp, pp, vp, cp, ep, dp, micro_batch_size, fp8_recipe),
        *(use_distributed_optimizer, grad_reduce_in_bf16, tp_comm_overlap),
        *(recompute_granularity, recompute_method, recompute_num_layers),
    )
    against = None if diff is None else (diff, given)
    if diff is not None and names_layout(diff):
        against = (schedule, parse_layout(diff))
    predicts = html is not None or gpu is not None or (against is not None and against[1] is not given)
    _refuse_mixed(html, global_batch_size, trace, predicts=predicts, compares=diff is not None, as_json=as_json)
    other = against[0] if against and against[1] is given else None
    check_named(hf_model, schedule, adapter=adapter, diff=other, html=html, predicted_trace=predicted_trace)
    with command_imports():
        from megasched.cli.show.report_view import show_schedule

    asked: Any = {"as_json": as_json, "against": against, "records": records, "html": html, "trace": trace}
    asked |= {"predicted_trace": predicted_trace, "gpu": gpu, "global_batch_size": global_batch_size}
    asked |= {"overrides": hf_override or (), "trust_remote_code": trust_remote_code, "objective": objective}
    asked |= {"adapter": adapter, "make_vocab_size_divisible_by": make_vocab_size_divisible_by}
    show_schedule(schedule, hf_model, given, predicts=predicts, sequence_length=seq_length, **asked)


def _refuse_mixed(
    html: Path | None,
    global_batch_size: int | None,
    trace: Path | None,
    *,
    predicts: bool,
    compares: bool,
    as_json: bool,
) -> None:
    """Refuses options that do not go together.

    Raises:
        BadParameter: there are such.
    """
    if trace is not None and (html is None or compares):
        raise typer.BadParameter("--trace is for --html, of one layout and one schedule: leave --diff out")
    if global_batch_size is not None and not predicts:
        raise typer.BadParameter("--global-batch-size is for --html, --gpu, and --diff with a layout")
    if html is not None and as_json:
        raise typer.BadParameter("--html writes a page of its own; leave --json out")


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
    with command_imports():
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
