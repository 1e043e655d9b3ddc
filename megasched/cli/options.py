"""Defines the options that several commands share, under Megatron's names and short ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from megasched.files import check_writable
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule_file import add_options, check_schedule
from megasched.model_adapters.adapter_file import compile_adapter
from megasched.reading.hf_source import check_hf_model

HfModel = Annotated[str, typer.Option(metavar="DIR", help="The Hugging Face model; only its config.json is read.")]
ModelSchedule = Annotated[
    str,
    typer.Option(
        "--model-schedule",
        metavar="NAME",
        help="As for a run: `auto`, a schedule file, FILE:name, or the name of a registered schedule.",
    ),
]
ScheduleOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE ...", help="As for a run: options of the schedule, as in FILE:KEY=VALUE."),
]
Tp = Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", help="TP ranks.")]
Sp = Annotated[bool, typer.Option("--sp", "--sequence-parallel", help="Sequence parallelism.")]
Pp = Annotated[int, typer.Option("--pp", "--pipeline-model-parallel-size", help="Pipeline ranks.")]
Cp = Annotated[int, typer.Option("--cp", "--context-parallel-size", help="Ranks that share a sequence.")]
Ep = Annotated[int, typer.Option("--ep", "--expert-model-parallel-size", help="Ranks that share out experts.")]
Vp = Annotated[
    int, typer.Option("--vp", "--num-virtual-stages-per-pipeline-rank", help="Model chunks per pipeline rank.")
]
Dp = Annotated[int, typer.Option("--dp", help="Replicas of the whole.")]
HfOverride = Annotated[
    list[str] | None, typer.Option(metavar="FIELD=VALUE ...", help="Change fields of the HF config.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="FILE",
        help="What megasched is told of the architecture, as `megasched new-adapter` writes it.",
    ),
]
Objective = Annotated[
    str | None, typer.Option(metavar="NAME", help="What it is trained to do, if not causal_lm; as for a run.")
]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def with_schedule_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that takes ``--schedule-option`` beside its ``--model-schedule``, and joins them."""

    @wraps(command)
    def joined(schedule_option: list[str] | None = None, **given: Any) -> None:
        command(**given | {"schedule": add_options(given["schedule"], schedule_option or ())})

    signature = inspect.signature(command, eval_str=True)
    parameters = list(signature.parameters.values())
    after = 1 + list(signature.parameters).index("schedule")
    option = inspect.Parameter("schedule_option", parameters[0].kind, default=None, annotation=ScheduleOption)
    parameters.insert(after, option)
    joined.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    joined.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return joined


def check_named(
    hf_model: str,
    schedule: str | None = None,
    *,
    adapter: str | None = None,
    diff: str | None = None,
    **written: Any,
) -> None:
    """Checks that what a command names is there, before it imports what takes seconds.

    Args:
        diff: another schedule.
        written: files to write, None for one that is not, by option.

    Raises:
        ConfigError, ScheduleError: no such file, folder or name, a schedule or an adapter that is no Python, or a
            file that can't be written.
    """
    if schedule is not None:
        check_schedule(schedule)
    if diff is not None:
        check_schedule(diff, "--diff", "; or flags of a layout, e.g. --diff ' --tp 4 --sp'")
    for option, path in written.items():
        check_writable(f"--{option.replace('_', '-')}", path)
    check_hf_model(hf_model)
    if adapter is not None:
        compile_adapter(adapter)


def layout_of(
    tp: int, sp: bool, pp: int, cp: int, ep: int, *, vp: int = 1, dp: int = 1, **more: Any
) -> ParallelDims:
    """Returns the layout that these options describe; ``more`` holds further fields of ``ParallelDims``."""
    return ParallelDims(
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp != 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        data_parallel_size=dp,
        **more,
    )
