"""Compares one step of a scheduled module with the unscheduled one's, in the groups of this process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import nn

from megasched.definition.images.convolutions import is_batch_norm
from megasched.definition.module_copy import copy_module, copy_value
from megasched.errors import ConfigError, MegaschedError, some_of
from megasched.language.schedule import Schedule
from megasched.language.schedule import replay as repeat_calls
from megasched.layers.losses.cross_entropy import ParallelLossFunction
from megasched.lowering.build import build, create_schedule, placements_of, plan_of
from megasched.verify.compare_step import checks_of, unexplained, why_wrong
from megasched.verify.library.module_step import Example, ModuleStep, take_step
from megasched.verify.locate.bisect import Call
from megasched.verify.locate.locate import Finding, Locator
from megasched.verify.numbers import Check, Errors, Number, add_gradients, add_replicas, difference
from megasched.verify.parity import TOLERANCE
from megasched.verify.plain.draws import NOTE
from megasched.verify.plain.loading import nudge, own_experts
from megasched.verify.plain.watching import Float64, Sightings
from megasched.verify.recording import PlanFacts, RankReport, components_of
from megasched.verify.reference import DRAWS, HfStep, floor_of, off_by

HALVES = (torch.float16, torch.bfloat16)
OWN_SAMPLES = "each data-parallel rank normalizes its own samples: sync_batch_norm() takes the statistics over all"


class ModuleComparison:
    """Runs the module of a schedule with it, with some of its calls alone, and without it.

    Attributes:
        calls: all calls of the schedule.
    """

    def __init__(self, schedule: Schedule, example: Example) -> None:
        """Runs the step of the unscheduled module.

        Raises:
            ConfigError: its loss is not finite.
        """
        self._schedule, self._model, self._example = schedule, schedule.root.mod, example
        self.calls = tuple((record.path, str(record), record.source) for record in schedule.records)
        self._rank, self._replicas = _rank_here()
        self._plain = self._unscheduled(0)
        if not math.isfinite(loss := self._plain.losses[0]):
            raise ConfigError(
                f"without the schedule, too, the loss is {loss}: on these inputs nothing can be compared"
            )
        self._facts = PlanFacts((), {}, {}, (), self.calls, ())
        self._remarks: list[str] = []

    def run(self, without: Sequence[Call] = ()) -> list[ModuleStep]:
        """Runs the scheduled step and returns those of all ranks, in their order.

        Args:
            without: calls to leave out.

        Raises:
            MegaschedError: the schedule was refused.
            RuntimeError: the step failed, on whichever rank.
        """
        mine: Any
        try:
            mine = self._run(without)
        except MegaschedError as error:
            mine = error
        except Exception as error:  # of whatever kind: it is the user's code that runs
            mine = RuntimeError(f"{type(error).__name__}: {error}")
        every = [mine]
        if self._rank is not None:
            every = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(every, mine)
        for one in every:
            if isinstance(one, Exception):
                raise one
        return every

    def judge(self, steps: list[ModuleStep]) -> tuple[list[Check], str, Finding | None]:
        """Returns every check, a remark on them, and the first place that goes wrong, or None."""
        errors = self._errors(steps, self._plain)
        wrong, why = unexplained(errors, lambda: self._against_exact(steps, errors))
        copies = _of_copies(steps)
        checks = [*checks_of(errors, wrong), *copies]
        if all(check.equal for check in checks):
            return checks, why, None
        layout, logits = self._schedule.layout, [v for n, v in self._plain.outputs.items() if n == "logits"]
        expected = HfStep(0.0, logits, self._whole(steps, "gradients"), 0.0, _of_first_replica(self._plain, steps))
        locator = Locator(steps, expected, layout.tp, layout.cp, 1, self._facts)
        finding = locator.first() or _furthest(locator, errors, wrong, copies)
        if self._replicas is not None and is_batch_norm(dict(self._model.named_modules()).get(finding.where)):
            finding = replace(finding, cause=OWN_SAMPLES)
        return checks, why_wrong(wrong, {}) if wrong else "copies: beyond the tolerance", finding

    def notes(self, steps: list[ModuleStep]) -> list[str]:
        """Returns what no number tells: what was not compared, and what is not drawn at random."""
        left = sorted(self._plain.gradients.keys() - self._whole(steps, "gradients").keys())
        found = list(self._remarks)
        found += [f"frozen, or made anew, by the schedule, so not compared: {some_of(left)}"] if left else []
        left = sorted(self._plain.buffers.keys() - self._whole(steps, "buffers").keys())
        found += [f"buffers that are not compared: {some_of(left)}"] if left else []
        silenced = sorted({*self._plain.silenced, *(path for step in steps for path in step.silenced)})
        found += [f"dropouts are off on both sides: {some_of(silenced)}"] if silenced else []
        return found + ([NOTE] if self._plain.drawn else [])

    # runs -------------------------------------------------------------------------------------------

    def _copy(self, memo: dict[int, Any]) -> nn.Module:
        made: nn.Module = copy_module(self._model, memo)
        return made.float() if any(parameter.dtype in HALVES for parameter in made.parameters()) else made

    def _run(self, without: Sequence[Call]) -> ModuleStep:
        memo: dict[int, Any] = {}
        sch = create_schedule(self._copy(memo), self._schedule.layout, self._schedule.roles)
        kept = [r for r in self._schedule.records if (r.path, str(r), r.source) not in without]
        repeat_calls([replace(r, arguments=copy_value(dict(r.arguments), memo)) for r in kept], sch)
        example, replicas = self._example, self._replicas
        if replicas is not None:
            count, rank, size = example.samples, replicas.rank(), replicas.size()
            example = example.mapped(lambda t: t.chunk(size)[rank] if t.dim() and len(t) == count else t)
        built = build(sch, inputs=example.inputs)
        plan = plan_of(built)
        if isinstance(head := getattr(built, "loss_function", None), ParallelLossFunction):
            built.register_forward_hook(partial(_with_whole_logits, head))
        if not without:
            self._facts = replace(self._facts, cuts=dict(plan.cuts), components=components_of(plan))
        placements = {**plan.placements, **placements_of(built)}
        rank = self._rank or RankReport()
        return take_step(built, example, rank, placements, replicas, plan.renamed)

    # errors -----------------------------------------------------------------------------------------

    def _whole(
        self, steps: list[ModuleStep], what: str, plain: ModuleStep | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns the unscheduled step's tensors that all ranks have in that shape, and train or freeze alike.

        Args:
            what: ``gradients``, ``weights`` or ``buffers``.
            plain: another unscheduled step.
        """
        plain = plain or self._plain
        return {
            name: value
            for name, (value, _) in getattr(plain, what).items()
            if all(
                name in (held := getattr(step, what))
                and held[name][1].shape == (*value.shape,)
                and (name in step.trained) == (name in plain.trained)
                for step in steps
            )
        }

    def _errors(self, steps: list[ModuleStep], plain: ModuleStep, tp: int = 0) -> Errors:
        found, tp = Errors(), tp or self._schedule.layout.tp
        for rank, step in enumerate(steps):
            found.add(Number("loss", 0), off_by(step.losses[0], plain.losses[0]), rank)
            for name, wanted in plain.outputs.items():
                got = step.outputs.get(name)
                found.add(Number("output", 0, name), torch.inf if got is None else difference(got, wanted), rank)
        gradients = self._whole(steps, "gradients", plain)
        add_gradients(found, steps, gradients, tp)
        weights = self._whole(steps, "weights", plain)
        add_replicas(found, "weight", -1, steps, weights, tp, lambda name: -max(plain.changes[name], 1e-5))
        add_replicas(found, "buffer", -1, steps, self._whole(steps, "buffers", plain), tp, lambda name: 0.0)
        return found

    def _against_exact(self, steps: list[ModuleStep], errors: Errors) -> tuple[Errors, Iterator[Errors]]:
        """Returns the errors against float64: of the scheduled steps, and of draws of the unscheduled one.

        Args:
            errors: those against float32; where the module has no float64, it counts as exact.
        """
        exact = self._exact(0)
        if exact is None:
            return errors, iter([self._errors([self._plain], self._plain, tp=1)])
        return self._errors(steps, exact), self._own_errors(exact)

    def _own_errors(self, exact: ModuleStep) -> Iterator[Errors]:
        """Yields the errors of the unscheduled step, then those with each weight off by a rounding."""
        yield self._errors([self._plain], exact, tp=1)
        for draw in range(1, DRAWS):
            other = self._exact(draw)
            assert other is not None  # as it was before
            yield self._errors([self._unscheduled(draw)], other, tp=1)

    def _unscheduled(self, draw: int) -> ModuleStep:
        nudge(model := self._copy({}), draw)
        return take_step(model, self._example, RankReport(), {})

    def _exact(self, draw: int) -> ModuleStep | None:
        """Returns the unscheduled step in float64; None where the module has none, which a remark says."""
        nudge(model := self._copy({}), draw)
        model = model.double()
        if hasattr(model, "set_experts_implementation"):
            own_experts(model)
        example = self._example.mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        try:
            with Float64():
                return take_step(model, example, RankReport(), {})
        except Exception as error:  # of whatever kind: it is the user's code that runs
            self._remarks = [f"nothing tells rounding from mistakes, as the module has no float64: {error}"]
            return None


def _with_whole_logits(loss: ParallelLossFunction, model: Any, args: Any, output: Any) -> Any:
    """Gathers the logits of a model that leaves them cut, to compare them with the unscheduled module's."""
    size = model.config.get_text_config().vocab_size
    output.logits = gather_from_tensor_model_parallel_region(output.logits, group=loss.group)[..., :size]
    return output


def _rank_here() -> tuple[RankReport | None, Any]:
    """Returns this rank's numbers, and the data-parallel group if there are several such ranks."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None, None
    group = parallel_state.get_data_parallel_group()
    own = RankReport()
    own.note_ranks()
    return own, group if group.size() > 1 else None


def _of_copies(steps: Sequence[ModuleStep]) -> list[Check]:
    """Returns the check that ranks which hold the same part of a tensor agree on it; none for one rank."""
    if len(steps) == 1:
        return []
    first: dict[Any, torch.Tensor] = {}
    floor = floor_of({name: value for name, (value, _) in steps[0].gradients.items()})
    worst = 0.0, ""
    for step in steps:
        for what, held in (("gradient of ", step.gradients), ("", {**step.weights, **step.buffers})):
            for name, (value, placement) in held.items():
                part = (step.ep_rank if placement.group == "ep" else step.tp_rank) if placement.sharded else 0
                one = first.setdefault((what, name, part), value)
                worst = max(worst, (difference(value, one, floor if what else 0.0), what + name))
    return [Check("copies", worst[0], TOLERANCE, worst[1], worst[0] <= TOLERANCE)]


def _of_first_replica(plain: ModuleStep, steps: Sequence[ModuleStep]) -> Sightings:
    """Returns what the first data-parallel rank is to see of the whole batch: tensors have its samples first."""
    seen, replicas = plain.sightings, 1 + max(step.dp_rank for step in steps)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(replicas)[0] if tensor.dim() and len(tensor) % replicas == 0 else tensor

    values, gradients = ({e: own(t) for e, t in held.items()} for held in (seen.values, seen.gradients))
    return Sightings(seen.order, values, gradients, seen.sources)


def _furthest(locator: Locator, errors: Errors, wrong: dict[Number, float], copies: list[Check]) -> Finding:
    """Returns a finding for what is furthest off where no module shows anything."""
    if not wrong:
        return locator.finding_at(copies[0].worst, "the copies of it", tuple(range(len(locator.reports))), "", "")
    most = max(wrong, key=lambda number: wrong[number])
    ranks = tuple(rank for rank, error in sorted(errors.ranks[most].items()) if error > TOLERANCE)
    found = locator.finding_at(most.name or most.kind, f"its {most.kind}", ranks, "", "")
    direction = "backward" if most.kind in ("gradient", "weight") else "forward"
    return replace(found, direction=direction, error=wrong[most])
