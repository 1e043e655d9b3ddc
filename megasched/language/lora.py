"""Describes the LoRA adapter of a linear (Hu et al., 2021, arXiv 2106.09685) in PEFT's terms (``LoraConfig``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from megasched.language.records import Record

# Children of an adapted linear, by PEFT's names.
A, B, DROPOUT = "lora_A", "lora_B", "lora_dropout"


@dataclass(frozen=True)
class Lora:
    """Describes an adapter that adds ``scaling * B(A(dropout(x)))`` to the output of a linear.

    Attributes:
        rank: rows of A [rank, in] and columns of B [out, rank] (PEFT's ``r``).
        alpha: scale of the added output (``lora_alpha``).
        dropout: probability of dropout on the input of A (``lora_dropout``).
        use_rslora: divide alpha by the square root of the rank instead of the rank.
        fan_in_fan_out: the linear keeps its weight as [in, out], as HF's ``Conv1D`` does.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    use_rslora: bool = False
    fan_in_fan_out: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def is_linear_class(module: nn.Module) -> bool:
    """Returns whether a module is a linear by its class: torch's, or HF's ``Conv1D``."""
    from torch import nn

    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is HF's ``Conv1D``, a linear that keeps its weight as [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def adapted(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """Returns the arguments of each ``adapt`` record, by the path of the linear that it adapts."""
    return {record.path: record.arguments for record in records if record.primitive == "adapt"}


def adapter_names(paths: Iterable[str]) -> list[str]:
    """Returns the names of the parameters that adapters add to the linears at these paths."""
    return [f"{path}.{part}.weight" for path in paths for part in (A, B)]
