"""Model folders by their id on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from megasched.errors import ConfigError

# Weights in one format, and what lies beside them; code that comes with a model only runs when asked for.
WANTED = ["*.safetensors", "*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]


def local_folder(hf_model: str | Path) -> Path:
    """The folder of a model: itself, or where the hub's files of that id are kept on this machine.

    They are downloaded where they are not there yet; ``HF_HUB_OFFLINE=1`` forbids it.

    Raises:
        ConfigError: there is neither a folder nor, for the network that there is, such an id.
    """
    if Path(hf_model).exists():
        return Path(hf_model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(hf_model), allow_patterns=WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--hf-model {hf_model}: no folder of this name, and the hub did not give it: {reason}"
        ) from error


def known_folder(hf_model: str | Path) -> Path:
    """``local_folder`` without asking the hub: where the files of an id lie, if they are on this machine.

    A folder or file is itself, and so is an id that is not known here.
    """
    if Path(hf_model).exists():
        return Path(hf_model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(hf_model), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return Path(hf_model)
