"""Defines the commands for weights: ``megasched import``, ``export`` and ``inspect``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasched.cli.options import Json, Objective, TrustRemoteCode, check_named
from megasched.cli.output import format_bytes, format_count, print_found
from megasched.errors import ConfigError
from megasched.imports import quiet_imports
from megasched.json_output import json_only
from megasched.weights.progress import transfer

if TYPE_CHECKING:
    import torch

    from megasched.weights.exporting import Exported
    from megasched.weights.importing import Imported
    from megasched.weights.inspection import Inspection

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Dtype = Annotated[
    str | None, typer.Option(metavar="bf16|fp16|fp32", help="Of the parameters; as they are, if not given.")
]


def import_(
    hf_model: Annotated[str, typer.Option(metavar="DIR", help="The Hugging Face folder, config and safetensors.")],
    save: Annotated[Path, typer.Option(metavar="CKPT", help="Folder for the checkpoint; a run's --load.")],
    dtype: Dtype = None,
    objective: Objective = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Make a Megatron checkpoint of a Hugging Face folder, so that a large model starts fast.

    One process, whatever the size; no GPU. A run with `--load CKPT` begins with these weights, at iteration 0 and
    at any layout.
    """
    check_named(hf_model)
    with quiet_imports(), json_only(as_json):
        from megasched.weights.importing import import_weights

        found = import_weights(
            hf_model,
            save,
            progress=partial(transfer, "importing"),
            dtype=_dtype(dtype),
            objective=objective,
            trust_remote_code=trust_remote_code,
        )
    print_found(found, print_imported, as_json=as_json)


def export(
    load: Annotated[
        Path, typer.Option(metavar="CKPT", help="A --save folder, one of its checkpoints, or a universal one.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; new, or empty.")],
    hf_model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Config and tokenizer, if not those that the checkpoint has.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a LoRA run, the adapter as PEFT has it, not the merged model.")
    ] = False,
    dtype: Dtype = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of a file, e.g. 5GB or 500MB.")] = "5GB",
    objective: Objective = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Make a Hugging Face folder of a Megatron checkpoint: safetensors, config and tokenizer.

    Or of a universal checkpoint, which DeepSpeed's ds_to_universal writes; --hf-model has its config.
    One process, whatever the size and the layout it was trained at; no GPU, and no model is built.
    `from_pretrained` loads the folder. LoRA adapters are merged, or written alone with --adapter.
    """
    with quiet_imports(), json_only(as_json):
        from megasched.weights.exporting import export_weights

        found = export_weights(
            load,
            output,
            progress=partial(transfer, "exporting"),
            hf_model=hf_model,
            adapter=adapter,
            dtype=_dtype(dtype),
            max_shard_size=_bytes(max_shard_size),
            objective=objective,
            trust_remote_code=trust_remote_code,
        )
    print_found(found, print_exported, as_json=as_json)


def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="As for `export --load`.")],
    as_json: Json = False,
) -> None:
    """Show what a Megatron checkpoint holds: iteration, layout, tensors, optimizer states, files.

    Nothing in it is executed. The exit status is 0 when all of its files are there. `--json` has the arguments of
    the run that wrote it, too.
    """
    with quiet_imports(), json_only(as_json):
        from megasched.weights.inspection import inspect_checkpoint

        found = inspect_checkpoint(checkpoint)
    print_found(found, print_inspection, as_json=as_json)
    raise typer.Exit(1 if found.problems else 0)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: it is one of {', '.join(DTYPES)}")
    return getattr(torch, DTYPES[name])


def _bytes(text: str) -> int:
    for unit, size in UNITS.items():
        number = text.upper().removesuffix(unit).strip()
        if text.upper().endswith(unit) and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * size)
    raise ConfigError(f"--max-shard-size {text}: expected a number and KB, MB or GB (KiB, MiB, GiB), e.g. 5GB")


def print_imported(found: Imported, console: Console) -> None:
    """Prints what was written, and how a run loads it."""
    console.print(f"{found.checkpoint}: {found.architecture}, {_weights(found.tensors, found.bytes)}")
    if found.left_aside:
        console.print(found.left_aside, soft_wrap=True)
    console.print(f"a run starts from it with --load {found.checkpoint}", soft_wrap=True)


def print_exported(found: Exported, console: Console) -> None:
    """Prints what was written, of which checkpoint, and how to load it."""
    kind = "LoRA adapter of " if found.adapter else ""
    weights = f"{kind}{found.architecture} in {found.dtype}, {_weights(found.tensors, found.bytes)}"
    console.print(f"{found.output}: {weights}, of iteration {found.iteration}", soft_wrap=True)
    for count in found.absent:
        left = f"{count} in the config is 0 in the exported one: {found.architecture} has no such layers"
        console.print(left, soft_wrap=True)
    console.print(f"{_loader(found)} loads it", soft_wrap=True)


def _loader(found: Exported) -> str:
    """Returns the line of Python that loads what was written."""
    folder = f'"{found.output}"'
    if found.adapter:
        return f"PeftModel.from_pretrained(model, {folder})"
    if found.auto_class:
        return f"{found.auto_class}.from_pretrained({folder}, trust_remote_code=True)"
    return f"{found.architecture}.from_pretrained({folder})"


def print_inspection(found: Inspection, console: Console) -> None:
    """Prints the contents of a checkpoint as tables."""
    console.print(str(found.folder), style="bold", soft_wrap=True)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("iteration", str(found.iteration))
    if found.model_type:
        facts.add_row("model", found.model_type)
    if found.layout:
        facts.add_row("written at", " ".join(f"{name}{value}" for name, value in _told(found.layout)))
    facts.add_row("weights", f"{format_count(found.parameters)} parameters, {format_bytes(found.bytes)}")
    if found.optimizer:
        size = format_bytes(sum(found.optimizer.values()))
        facts.add_row("optimizer", f"{', '.join(found.optimizer)}: {size}")
    else:
        facts.add_row("optimizer", "none: weights alone")
    files = f"{len(found.files)}, {format_bytes(sum(found.files.values()))}"
    facts.add_row("files", Text.assemble(files, (" incomplete" if found.problems else "", "bold red")))
    for problem in found.problems:
        facts.add_row("", Text(problem, "red"))
    console.print(facts)
    table = Table("tensor", "shape", "dtype", "count", "parameters", "size", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for group in found.tensors:
        shape = " x ".join(map(str, group.shape))
        amounts = (str(group.count), format_count(group.parameters), format_bytes(group.bytes))
        table.add_row(group.name, shape, group.dtype, *amounts)
    console.print(table)


def _told(layout: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the part of a layout that is worth printing: sizes over 1, and options that are on."""
    told = {name: value for name, value in layout.items() if value is True or value not in (None, False, 1)}
    return [(name, "" if value is True else value) for name, value in told.items()] or [("one rank", "")]


def _weights(tensors: int, size: int) -> str:
    return f"{tensors} tensors, {format_bytes(size)}"
