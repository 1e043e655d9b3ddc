"""The commands for weights: ``megasched import``, ``export`` and ``inspect``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megasched.cli.options import Json, Objective, TrustRemoteCode
from megasched.errors import ConfigError
from megasched.json_output import json_only, print_json

if TYPE_CHECKING:
    import torch

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
    from megasched.cli.console import quiet_imports, report_console

    with quiet_imports(), json_only(as_json):
        from megasched.cli.weights_view import print_imported
        from megasched.weights.importing import import_weights
        from megasched.weights.progress import transfer

        found = import_weights(
            hf_model,
            save,
            progress=partial(transfer, "importing"),
            dtype=_dtype(dtype),
            objective=objective,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        print_json(_as_dict(found))
    else:
        print_imported(found, report_console())


def export(
    load: Annotated[Path, typer.Option(metavar="CKPT", help="A run's --save folder, or one of its checkpoints.")],
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

    One process, whatever the size and the layout it was trained at; no GPU, and no model is built.
    `from_pretrained` loads the folder. LoRA adapters are merged, or written alone with --adapter.
    """
    from megasched.cli.console import quiet_imports, report_console

    with quiet_imports(), json_only(as_json):
        from megasched.cli.weights_view import print_exported
        from megasched.weights.exporting import export_weights
        from megasched.weights.progress import transfer

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
    if as_json:
        print_json(_as_dict(found))
    else:
        print_exported(found, report_console())


def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="As for `export --load`.")],
    as_json: Json = False,
) -> None:
    """Show what a Megatron checkpoint holds: iteration, layout, tensors, optimizer states, files.

    Nothing in it is executed. The exit status is 0 when all of its files are there. `--json` has the arguments of
    the run that wrote it, too.
    """
    from megasched.cli.console import quiet_imports, report_console

    with quiet_imports(), json_only(as_json):
        from megasched.cli.weights_view import print_inspection
        from megasched.weights.inspection import inspect_checkpoint

        found = inspect_checkpoint(checkpoint)
    if as_json:
        print_json(found.to_dict())
    else:
        print_inspection(found, report_console())
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


def _as_dict(found: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(found).items()}
