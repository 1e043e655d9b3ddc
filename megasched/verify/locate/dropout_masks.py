"""Checks that TP ranks drop the same places of replicated activations and different ones of sharded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megasched.verify.locate.locate import Finding, Locator
from megasched.verify.recording import RankReport

RATE = 0.25


def switch_on(config: Any) -> bool:
    """Sets every dropout rate in a config and its sub-configs to ``RATE``; returns whether any changed."""
    return bool(switch(config, RATE))


def switch(config: Any, rate: float) -> list[str]:
    """Sets every dropout rate in a config and its sub-configs; returns the names of the fields that changed."""
    found = []
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name and value != rate:
            setattr(config, name, rate)
            found.append(name)
        elif hasattr(value, "to_dict"):
            found += switch(value, rate)
    return found


def wrong_masks(locator: Locator, reports: Sequence[RankReport]) -> Finding | None:
    """Finds the first ``nn.Dropout`` whose TP ranks drop the wrong places; None if there is none.

    Args:
        locator: locator of the run without dropout, which tells where activations are whole.
        reports: reports of the run with dropout.
    """
    for path, masks in _masks(reports).items():
        way = locator.compare((path, "out"), gradient=False)
        if way is None or len(masks) < 2:
            continue
        alike = all(torch.equal(mask, masks[0]) for mask in masks[1:])
        if way.way == "whole" and not alike:
            relation = "the TP ranks drop different places of an activation that all of them hold whole"
            cause = "it draws from the RNG state that differs over TP; fork_rng() is for activations that are cut"
        elif way.way == "cut" and alike:
            relation = "the TP ranks drop the same places of activations of which each has its own part"
            cause = "it draws from the RNG state that TP ranks share, outside of Megatron's model-parallel one"
        else:
            continue
        ranks = tuple(range(len(reports)))
        return locator.finding_at(path, "the places that it drops", ranks, relation, cause)
    return None


def _masks(reports: Sequence[RankReport]) -> dict[str, list[torch.Tensor]]:
    """Maps each dropout that drops anything to the masks of the first replica's TP ranks, in rank order."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for report in reports:
        if report.dp_rank or report.cp_rank or report.facts is None:
            continue
        for path in report.facts.dropouts:
            seen: Mapping[Any, torch.Tensor] = report.sightings.values
            if (path, "in") in seen:
                dropped = (seen[path, "out"] == 0) & (seen[path, "in"] != 0)
                found.setdefault(path, {})[report.tp_rank] = dropped
    held = {path: [masks[rank] for rank in sorted(masks)] for path, masks in found.items()}
    return {path: masks for path, masks in held.items() if any(bool(mask.any()) for mask in masks)}
