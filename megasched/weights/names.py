"""Names of a definition's parameters: which of them are one parameter, and which names a source lacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from megasched.errors import CheckpointError, some_of

if TYPE_CHECKING:
    import torch


def canonical_names(definition: torch.nn.Module) -> dict[str, str]:
    """Every parameter name of the definition, mapped to the first name of the same (tied) parameter.

    The values are the canonical names, in the order of ``named_parameters()``; an untied parameter maps
    to itself.
    """
    first: dict[int, str] = {}
    every = definition.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(param), name) for name, param in every}


def compare_names(holder: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raises CheckpointError with every missing and every unexpected name, or returns when there is none.

    Args:
        holder: what lacks or has them, for the message, e.g. ``weights in /models/llama``.
        missing: names that the definition has and the holder lacks.
        unexpected: names that the holder has and the definition lacks.
    """
    if not missing and not unexpected:
        return
    lines = [f"{holder} do not fit the definition"]
    for title, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            lines += [f"  {title} ({len(names)}):", *(f"    {name}" for name in sorted(names))]
    lines.append("  remedy: the config and the weights must be of the same model, under the definition's names")
    raise CheckpointError("\n".join(lines))


def of_passed_over(architecture: str, names: Sequence[str]) -> str:
    """A line that says which stored tensors are left aside.

    Args:
        architecture: the class that leaves them aside.
        names: one at least.
    """
    return (
        f"not taken, as {architecture} does not take them: {some_of(names)}; no "
        "checkpoint of a run has them, and no export"
    )
