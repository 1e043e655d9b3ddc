"""Layers for later tokens (multi-token prediction) that a config counts and its class does not have.

transformers passes over their tensors when it loads (``_keys_to_ignore_on_load_unexpected``), so no checkpoint of
a run has them, and no export. A config that still counts them has other programs, and transformers' own
``generate(use_mtp=True)``, look for tensors that are not there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from megasched.weights.hf.files import with_nested

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

COUNTS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)


def without_absent_layers(
    config: PretrainedConfig, definition: PreTrainedModel, build: Callable[[PretrainedConfig], PreTrainedModel]
) -> tuple[PretrainedConfig, tuple[str, ...]]:
    """The config with such counts at 0, and what they were, e.g. ``num_nextn_predict_layers = 1``.

    Where the class has other tensors without them, they are its own, and stay.

    Args:
        definition: of this config.
        build: makes a definition of a config, on meta.
    """
    changed, told = copy.deepcopy(config), []
    for part in with_nested(changed):
        for name in COUNTS:
            count = getattr(part, name, None)
            if isinstance(count, int) and count > 0:
                told.append(f"{part.attribute_map.get(name, name)} = {count}")
                setattr(part, name, 0)
    if not told or build(changed).state_dict().keys() != definition.state_dict().keys():
        return config, ()
    return changed, tuple(told)
