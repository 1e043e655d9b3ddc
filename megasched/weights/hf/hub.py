"""Finds the folders of models by their id on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from megasched.errors import ConfigError

# Weights in one format, and what lies beside them; code that comes with a model only runs when asked for.
WEIGHTS = ["*.safetensors"]
BESIDE = ["*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]


def local_folder(hf_model: str | Path, *, weights: bool = True) -> Path:
    """Returns the folder of a model: the path itself, or the local copy of the hub's files for that id.

    Missing files are downloaded; ``HF_HUB_OFFLINE=1`` forbids it.

    Args:
        weights: download these as well.

    Raises:
        ConfigError: there is no such folder, and the hub has no such id or can't be reached.
    """
    if Path(hf_model).exists():
        return Path(hf_model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(hf_model), allow_patterns=WEIGHTS + BESIDE if weights else BESIDE))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--hf-model {hf_model}: no folder of this name, and the hub did not give it: {reason}"
        ) from error


def known_folder(hf_model: str | Path) -> Path:
    """Returns the folder of a model like ``local_folder``, but never asks the hub: an id must be in the cache.

    A folder or file is returned unchanged, and so is an id that is not in the cache.
    """
    if Path(hf_model).exists():
        return Path(hf_model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(hf_model), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return Path(hf_model)
