"""Torch's own database of operators against what the analysis says of them.

Each sample of each operator is run in the analysis with one of its tensors, or all of one shape, cut along a
dimension. Where the answer is how the results are cut, every rank's results, computed from its parts, must be the
parts of the whole's; and its gradients, too. Where the answer is that the whole is needed, nothing is to compare.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megasched.analysis.recording.operators import draws
from megasched.analysis.recording.recorder import record_tape
from megasched.analysis.recording.tape import Operation, Tape, TapeReader
from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.op_call import NeedsWhole
from megasched.analysis.tp.facts import TpAssumptions, TpSpec
from megasched.analysis.tp.operations import LabelRun
from megasched.errors import ScheduleError
from megasched.language.tensor_types import FEATURE_SHARD, ON_ALL_RANKS, ShardDim

# Sizes that are handed to these are numbers in a definition's code, which may be read off a rank's part or may not
# be: analysis/tp/size_check.py runs the code with what a rank has.
SIZES = frozenset(
    (
        *(
            "view",
            "view_as",
            "view_copy",
            "reshape",
            "reshape_as",
            "unflatten",
            "expand",
            "expand_as",
            "expand_copy",
        ),
        *("broadcast_to", "broadcast_tensors", "meshgrid", "sum_to_size", "_unsafe_view", "resize_", "resize_as_"),
    )
)
# Values that nobody has set; and what looks at sizes before it does anything, and so is never silently wrong.
NOT_COMPARED = frozenset(["empty_like", "new_empty", "new_empty_strided", "diff", "linalg.vander"])
LARGEST = 20_000  # elements of a sample

Cuts = dict[int, ShardDim]


@dataclass(frozen=True)
class Sample:
    """A call: its arguments, flattened, and which of them are cut, over how many ranks."""

    function: Callable[..., Any]
    values: list[Any]
    spec: pytree.TreeSpec
    cuts: Cuts
    ranks: int

    def call(self, values: list[Any]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return pytree.tree_leaves(self.function(*args, **kwargs))

    def of_rank(self, rank: int) -> list[Any]:
        return [
            part_of(v, self.cuts[i], rank, self.ranks) if i in self.cuts else v for i, v in enumerate(self.values)
        ]

    def __str__(self) -> str:
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in self.values]
        return f"{shapes} cut {self.cuts} over {self.ranks}"


def part_of(tensor: torch.Tensor, along: ShardDim | None, rank: int, ranks: int) -> torch.Tensor:
    """What a rank has of a tensor: of each component its own piece."""
    if along is None or along == ON_ALL_RANKS:
        return tensor
    lengths = along.components or (tensor.shape[along.dim] // along.outer,)
    places, begin = list[int](), 0
    for length in lengths * along.outer:
        piece, rest = divmod(length, ranks)
        assert not rest, (tensor.shape, along, ranks)
        places += range(begin + rank * piece, begin + (rank + 1) * piece)
        begin += length
    return tensor.index_select(along.dim, torch.tensor(places, dtype=torch.long))


def samples_of(operator: Any, number: int) -> Iterator[tuple[str, Sample]]:
    """Samples with ways to cut them: the operator's name (with _ for the form in place), and a sample.

    Args:
        number: of calls, and of ways to cut each; the first calls are the smallest.
    """
    if torch.float64 not in operator.supported_dtypes("cpu"):
        return
    found = list(islice(operator.sample_inputs("cpu", torch.float64, requires_grad=False), 5 * number))
    name = ".".join(filter(None, (operator.name, operator.variant_test_name)))
    forms = [(name, operator.op)] + [(f"{name}_", form) for form in [operator.get_inplace()] if form]
    for sample in found[:: max(1, len(found) // number)][-number:]:
        values, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        sizes = [value.numel() for value in values if isinstance(value, torch.Tensor)]
        if sum(sizes) > LARGEST or 0 in sizes:
            continue
        for form, function in forms:
            for cuts, ranks in islice(_ways(values), number):
                if form == name or (0 in cuts and not sample.broadcasts_input):
                    yield form, Sample(function, values, spec, cuts, ranks)


def _ways(values: list[Any]) -> Iterator[tuple[Cuts, int]]:
    """Each tensor by itself along each dimension, and all of one shape alike; over as few ranks as can be."""
    floats = {i: v for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.is_floating_point()}
    for index, tensor in floats.items():
        alike = [other for other, value in floats.items() if value.shape == tensor.shape]
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                ranks = next(n for n in range(2, size + 1) if size % n == 0)
                yield {index: ShardDim(dim)}, ranks
                if len(alike) > 1 and alike[0] == index:
                    yield dict.fromkeys(alike, ShardDim(dim)), ranks


# --- what the analysis says


class _Sequence(nn.Module):
    """Calls a function; the analysis runs modules."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.forward = lambda **tensors: call()


def features_answer(sample: Sample) -> list[Any] | None:
    """How each result is cut, by a labelled run; None where the whole is needed, or the run refused."""
    values = _on_meta(sample)
    if (tape := _tape_of(sample, values)) is None:
        return None
    run = LabelRun(tape, TpAssumptions())
    for index, along in sample.cuts.items():
        run._set(
            tape.inputs[str(index)],
            TpSpec(FEATURE_SHARD, frozenset(["column"]), active=True, fed=True, along=along),
        )
    tape.read(run)
    if run.tp_facts.gather or run.tp_facts.problems:
        return None
    labels = [run.label(output) if isinstance(output, torch.Tensor) else TpSpec() for output in tape.output]
    assert all(label.along is not None for label in labels if label.type == FEATURE_SHARD), (
        "cut, and not known where"
    )
    return [label.along for label in labels]


class _SequenceRules(TapeReader):
    """The rules by themselves, as they are asked of a sequence that is cut."""

    def __init__(self, places: dict[int, ShardDim]) -> None:
        self.places = places
        self.whole = False

    def operation(self, operation: Operation) -> None:
        func, args, kwargs, outputs = operation.func, operation.args, operation.kwargs, operation.outputs
        self.whole |= draws(func, args, kwargs)  # other numbers on each rank, as it should be
        if any(id(tensor) in self.places for tensor in operation.operands):
            found = follow(func, args, kwargs, outputs, lambda tensor: self.places.get(id(tensor)))
            self.whole |= not found or None in found
            self.places |= {id(t): along for t, along in zip(outputs, found, strict=True) if along is not None}


def sequence_answer(sample: Sample) -> list[Any] | None:
    """The same by the rules for a sequence that is cut."""
    values = _on_meta(sample)
    if (tape := _tape_of(sample, values)) is None:
        return None
    rules = _SequenceRules({id(tape.inputs[str(index)]): along for index, along in sample.cuts.items()})
    try:
        tape.read(rules)
    except NeedsWhole:
        return None
    return None if rules.whole else [rules.places.get(id(output)) for output in tape.output]


def _on_meta(sample: Sample) -> list[Any]:
    return [v.detach().to("meta") if isinstance(v, torch.Tensor) else v for v in sample.values]


def _tape_of(sample: Sample, values: list[Any]) -> Tape | None:
    try:
        return record_tape(_Sequence(lambda: sample.call(values)), _tensors(values))
    except ScheduleError:  # whatever an operator raises without values is a refusal, with the module's name
        return None


def _tensors(values: list[Any]) -> dict[str, torch.Tensor]:
    return {str(index): value for index, value in enumerate(values) if isinstance(value, torch.Tensor)}


# --- what is true


def fault(sample: Sample, answer: list[Any]) -> str:
    """What is wrong with an answer; empty where nothing is, or the operator itself does not take the sample."""
    try:
        whole, gradients = _results(sample, sample.values, [None] * len(answer), None)
    except (RuntimeError, ValueError, IndexError):
        return ""
    for rank in range(sample.ranks):
        try:
            own, own_gradients = _results(sample, sample.of_rank(rank), answer, rank)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"rank {rank} fails: {error}"
        for index, (wanted, found, along) in enumerate(zip(whole, own, answer, strict=True)):
            if not _same(_part(wanted, along, rank, sample.ranks), found):
                return f"result {index} of rank {rank} is not its part along {along}"
        for index, wanted, found in zip(sample.cuts, gradients, own_gradients, strict=True):
            if not _same(_part(wanted, sample.cuts[index], rank, sample.ranks), found):
                return f"the gradient of argument {index} on rank {rank} is not its part"
    return ""


def _part(value: Any, along: ShardDim | None, rank: int, ranks: int) -> Any:
    return part_of(value, along, rank, ranks) if isinstance(value, torch.Tensor) else value


def _results(
    sample: Sample, values: list[Any], answer: list[ShardDim | None], rank: int | None
) -> tuple[list[Any], list[Any]]:
    """Results, and gradients of what is cut: of a scalar product with numbers of which a rank has its part."""
    own = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]
    in_place = getattr(sample.function, "__name__", "").endswith("_")
    leaves = [own[index].requires_grad_() for index in sample.cuts]
    given = [leaf * 1 for leaf in leaves] if in_place else leaves
    for index, leaf in zip(sample.cuts, given, strict=True):
        own[index] = leaf
    results = sample.call(own)
    scores = []
    for result, along in zip(results, answer, strict=True):
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            continue
        shape = list(result.shape)
        if rank is not None and along not in (None, ON_ALL_RANKS):
            shape[along.dim] *= sample.ranks
        weights = torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).reshape(shape)
        weights = weights if rank is None else part_of(weights, along, rank, sample.ranks)
        scores.append((result * weights).real.sum())
    gradients = torch.autograd.grad(sum(scores), leaves, allow_unused=True) if scores else [None] * len(leaves)
    return [r.detach() if isinstance(r, torch.Tensor) else r for r in results], list(gradients)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (one == other or one != one)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.is_floating_point() or one.is_complex():
        return torch.allclose(one, other, rtol=1e-6, atol=1e-8, equal_nan=True)
    return torch.equal(one, other)


# --- all of them


def sweep(answer_of: Callable[[Sample], list[Any] | None], number: int) -> tuple[Counter[str], list[str]]:
    """Counts of answers (``cut``, ``whole``), and what is wrong with those that were given.

    Args:
        answer_of: how the analysis is asked.
        number: of samples of each operator, and of ways to cut each of them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the database itself, and of operators that are on their way out
        from torch.testing._internal.common_methods_invocations import op_db

        counts: Counter[str] = Counter()
        faults = []
        for operator in op_db:
            if operator.name in SIZES | NOT_COMPARED:
                continue
            torch.manual_seed(0)
            for name, sample in samples_of(operator, number):
                answer = answer_of(sample)
                counts["whole" if answer is None else "cut"] += 1
                if answer is not None and (wrong := fault(sample, answer)):
                    faults.append(f"{name}{sample}: {wrong}")
    return counts, faults
