"""Keeps the results of runs of one model on meta, for plans that would otherwise repeat them.

Plans of several layouts ask the same questions: a linear is cut alike over 2 ranks and over 8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megasched.analysis.cp.facts import CpFacts
from megasched.analysis.cp.given_positions import takes_counted_positions
from megasched.analysis.cp.propagate import plan_sequence
from megasched.analysis.flops import ForwardFlops, forward_flops
from megasched.analysis.notes.code_facts import CodeFacts, Numbers, code_facts_of
from megasched.analysis.recording.meta_call import evaluating, meta_copy, to_meta
from megasched.analysis.recording.recorder import record_tape
from megasched.analysis.recording.tape import Tape
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.tp.facts import TpAssumptions, TpFacts
from megasched.analysis.tp.propagate import propagate
from megasched.analysis.tp.replay import Rank
from megasched.analysis.tp.size_check import columns_of_unproven_sizes
from megasched.analysis.trials.gradient_scale import why_by_scale
from megasched.analysis.trials.later_calls import why_calls_differ
from megasched.analysis.trials.stand_ins import Trace, sizes_read, trace_unaltered, why_seen
from megasched.analysis.trials.ways import (
    TRIAL,
    Gathered,
    InputsOf,
    Way,
    Ways,
    evaluates_otherwise,
    find_ways,
    numbers_at,
    what_goes_by_length,
)
from megasched.collector import collector_paused
from megasched.definition.build import text_config
from megasched.definition.objectives import objective_of
from megasched.errors import Problem, ScheduleError
from megasched.language.roles import Cut

USUAL_LENGTH = 4096


class AnalysisCache:
    """Holds the analyses of one unchanging model, with one layer stack and one set of inputs.

    Callers must not change the results.

    Args:
        length: length of a run's sequences, where it is known.
    """

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        # What a forward with such sequences has run, where one was made.
        self.code_facts_at_length: CodeFacts | None = None
        self.with_lines = False  # whether tapes have the lines of the code, for those who explain
        self._is_too_long = False
        self._ways: Ways | None = None
        self._problems: dict[Hashable, list[Problem]] = {}
        self._sizes_read: dict[Hashable, set[str]] = {}
        self._numbers: dict[Hashable, list[Numbers]] = {}
        self._derived: dict[Hashable, TpFacts] = {}
        self._tapes: dict[Way, Tape] = {}
        # Ranks -> plans, each with the answers of ``refuse_region`` on which it rests.
        self._sequences: dict[int, list[tuple[dict[str, str], CpFacts]]] = {}
        self._counted: bool | None = None
        self._unproven: dict[Hashable, set[str]] = {}
        self._flops: dict[Hashable, ForwardFlops] = {}
        self._trace: Trace | None = None
        self._probe: nn.Module | None = None  # of the last run; that of any would do

    @collector_paused()
    def propagate(
        self, model: nn.Module, inputs: Mapping[str, Any], assume: TpAssumptions, *, loss_takes_shards: bool
    ) -> TpFacts:
        """Returns what ``tp.propagate.propagate`` derives from the model's tapes, once for each assumption.

        Args:
            model: the definition, replacements made.
            inputs: arguments of its forward in a trial.
        """
        held = [value for name, value in vars(assume).items() if name != "structure"]
        key = loss_takes_shards, *map(_frozen, held)
        if key not in self._derived:
            ways = self.ways(model, inputs, assume.structure)
            others = [(way, self.tape_of(model, inputs, assume.structure, way)) for way in ways.others]
            tape = self.tape_of(model, inputs, assume.structure)
            self._derived[key] = propagate(
                tape, assume, loss_takes_shards=loss_takes_shards, others=others, too_many=ways.too_many
            )
        return self._derived[key]

    def tape_of(
        self, model: nn.Module, inputs: Mapping[str, Any], structure: LayerStack | None, way: Way = TRIAL
    ) -> Tape:
        """Returns the tape of a trial, or of another way through the code."""
        known = TRIAL in self._tapes or self.with_lines  # a structure's tape has no lines
        if way is TRIAL and not known and structure is not None and _is_of(structure.tape, inputs):
            tape = structure.take_tape()
            assert tape is not None
            self._tapes[TRIAL], self._probe = tape, tape.model
        if way not in self._tapes:
            probe = self._probe = self._probe or meta_copy(model)
            given = to_meta(dict(inputs)) if way.length is None else inputs_of(model, inputs)(way.length)
            record = record_tape if structure is None else structure.record
            with evaluating(way.evaluates):
                self._tapes[way] = record(probe, given, answers=dict(way.answers), lines=self.with_lines)
        return self._tapes[way]

    def let_go(self, structure: LayerStack | None) -> None:
        """Drops all tapes, the structure's too: training has no use for them once the results are there."""
        self._tapes.clear()
        self._trace = None
        if structure is not None:
            structure.take_tape()

    def ways(self, model: nn.Module, inputs: Mapping[str, Any], structure: LayerStack | None) -> Ways:
        """Returns what ``find_ways`` finds, without its runs where earlier ones have shown a single way."""
        if self._ways is None:
            short = structure and structure.code_facts
            long = (
                None
                if structure is None or short is None or short.asked
                else self._code_facts_at(model, structure)
            )
            given, single = to_meta(dict(inputs)), short is not None and long is not None
            if single and long.lines == short.lines and not evaluates_otherwise(model, given):
                self._ways = Ways()
            else:
                length = self.length or (None if structure is None else usual_length(model))
                self._ways = find_ways(model, given, inputs_of(model, inputs), length)
        return self._ways

    @collector_paused()
    def why_calls_differ(self, model: nn.Module, inputs: Mapping[str, Any]) -> list[Problem]:
        """Lists the problem that ``later_calls.why_calls_differ`` finds; empty where there is none."""
        return self._once("alike", partial(why_calls_differ, model, inputs))

    @collector_paused()
    def why_seen(
        self, model: nn.Module, inputs: Mapping[str, Any], replaced: Collection[str], *, regions: bool
    ) -> list[Problem]:
        """Lists the problem that ``stand_ins.why_seen`` finds; empty where there is none."""
        return self._once(
            ("seen", regions, *replaced),
            partial(why_seen, model, inputs, self._unaltered_trace(model, inputs), replaced, regions=regions),
        )

    @collector_paused()
    def sizes_read(
        self, model: nn.Module, inputs: Mapping[str, Any], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    ) -> set[str]:
        """Returns the paths that ``stand_ins.sizes_read`` finds."""
        key = tuple((path, *sizes.items()) for path, sizes in shapes.items())
        if key not in self._sizes_read:
            self._sizes_read[key] = sizes_read(model, inputs, self._unaltered_trace(model, inputs), shapes)
        return self._sizes_read[key]

    def _unaltered_trace(self, model: nn.Module, inputs: Mapping[str, Any]) -> Callable[[], Trace]:
        def trace() -> Trace:
            if self._trace is None:
                self._trace = trace_unaltered(model, inputs)
            return self._trace

        return trace

    @collector_paused()
    def why_by_scale(
        self, model: nn.Module, inputs: Mapping[str, Any], structure: LayerStack | None
    ) -> list[Problem]:
        """Lists the problem that ``gradient_scale.why_by_scale`` finds; empty where there is none."""
        return self._once("scale", lambda: why_by_scale(self.tape_of(model, inputs, structure)))

    def _once(self, key: Hashable, find: Callable[[], Problem | None]) -> list[Problem]:
        if key not in self._problems:
            problem = find()
            self._problems[key] = [] if problem is None else [problem]
        return self._problems[key]

    @collector_paused()
    def unproven_sizes(
        self,
        tp_facts: TpFacts,
        rank: Rank,
        cuts: Mapping[str, Cut],
        counts: Mapping[str, tuple[str, ...]],
    ) -> set[str]:
        """Returns what ``columns_of_unproven_sizes`` finds for all calls in the result of ``propagate``."""
        key = (id(tp_facts), *(_frozen(value) for value in vars(rank).values()), _frozen(counts))
        if key not in self._unproven:
            assert self._probe is not None
            found = set[str]()
            for calls in (tp_facts.calls, *tp_facts.other_calls):
                found |= columns_of_unproven_sizes(self._probe, calls, rank, cuts, counts)
            self._unproven[key] = found
        return self._unproven[key]

    def forward_flops(
        self, model: nn.Module, inputs: Mapping[str, torch.Tensor], structure: LayerStack | None
    ) -> ForwardFlops:
        """Returns what ``flops.forward_flops`` counts for the structure's layers."""
        layers = () if structure is None else tuple(structure.layer_paths())
        key = (layers, *((name, tensor.shape) for name, tensor in inputs.items()))
        if key not in self._flops:
            self._probe = self._probe or meta_copy(model)
            self._flops[key] = forward_flops(record_tape(self._probe, inputs), layers)
        return self._flops[key]

    def plan_sequence(
        self, model: nn.Module, structure: LayerStack, size: int, refuse_region: Callable[[str], str]
    ) -> CpFacts:
        """Returns what ``cp.propagate.plan_sequence`` finds, reused while ``refuse_region`` answers alike."""
        known = self._sequences.setdefault(size, [])
        for answers, found in known:
            if all(refuse_region(path) == answer for path, answer in answers.items()):
                return found
        answers = {}

        def ask(path: str) -> str:
            answers[path] = refuse_region(path)
            return answers[path]

        ways = self.ways(model, structure.trial_inputs(), structure)
        found = plan_sequence(model, structure, size, ask, self._takes_counted_positions, ways)
        known.append((answers, found))
        return found

    @collector_paused()
    def goes_by_length(
        self,
        model: nn.Module,
        structure: LayerStack,
        size: int,
        is_whole: Callable[[str], bool],
        is_outside: Callable[[str], bool] = lambda path: False,
        *,
        places: bool,
        gathered: Gathered = MappingProxyType({}),
    ) -> tuple[str, str] | None:
        """Finds an operation that differs between one of ``size`` parts of a sequence and the whole sequence.

        Args:
            is_whole, is_outside, places: arguments of ``what_goes_by_length``.
            gathered: argument of ``numbers_at``.

        Returns:
            The module and the operation; None where there is none, or the model can't run on the sequence.
        """
        compare = partial(what_goes_by_length, is_whole=is_whole, is_outside=is_outside, places=places)
        short, long = structure.code_facts, self._code_facts_at(model, structure)
        if short is not None and long is not None and compare(short.numbers, long.numbers) is None:
            return None
        length = self.length or usual_length(model)
        with suppress(ScheduleError):
            part, whole = (self._numbers_at(model, structure, n, gathered) for n in (length // size, length))
            return compare(part, whole)
        return None

    def _code_facts_at(self, model: nn.Module, structure: LayerStack) -> CodeFacts | None:
        """Returns the facts of a forward on a sequence as long as a run's; None where the model can't run it."""
        if self.code_facts_at_length is None and not self._is_too_long:
            inputs = inputs_of(model, structure.trial_inputs())(self.length or usual_length(model))
            try:
                self.code_facts_at_length = code_facts_of(record_tape(meta_copy(model), inputs, lines=True))
            except ScheduleError:  # more than it has positions for, which a run will say
                self._is_too_long = True
        return self.code_facts_at_length

    def _numbers_at(
        self, model: nn.Module, structure: LayerStack, length: int, gathered: Gathered
    ) -> list[Numbers]:
        key = length, *((path, frozenset(leaves)) for path, leaves in gathered.items())
        if key not in self._numbers:
            inputs = inputs_of(model, structure.trial_inputs())(length)
            self._numbers[key] = numbers_at(model, inputs, gathered)
        return self._numbers[key]

    def _takes_counted_positions(self, model: nn.Module) -> bool:
        if self._counted is None:
            self._counted = takes_counted_positions(model)
        return self._counted


def _is_of(tape: Tape | None, inputs: Mapping[str, Any]) -> bool:
    """Returns whether a tape's forward had equal arguments, where tensors count by shape and dtype alone."""

    def lie(given: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        return {**given, **{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}}

    return tape is not None and lie(tape.inputs) == lie(inputs)


def _frozen(value: Any) -> Hashable:
    """Returns a hashable value that is equal for equal arguments in the same order."""
    return tuple(value.items()) if isinstance(value, Mapping) else value


def inputs_of(model: nn.Module, inputs: Mapping[str, Any]) -> InputsOf:
    """Returns a function that makes arguments of a trial like ``inputs`` for other lengths.

    The model must have an objective.
    """
    batch = next((len(tensor) for tensor in inputs.values() if isinstance(tensor, torch.Tensor)), 1)

    def made(length: int) -> dict[str, Any]:
        given = objective_of(model).trial(getattr(model, "config", None), batch, length)
        return {name: given.get(name, value) for name, value in to_meta(dict(inputs)).items()}

    return made


def usual_length(model: nn.Module) -> int:
    """Returns the sequence length of a run that names none: 4096, or fewer where the model has fewer positions."""
    config = getattr(model, "config", None)
    text = config if config is None else text_config(config)
    found = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return min([USUAL_LENGTH, *(count for count in found if isinstance(count, int) and count > 0)])
