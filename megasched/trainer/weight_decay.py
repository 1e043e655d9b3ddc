"""Finds what weight decay leaves alone, by module and name: biases and norms, of any number of dimensions.

Megatron goes by one dimension, or a name that ends with ``.bias``. Some of Hugging Face's parameters are biases
under other names (all experts' in one, XLNet's of heads), or belong to norms that have a row for each head
(Cohere).
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
    """Returns the names of all biases and of all parameters of norms."""
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, module in definition.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if name.endswith("bias") or is_norm(module)
    )


def is_norm(module: nn.Module) -> bool:
    """Returns whether a module is a norm, by its class's name, as HF's definitions have norms of their own."""
    return "norm" in type(module).__name__.lower() and not list(module.children())


def spare(held: Iterable[tuple[nn.Parameter, ParamMapping]], names: frozenset[str]) -> None:
    """Marks those parameters of a rank that are made only of spared HF tensors.

    Args:
        names: ``spared_names`` of the definition.
    """
    for parameter, assembly in held:
        if all(part.name in names for part in assembly.parts):
            setattr(parameter, SPARED, True)
