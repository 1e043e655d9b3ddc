"""DTensor has strategies of its own for operators that are cut: they say what the rules say, or that of less.

One process: the group of processes is torch's fake one, and nothing is computed.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from megasched.language.tensor_types import ShardDim
from tests.analysis.rules.by_parts import Example, answer, part_of
from tests.analysis.rules.computed import pointwise, pointwise_overloads
from tests.analysis.rules.examples import EXAMPLES

MOST_RANKS = 3
# Arguments that DTensor reads by their names (logsumexp_strategy in torch/distributed/tensor/_ops/_math_ops.py).
BY_NAME = {(torch.ops.aten.logsumexp.default, "keepdim")}
# Where a rule leaves cut what DTensor gathers, or makes whole: why it may.
SIZES = "sizes are those that code reads off a rank's tensors; DTensor's are those of the whole"
FINER = {
    **dict.fromkeys(["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"], SIZES),
    **dict.fromkeys(
        ["view", "reshape", "_unsafe_view", "_reshape_alias"],
        "a view may merge and split dimensions, and leave what is cut in one of them",
    ),
    **dict.fromkeys(["split", "split_with_sizes"], "one piece may be all, of which each rank has its part"),
    **dict.fromkeys(["tril", "triu"], "a triangle is of the last two dimensions, and leaves the others alone"),
    "cat": "each tensor gives its components, cut one by one, which no DTensor placement says",
    "repeat": "of copies that follow each other each is cut, as after a view that has merged dimensions",
    "convolution": "a kernel of one place asks for no neighbours along the dimension that is cut",
}


@pytest.fixture(scope="module", autouse=True)
def fake_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=MOST_RANKS, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def by_position(example: Example) -> Example:
    """DTensor's strategies read arguments where the schema has them."""
    kwargs, args = dict(example.kwargs), list(example.args)
    for argument in example.op._schema.arguments[len(args) :]:
        if argument.kwarg_only or not kwargs or (example.op, argument.name) in BY_NAME:
            break
        args.append(kwargs.pop(argument.name, argument.default_value))
    return replace(example, args=tuple(args), kwargs=kwargs)


def opinion(example: Example, places: list[ShardDim]) -> str:
    """What DTensor says of an answer: ``same``, ``finer`` (it would have the whole of something), ``other``, and
    what; or ``none``, where it has no strategy for the call."""
    example = by_position(example)
    leaves, spec = example.leaves()
    mesh = DeviceMesh("cpu", list(range(example.ranks)), _init_backend=False)

    def distributed(index: int, leaf: torch.Tensor) -> DTensor:
        along = example.cuts.get(index)
        placement: Placement = Replicate() if along is None else Shard(along.dim)
        return DTensor.from_local(part_of(leaf, along, 0, example.ranks), mesh, [placement], run_check=False)

    args, kwargs = pytree.tree_unflatten(
        [distributed(i, leaf) if isinstance(leaf, torch.Tensor) else leaf for i, leaf in enumerate(leaves)], spec
    )
    try:
        schema = DTensor._op_dispatcher.unwrap_to_op_info(example.op, args, kwargs).schema
        found = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except (NotImplementedError, DynamicOutputShapeException):  # the latter of masks
        return "none"
    except RuntimeError as error:
        if "Please redistribute" not in str(error):
            raise
        return "finer"
    wanted = found.redistribute_schema if found.needs_redistribute else None
    if wanted is not None and _placements(wanted) != _placements(schema):
        return "finer"
    outputs = found.output_spec if isinstance(found.output_spec, tuple | list) else [found.output_spec]
    told = [output.placements[0] for output in outputs if output is not None]
    if told == [_placement(place) for place in places]:
        return "same"
    return "finer" if all(placement == Replicate() for placement in told) else f"other: {told}"


def _placements(schema: OpSchema) -> list[tuple[Placement, ...]]:
    return [spec.placements for spec in schema.args_spec]


def _placement(along: ShardDim) -> Placement:
    if along.outer == 1:
        return Shard(along.dim)
    return _StridedShard(along.dim, split_factor=along.outer)


def opinions(strategy, most):
    """What DTensor says of answers for tensors that are cut in one piece -> an example."""
    found: dict[str, str] = {}

    @settings(max_examples=most, derandomize=True)
    @given(strategy)
    def run(example):
        places = answer(example)
        plain = all(along == ShardDim(along.dim) for along in example.cuts.values())
        if places is not None and plain and not example.follows:
            example.sizes(places, example.ranks)  # which rejects what ranks can't share out evenly
            found.setdefault(opinion(example, places), str(example))

    run()
    return found


@pytest.mark.parametrize("most", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_dtensor_says_the_same_of_what_there_are_rules_for(most):
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, strategies in EXAMPLES.items():
        for strategy in strategies:
            found[name] |= opinions(strategy, most)
    assert {name: of for name, of in found.items() if of.keys() - {"same", "finer", "none"}} == {}
    assert {name for name, of in found.items() if "finer" in of} <= FINER.keys(), found
    # That it has no opinion of most would be no proof.
    assert sum("same" in of for of in found.values()) > 60


def test_dtensor_says_the_same_of_what_torch_calls_pointwise():
    said = defaultdict(set)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in pointwise_overloads():
            for kind in opinions(pointwise(name), 4):
                said[kind].add(name)
    assert said.keys() <= {"same", "none"}, said
    assert len(said["same"]) > 250
