"""Decides from runs on meta, never from names, whether a definition keeps the sequences of a row apart.

Attention does, where HF makes its mask. A convolution, a recurrence or a model's own attention code carries one
sequence into the next, and no mask helps: such a model gets one sequence a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megasched.analysis.cp.facts import CpFacts
from megasched.analysis.cp.given_positions import ValuesRun, with_values
from megasched.analysis.cp.trial import takes_positions
from megasched.analysis.recording.meta_call import call_hooks, run_on_meta
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.attributes import set_attribute
from megasched.definition import attention_interface
from megasched.definition.mask_interface import packed_masks
from megasched.errors import Problem, ScheduleError
from megasched.transformers_names import PACKED

_LENGTH = 3  # of each of two sequences; the longest that any window spares
REMEDY = "one conversation a line of the data file, so that a row holds one sequence"


@dataclass
class PackedFacts:
    """Holds what packed sequences do to a definition.

    Attributes:
        problems: why a row can hold one sequence only; empty where it can hold several.
        hands_on_bounds: whether the definition passes ``cu_seq_lens_q`` on to its layers and to attention.
    """

    problems: list[Problem] = field(default_factory=list)
    hands_on_bounds: bool = False


def plan_packed(model: nn.Module, structure: LayerStack, sequence: CpFacts) -> PackedFacts:
    """Decides whether a row of a model's batch can hold several sequences.

    Args:
        sequence: which modules need a whole sequence, from the analysis of context parallelism.
    """
    if not takes_positions(model):
        what = "packed sequences: its forward takes no position_ids, by which it could tell them apart"
        return PackedFacts([Problem(what, remedy=REMEDY)])
    problems = [
        Problem("packed sequences: it mixes tokens otherwise than by attention that Hugging Face masks", path)
        for path in sequence.regions
        if structure.index_of(path) is not None or any(True for _ in model.get_submodule(path).parameters())
    ]
    for problem in sequence.problems:  # both need to know each token's place, and what else it depends on
        problems.append(replace(problem, what=problem.what.replace("context parallelism", "packed sequences")))
    calls: list[tuple[str, bool, bool]] = []
    try:
        calls = _attention_calls(model) if not problems else []
    except ScheduleError as error:
        problems += error.problems
    for path, apart, _ in calls:
        if not apart:
            what = "packed sequences: attention gets no mask that Hugging Face makes, which would divide them"
            problems.append(Problem(what, path))
    return PackedFacts([replace(p, remedy=REMEDY) for p in problems], bool(calls) and all(b for *_, b in calls))


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Runs its body with HF taking a row for one sequence: on meta HF can't see where a sequence begins."""
    undo = set_attribute(PACKED, lambda position_ids: None)
    try:
        yield
    finally:
        undo()


def takes_bounds(model: nn.Module) -> bool:
    """Returns whether a definition's forward takes keyword arguments that it does not name."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _attention_calls(model: nn.Module) -> list[tuple[str, bool, bool]]:
    """Runs two sequences in a row, and returns one tuple for each call of attention.

    Each has the module's path, whether the mask divides the sequences, and whether the call got their bounds.

    Raises:
        ScheduleError: the run fails, as it may with positions that begin anew.
    """
    found: list[tuple[str, bool, bool]] = []
    paths: list[str] = []
    positions = torch.arange(_LENGTH).repeat(2)[None]
    inputs: dict[str, Any] = {"position_ids": positions}
    if takes_bounds(model):
        inputs["cu_seq_lens_q"] = torch.tensor([0, _LENGTH, 2 * _LENGTH], dtype=torch.int32)
    numbers = torch.arange(2).repeat_interleave(_LENGTH)[None]
    probe, tokens = with_values(model)
    inputs |= {"input_ids": tokens, "use_cache": False}

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        found.append((paths[-1], _divides(attention_mask), cu_seq_lens_q is not None))
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    hooks = call_hooks(probe, lambda path, *call: paths.append(path), lambda *result: paths.pop() and None)
    with attention_interface.use_attention(attend), hooks, packed_masks(numbers):
        run_on_meta(probe, inputs, ValuesRun())
    return found


def _divides(mask: torch.Tensor | None) -> bool:
    """Returns whether a mask [b, 1, s, s] keeps the tokens of each of the two sequences from seeing the other."""
    if mask is None or mask.is_meta or mask.dim() != 4:
        return False
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool(seen[..., _LENGTH:, :_LENGTH].any() or seen[..., :_LENGTH, _LENGTH:].any())
