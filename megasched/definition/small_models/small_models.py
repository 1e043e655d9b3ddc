"""Makes small models of architectures: a folder with config and weights, from the config class alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megasched.definition.objectives import CAUSAL_LM, Objective
from megasched.definition.small_models.config_overrides import CHANGES, PART
from megasched.definition.small_models.shrink import LAYERS, deepen, shrink, shrink_copy
from megasched.errors import ConfigError

SEED = 1
# Added to every weight: norms of exactly 1 and biases of exactly 0 would hide mistakes.
JITTER = 0.05


def causal_lm_types() -> list[str]:
    """Returns the model types for which the installed transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(model_type: str) -> Any:
    """Returns the small config of a model type.

    Raises:
        ConfigError: the installed transformers does not know the type.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"the installed transformers has no model type {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    if model_type in PART:
        config_class = type(getattr(config_class(), PART[model_type]))
    return shrink(config_class, CHANGES.get(model_type))


def copy_code(source: str, target: Path, trust_remote_code: bool) -> None:
    """Copies the Python code that comes with a model into the folder of its small model, if it is trusted."""
    if trust_remote_code and Path(source).is_dir():
        for file in Path(source).glob("*.py"):
            shutil.copy(file, target)


def small_copy(config: Any, layers: int = LAYERS, objective: Objective = CAUSAL_LM) -> Any:
    """Returns a small config like a given one, with ``layers`` layers; see ``shrink_copy``.

    Args:
        objective: what the model will be trained to do; one that predicts the next token is a decoder.

    Raises:
        ConfigError: its sizes are inconsistent once they are small.
    """
    try:
        changes = {**CHANGES.get(config.model_type, {}), **objective.small_copy}
        small = shrink_copy(config, changes, decoder=objective.predicts_next)
    except Exception as error:  # each class validates in its own way
        what = f"no small copy of this {type(config).__name__} can be made: {type(error).__name__}: {error}"
        raise ConfigError(what) from error
    if layers != LAYERS:
        deepen(small, layers)
    # Where transformers finds the classes of a model that brings its own code.
    small.name_or_path = config.name_or_path or ""
    if "auto_map" in vars(config):
        small.auto_map = config.auto_map
    return small


def write_small_model(model_type: str, folder: str | Path) -> str:
    """Writes the small model of a model type with ``write_model``."""
    return write_model(small_config(model_type), folder)


def write_model(
    config: Any, folder: str | Path, *, trust_remote_code: bool = False, objective: Objective = CAUSAL_LM
) -> str:
    """Writes ``config.json`` and ``model.safetensors`` (float32; HF's initialisation plus noise).

    Tensors have the names and shapes of the model's parameters; tied ones are written once.

    Args:
        objective: what the model will be trained to do, which decides its class.

    Returns:
        The folder.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    auto_class = getattr(transformers, objective.auto_class)
    model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    noise = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(JITTER * torch.randn(parameter.shape, generator=noise))
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    persistent = model.state_dict()
    buffers = {name: value for name, value in model.named_buffers() if name in persistent}
    tensors.update({name: value.clone().contiguous() for name, value in buffers.items()})
    Path(folder).mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
