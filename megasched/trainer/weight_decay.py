"""What weight decay leaves alone, by module and name: biases and norms, however many dimensions they have.

Megatron goes by one dimension, or a name that ends with ``.bias``. Of Hugging Face's parameters some are biases
under other names (all experts' in one, XLNet's of heads), or of norms that have a row for each head (Cohere).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from megasched.plan.param_mapping import ParamMapping

# Attribute of a parameter that is not decayed; megasched/trainer/seams/weight_decay.py tells Megatron of it.
SPARED = "spared_from_weight_decay"


def spared_names(definition: nn.Module) -> frozenset[str]:
    """Names of all biases and of all that norms learn."""
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, module in definition.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if name.endswith("bias") or is_norm(module)
    )


def is_norm(module: nn.Module) -> bool:
    """By the name of its class, as HF's definitions have norms of their own."""
    return "norm" in type(module).__name__.lower() and not list(module.children())


def spare(held: Iterable[tuple[nn.Parameter, ParamMapping]], names: frozenset[str]) -> None:
    """Marks the parameters of a rank that are made of such tensors of HF's.

    Args:
        names: ``spared_names`` of the definition.
    """
    for parameter, assembly in held:
        if all(part.name in names for part in assembly.parts):
            setattr(parameter, SPARED, True)
