"""What an HF folder holds beside its weights: config, generation config, tokenizer."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Beside the config: by these names transformers looks for them.
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)


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

    Args:
        source: an HF folder, or its ``config.json``; of what is neither (a hub id) nothing is copied.
    """
    if not source.exists():
        return
    source = source if source.is_dir() else source.parent
    for pattern in (*COPIED, "*.py"):
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def config_of_export(config: PretrainedConfig, architecture: str, dtype: torch.dtype) -> PretrainedConfig:
    """The config of an exported folder: it names its class and the dtype of its weights, none quantized."""
    exported = copy.deepcopy(config)
    exported.architectures = [architecture]
    exported.dtype = dtype
    # transformers copies it into the config of the decoder, and looks for it in both.
    for part in (exported, exported.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    return exported
