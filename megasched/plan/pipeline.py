"""Decides where the pipeline is cut: where the schedule says, or else so that costs are balanced.

Megatron's own flags for cuts come first, without this module. The answer always becomes Megatron's
``pipeline_model_parallel_layout``, so that its bookkeeping (layer offsets, embedding ranks, FLOPs) agrees with
ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megasched.analysis.flops import ForwardFlops
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.errors import Problem, ScheduleError
from megasched.language.schedule import Schedule


def cuts_asked_for(schedule: Schedule, structure: LayerStack, stages: int) -> list[int] | None:
    """Returns the number of layers in each stage by the schedule's cuts; None without any cut.

    Raises:
        ScheduleError: a cut that is not after a layer, or the wrong number of cuts.
    """
    records = [r for r in schedule.records if r.primitive == "cut_pipeline_stage"]
    if not records:
        return None
    problems = []
    ends = set()
    for record in records:
        index = structure.index_of(record.path)
        if index is None or record.path != structure.layer_path(index):
            what = "a pipeline stage can only end after a whole layer"
            remedy = f"cut at {structure.layer_path(0)} to {structure.layer_path(structure.count - 2)}"
            problems.append(Problem(what, record.path, record.source, remedy))
        elif index == structure.count - 1:
            what = "the last stage ends with the model; no cut goes after the last layer"
            problems.append(Problem(what, record.path, record.source, "remove the call"))
        else:
            ends.add(index + 1)
    if not problems and len(ends) != stages - 1:
        what = f"{len(ends)} cuts make {len(ends) + 1} stages; PP x VPP is {stages}"
        problems.append(Problem(what, source=records[0].source, remedy=f"make {stages - 1} cuts, or none"))
    if problems:
        raise ScheduleError(problems)
    bounds = [0, *sorted(ends), structure.count]
    return [stop - start for start, stop in pairwise(bounds)]


def balance(costs: Sequence[float], first: float, last: float, stages: int) -> list[int]:
    """Returns the number of layers in each stage, at least one, so that the costliest stage costs least.

    Among equally good cuts the one with the least sum of squares is taken, which is the most even one.

    Args:
        costs: cost of each layer.
        first: cost of all before the layers, on the first stage.
        last: cost of all after the layers (final norm, head, loss), on the last stage.
        stages: PP x VPP.
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return total[stop] - total[start] + extra

    # The layers spread evenly: no stage of the best cut is dearer than the dearest of this one.
    even = [count * stage // stages for stage in range(stages + 1)]
    bound = max(stage_cost(stage, *pair) for stage, pair in enumerate(pairwise(even)))

    # best[stop] = (dearest, squares, bounds) over the stages so far, which hold the layers before `stop`
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (dearest, squares, bounds) in best.items():
            rest = stages - stage - 1
            stops = [count] if rest == 0 else range(start + 1, count - rest + 1)
            for stop in stops:
                cost = stage_cost(stage, start, stop)
                if cost > bound:  # and so is every longer stage
                    break
                found = (max(dearest, cost), squares + cost * cost, (*bounds, stop - start))
                if stop not in following or found < following[stop]:
                    following[stop] = found
        best = following
    return list(best[count][2])


def layer_costs(flops: ForwardFlops, sequence_length: int) -> tuple[list[float], float, float]:
    """Returns the costs of each layer, of all before the layers and of all after: forward FLOPs of one token.

    Costs are whole numbers, whose sums are exact, so that equal stages cost exactly the same.

    Args:
        flops: forward FLOPs of one sequence.
    """
    layers = [float(round(flops_of_layer / sequence_length)) for flops_of_layer in flops.layers]
    before, after = (float(round(others / sequence_length)) for others in (flops.before, flops.after))
    return layers, before, after


def layout_string(layers: Sequence[int]) -> str:
    """Returns Megatron's layout string: ``E`` embedding, ``t`` layer, ``L`` loss, ``|`` between stages."""
    rows = ["t" * count for count in layers]
    rows[0] = "E" + rows[0]
    rows[-1] += "L"
    return "|".join(rows)
