"""What context parallelism does to a definition; found by ``sequence_run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megasched.analysis.stages.hooked_outputs import LeafPath
from megasched.errors import Problem
from megasched.language.tensor_types import ShardDim


class CpRegion(NamedTuple):
    """A module that is run on the whole sequence.

    Attributes:
        inputs: where the sequence is in its arguments: number of a leaf in
            ``tree_flatten((args, kwargs))``.
        outputs: the same in what it returns.
    """

    inputs: Mapping[int, ShardDim]
    outputs: Mapping[int, ShardDim]


@dataclass
class CpFacts:
    """What context parallelism does to a definition.

    Attributes:
        regions: modules that are run on the whole sequence.
        attention: modules whose attention gets the keys of all ranks.
        recorded: module around the layers -> those leaves of what it returns that HF's hooks recorded inside of
            layers, and where the sequence is in them; they are gathered there.
        takes_positions: the forward takes ``position_ids``.
        problems: what can't be made right.
    """

    regions: dict[str, CpRegion] = field(default_factory=dict)
    attention: set[str] = field(default_factory=set)
    recorded: dict[str, dict[LeafPath, ShardDim]] = field(default_factory=dict)
    takes_positions: bool = False
    problems: list[Problem] = field(default_factory=list)
