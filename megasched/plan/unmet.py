"""Parameters that the labelled run has not met, because values chose others of their kind: experts in a list.

How their gradients are made up over TP is that of another one which was met, in the same list and of the same
kind, where both are whole. Nothing else is known of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from megasched.analysis.choices import others_of_its_kind
from megasched.analysis.meta_call import meta_copy, to_meta
from megasched.analysis.reach import find_reach
from megasched.errors import Problem
from megasched.plan.plan import Plan


def like_those_met(
    plan: Plan, model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[dict[str, str], list[Problem]]:
    """Parameter -> another that was met and stands for it, and what is wrong with those that have none.

    Args:
        model: what the labelled run was of.
        inputs: its arguments.
    """
    met, trained = plan.derived.met, {name for name, p in model.named_parameters() if p.requires_grad}
    unmet = {name for name in plan.placements if name in trained and name not in met}
    if plan.layout.tp == 1 or not unmet:
        return {}, []
    with_loss = plan.structure is not None and plan.structure.takes_labels
    reach = find_reach(meta_copy(model), to_meta(dict(inputs)), with_loss=with_loss)
    found, problems = dict[str, str](), dict[str, Problem]()
    for name in (name for name in reach.perhaps if name in unmet):
        twin = _met_twin(plan, model, name)
        path = name.rpartition(".")[0]
        if twin is not None and path not in plan.cuts:
            found[name] = twin
        else:
            problems.setdefault(path, _problem(path))
    return found, list(problems.values())


def _met_twin(plan: Plan, model: nn.Module, name: str) -> str | None:
    """The first of its kind that was met and is whole as it is."""
    others: Iterable[str] = (other for _, other in others_of_its_kind(model, name))
    whole = not plan.placements[name].sharded
    return next(
        (o for o in others if o in plan.derived.met and whole and not plan.placements[o].sharded),
        None,
    )


def _problem(path: str) -> Problem:
    what = "values decide whether it is called, no trial has met it, and how its gradient is made up over TP is "
    what += "not known"
    return Problem(what, path, remedy="leave all modules of its list whole, or run it without TP")
