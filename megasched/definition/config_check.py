"""Checks the file of an HF config before its class reads it.

A class trusts the file: for a thousand million layers it makes a list with the kind of each, before anyone can
refuse the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megasched.definition.config_file import quietly
from megasched.reading.files import MIB, Expected, is_regular
from megasched.reading.json_file import read_json

CONFIG = Expected("the config of a Hugging Face model", flag="--hf-model", most=16 * MIB)
FORM = {"model_type?": str, "architectures?": object}
# Of any whole number in a config: lengths and vocabularies of published models stay far below.
MOST = 1 << 31
# Of layers, and of layers times experts: both are modules, which are made one by one. The largest published models
# have 126 and 23,000.
MOST_LAYERS, MOST_EXPERTS = 1024, 1 << 17
# By these parts of their names classes call the number of their layers and experts.
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_blocks",
)
LAYERS += ("num_decoder_layers", "num_encoder_layers", "depth", "num_nextn_predict_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts")
# Sizes of which products are the sizes of tensors.
SIZES = (
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "n_inner",
    "d_ff",
    "moe_intermediate_size",
    "vocab_size",
)


def read_config_file(path: Path) -> dict[str, Any]:
    """Returns the dictionary of a ``config.json``.

    Raises:
        ConfigError: it can't be read, or is no JSON object.
    """
    found: dict[str, Any] = read_json(path, CONFIG, FORM)
    return found


def refuse_odd_config(path: Path) -> None:
    """Checks that a config file has no number that no model can have.

    Raises:
        ConfigError: the file can't be read, or it has such a number.
    """
    for why in odd_sizes(read_config_file(path)):
        raise CONFIG.refusal(path, why)


def odd_sizes(file: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yields a message for each size in a config that no model can have, alone or with others."""
    layers = experts = 1
    for name, value in file.items():
        place = f"{where}.{name}" if where else name
        if isinstance(value, dict):
            yield from odd_sizes(value, place)
        if value != value:
            yield f"{place} is NaN, which is no number"
        if type(value) is not int:
            continue
        if not -MOST <= value <= MOST:
            yield f"{place} is {value}; no size of a model is larger than {MOST}"
        if name in LAYERS:
            layers = max(layers, value)
            if value > MOST_LAYERS:
                yield f"{place} is {value}; more than {MOST_LAYERS} layers are not built"
        if name in EXPERTS:
            experts = max(experts, value)
    if layers * experts > MOST_EXPERTS:
        yield f"{where or 'it'} has {layers} layers of {experts} experts; more than {MOST_EXPERTS} are not built"
    width = max((value for name in SIZES[:3] if type(value := file.get(name)) is int), default=0)
    other = max((value for name in SIZES if type(value := file.get(name)) is int), default=0)
    if width * other * layers > 1 << 56:
        sizes = f"{layers} layers of {width} times {other}"
        yield f"{where or 'it'} has {sizes}, which no memory holds"


def config_fault(path: Path, error: Exception) -> str:
    """Returns a class's complaint about a config, with the field if a single one is to blame.

    Args:
        path: of the folder or file.
        error: exception that the class raised, from anywhere in it.
    """
    said = " ".join(str(error).split())
    why = f"{type(error).__name__}: {said}" if not isinstance(error, OSError | ValueError) or not said else said
    file = path / "config.json" if path.is_dir() else path
    if not is_regular(file):
        return why
    blamed = _blamed(read_config_file(file))
    return f"{file}: {why:.600}" + (f"; without the field {blamed} its class takes it" if blamed else "")


def _blamed(file: dict[str, Any]) -> str:
    """Returns the one field without which the class accepts the config; empty if there is no such field."""
    from transformers import AutoConfig

    kind = file.get("model_type")
    if not isinstance(kind, str) or "auto_map" in file:
        return ""

    def taken(values: dict[str, Any]) -> bool:
        try:
            AutoConfig.for_model(**values)
        except Exception:  # each class validates in its own way
            return False
        return True

    with quietly():
        for name, value in file.items():
            less = {key: other for key, other in file.items() if key != name}
            if name != "model_type" and taken(less):
                return f"{name} ({value!r:.60})"
    return ""
