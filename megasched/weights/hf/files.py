"""Copies the files of an HF folder other than weights: config, generation config, tokenizer."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from megasched.reading.files import is_regular

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Names of weights, in whatever format (shell patterns, of names in lower case).
WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt*", "*.distcp"),
    *("*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "*.onnx_data*", "*.tflite", "*.nemo"),
)
# What is said of weights, and not true of those that are written: their files, adapters, how they are quantized.
OF_WEIGHTS = (
    "*.index.json",
    "adapter_config.json",
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json"),
)
# What a model's page shows, and what is hidden.
OTHERS = ("readme*", ".*", "__pycache__", "*.pyc")


def write_hf_files(folder: Path, config: PretrainedConfig, source: Path) -> None:
    """Writes the config, and copies the other files of the model.

    Args:
        folder: exists.
        config: of the run, overrides included.
        source: the HF folder (or its ``config.json``) that the config came from, or a hub id.
    """
    (folder / "config.json").write_text(config.to_json_string(use_diff=True))
    copy_hf_files(source, folder)


def copy_hf_files(source: Path, folder: Path) -> None:
    """Copies a model's files other than its config and weights, code included.

    Only regular files inside the folder are copied: a link to elsewhere in someone else's folder would carry a
    file of this user into one that may be published. Files that are left out for this are named on stderr.

    Args:
        source: an HF folder, or its ``config.json``, whose subfolders are then ignored; for anything else (a hub
            id) nothing is copied.
    """
    if not source.exists():
        return
    deep, source = source.is_dir(), source if source.is_dir() else source.parent
    home = _home(source)
    for name in companions(source, folder, deep=deep):
        path = source / name
        if not is_regular(path):
            continue
        if path.resolve().is_relative_to(home):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        else:
            what = f"{path} is a link to {os.readlink(path)}" if path.is_symlink() else f"{path} lies elsewhere"
            print(f"megasched: warning: {what}, outside of {home}: it is not copied", file=sys.stderr, flush=True)


def companions(source: Path, target: Path, *, deep: bool) -> list[Path]:
    """Returns the paths of a model's files besides config and weights, relative to its folder.

    A subfolder with its own weights is skipped: the model in another format, or a checkpoint.

    Args:
        target: destination of the copies; it is skipped if it is inside ``source``.
        deep: search subfolders, too.
    """
    found = []
    for folder, folders, files in source.walk():
        if target.resolve().is_relative_to(folder.resolve()) and folder != source:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not _is_any(name, OTHERS))
        if folder == source:
            folders[:] = [name for name in folders if deep and not _has_weights(source / name)]
        kept = [name for name in files if not _is_any(name, (*WEIGHTS, *OF_WEIGHTS, *OTHERS))]
        found += [(folder / name).relative_to(source) for name in sorted(kept)]
    return [name for name in found if str(name) != "config.json"]  # it is written anew


def _has_weights(folder: Path) -> bool:
    return any(_is_any(name, WEIGHTS) for _, _, files in folder.walk() for name in files)


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _home(source: Path) -> Path:
    """Returns the folder that a model's files must be inside.

    It is the folder itself, or the model's folder in the hub's cache: there ``models--x/snapshots/REVISION`` has
    links into ``models--x/blobs``.
    """
    found = source.resolve()  # the user has named the folder, so it may be a link
    model = found.parent.parent
    return model if found.parent.name == "snapshots" and model.name.startswith("models--") else found


def config_of_export(config: PretrainedConfig, architecture: str, dtype: torch.dtype) -> PretrainedConfig:
    """Returns the config of an exported folder, with its class and the dtype of its weights, and no quantization.

    Nested configs (of a text model, of a tower) are changed, too.
    """
    exported = copy.deepcopy(config)
    exported.architectures = [architecture]
    for part in with_nested(exported):
        part.dtype = dtype
        vars(part).pop("quantization_config", None)  # transformers copies it into the config of the decoder
    return exported


def with_nested(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yields the config and all configs nested in it."""
    from transformers import PretrainedConfig as Config

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, Config):
            yield from with_nested(value)
