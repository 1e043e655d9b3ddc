"""Defines what the analysis of context parallelism finds about a definition (``cp/propagate.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megasched.analysis.stages.hooked_outputs import LeafPath
from megasched.errors import Problem
from megasched.language.tensor_types import ShardDim


class CpRegion(NamedTuple):
    """Describes a module that runs on the whole sequence.

    Attributes:
        inputs: sequence dimension of each split argument, by its number in ``tree_flatten((args, kwargs))``.
        outputs: sequence dimension of each output that is as long as the sequence, by the leaf's number.
    """

    inputs: Mapping[int, ShardDim]
    outputs: Mapping[int, ShardDim]


@dataclass
class CpFacts:
    """Holds what context parallelism does to a definition.

    Attributes:
        regions: modules that run on the whole sequence.
        attention: modules whose attention gets the keys of all ranks.
        recorded: module around the layers -> those leaves of its output that HF's hooks recorded inside of layers,
            and their sequence dimensions; they are gathered there.
        takes_positions: whether the forward takes ``position_ids``.
        problems: why context parallelism would be wrong.
    """

    regions: dict[str, CpRegion] = field(default_factory=dict)
    attention: set[str] = field(default_factory=set)
    recorded: dict[str, dict[LeafPath, ShardDim]] = field(default_factory=dict)
    takes_positions: bool = False
    problems: list[Problem] = field(default_factory=list)
