"""What an HF folder holds beside its weights: config, generation config, tokenizer."""

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
    """Writes the config, and copies what goes with it.

    Args:
        folder: exists.
        config: as the run has it, overrides included.
        source: the HF folder (or its ``config.json``) that the config came from, or a hub id.
    """
    (folder / "config.json").write_text(config.to_json_string(use_diff=True))
    copy_hf_files(source, folder)


def copy_hf_files(source: Path, folder: Path) -> None:
    """Copies what goes with a model beside its config and weights; code that comes with a model as well.

    Regular files that lie inside of the folder alone: a link to elsewhere in someone else's folder would carry a
    file of this user's into one that may be published. What is left out is said on stderr.

    Args:
        source: an HF folder, or its ``config.json``, beside which no folder is looked into; of what is neither (a
            hub id) nothing is copied.
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
    """Names of what goes with a model, relative to its folder.

    A folder in it that holds weights of its own is passed over: the model in another format, a checkpoint.

    Args:
        target: where they will be copied to; not looked into, if it lies in ``source``.
        deep: look into folders, too.
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
    """What the files of a folder must lie in: the folder, and of one in the hub's cache, the model's: there
    ``models--x/snapshots/REVISION`` has links into ``models--x/blobs``."""
    found = source.resolve()  # the user has named the folder, so it may be a link
    model = found.parent.parent
    return model if found.parent.name == "snapshots" and model.name.startswith("models--") else found


def config_of_export(config: PretrainedConfig, architecture: str, dtype: torch.dtype) -> PretrainedConfig:
    """The config of an exported folder: it names its class and the dtype of its weights, none quantized, and so do
    the configs in it (of a text model, of a tower)."""
    exported = copy.deepcopy(config)
    exported.architectures = [architecture]
    for part in with_nested(exported):
        part.dtype = dtype
        vars(part).pop("quantization_config", None)  # transformers copies it into the config of the decoder
    return exported


def with_nested(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """The config, and all that are in it."""
    from transformers import PretrainedConfig as Config

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, Config):
            yield from with_nested(value)
