"""Refuses pipeline stages where what is known of a definition's layers rules them out."""

from __future__ import annotations

from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.plan.plan import Plan

WITHOUT_STAGES = "run it without pipeline stages"


def refuse_stages(plan: Plan, config: Any) -> None:
    """Refuses models whose layers can't be cut into pipeline stages.

    Raises:
        ScheduleError: with the reason.
    """
    structure = plan.structure
    if structure is None:
        return
    if getattr(config, "is_encoder_decoder", False):
        what = "the layers of an encoder-decoder are two lists, and stages are made of one"
        raise ScheduleError(Problem(what, structure.layers, remedy=WITHOUT_STAGES))
    lost = [place.path for place, dim in plan.tp_facts.stage_inputs.items() if dim is None]
    if lost:
        what = "later layers read what it makes, and how that is cut over TP could not be followed"
        raise ScheduleError(Problem(what, lost[0], remedy="run it without pipeline stages, or without TP"))
    if structure.uncuttable:
        what = f"the layers can't be cut into pipeline stages: {structure.uncuttable}"
        raise ScheduleError(Problem(what, structure.layers, remedy=WITHOUT_STAGES))
