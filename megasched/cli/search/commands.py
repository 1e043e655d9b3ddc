"""Defines the commands that look for the fastest setup: ``megasched plan`` by prediction, ``tune`` by runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from megasched.cli.options import Adapter, HfModel, HfOverride, Json, ModelSchedule, TrustRemoteCode, check_named
from megasched.errors import ConfigError
from megasched.imports import command_imports, quiet_imports
from megasched.planner.hardware.hardware import load_hardware


def _calibrate(context: typer.Context, path: Path | None) -> None:
    """Measures this machine instead of planning, and ends the command.

    Options that are given are handled before missing ones, and eager ones before all others. So the values of
    ``--gpu`` and ``--json`` are already set, and the missing ``--hf-model`` has not been reported yet.
    """
    if path is None:
        return
    with quiet_imports():
        from megasched.cli.search.calibrate import calibrate_command

    source = context.get_parameter_source("gpu")
    named = source is not None and source.name != "DEFAULT"
    calibrate_command(path, context.params["gpu"] if named else None, as_json=context.params["as_json"])
    raise typer.Exit


def plan(
    hf_model: HfModel,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the job.")],
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")],
    global_batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a step.")],
    gpu: Annotated[
        str, typer.Option(metavar="TYPE", is_eager=True, help="A known type, or a TOML file.")
    ] = "h100-80gb",
    schedule: ModelSchedule = "auto",
    max_cp: Annotated[int, typer.Option(min=1, help="The most ranks that may share a sequence.")] = 1,
    fp8_recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="8-bit training: delayed, tensorwise, blockwise, mxfp8.")
    ] = None,
    grad_reduce_in_bf16: Annotated[
        bool, typer.Option("--grad-reduce-in-bf16", help="Gradients are summed and sent in bf16.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Layouts to print.")] = 10,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page about the fastest one, too.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_calibrate,
            help="Measure this machine instead, and write FILE.toml for --gpu; takes only --gpu, for the peaks.",
        ),
    ] = None,
    hf_override: HfOverride = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", is_eager=True, help="Print everything as JSON.")] = False,
) -> None:
    """Rank the layouts of a job by predicted step time, among those that fit in memory.

    Exit status 1 if none fits.
    """
    load_hardware(gpu)
    check_named(hf_model, schedule, adapter=adapter, html=html)
    with command_imports():
        from megasched.cli.search.plan import plan_command

    found = plan_command(
        hf_model,
        as_json=as_json,
        top=top,
        html=html,
        gpus=gpus,
        gpu=gpu,
        sequence_length=seq_length,
        global_batch_size=global_batch_size,
        schedule=schedule,
        largest_context=max_cp,
        fp8_recipe=fp8_recipe,
        grad_reduce_in_bf16=grad_reduce_in_bf16,
        overrides=hf_override,
        trust_remote_code=trust_remote_code,
        adapter=adapter,
    )
    raise typer.Exit(0 if found else 1)


def tune(
    space: Annotated[Path, typer.Argument(metavar="SPACE.py", help="A Python file with `def space(space)`.")],
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND ...", help="What runs; the flags that are tried are appended."),
    ],
    sampler: Annotated[str, typer.Option(help="model, tpe or grid.")] = "model",
    trials: Annotated[
        int | None, typer.Option(min=1, help="In all; a fifth of the points by default, at least 10.")
    ] = None,
    iterations: Annotated[int, typer.Option(min=4, help="Of a trial; the first 3 are not measured.")] = 8,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Of a trial.")] = 900,
    warm_start: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Layouts to try first, as `megasched plan --json` prints them."),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit COMMAND by sbatch: its options and script.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of what the sampler draws.")] = 0,
    folder: Annotated[Path, typer.Option("--dir", help="Study, logs and plots.")] = Path("tune"),
    as_json: Json = False,
) -> None:
    """Find the flags and schedule options that train fastest, by short runs of the trainer."""
    missing = [name for name in ("optuna", "sqlalchemy", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing: pip install 'megasched[tune]'")
    from megasched.cli.search.tune import Settings, tune_command

    settings = Settings(sampler, trials, iterations, timeout, warm_start, slurm, seed, folder)
    raise typer.Exit(tune_command(space, command, settings, as_json=as_json))
