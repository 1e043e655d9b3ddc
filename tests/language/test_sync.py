"""Sync: derived when nothing is said, checked where a shard stands, carried out where none does."""

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.language.primitives.sync import ALONG_AN_AXIS
from megasched.plan.communication import derived_syncs
from megasched.plan.make import make_plan
from megasched.verify.ranks.pool import init_megatron
from tests.language.sharding import Embedded, planned, shard_all
from tests.lowering.models import Mlp, randomize
from tests.lowering.parity import compare, too_far

X = {"x": torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)}


def negated(gradient):
    return -gradient


DERIVED = {
    "embed": {"fwd_pre": None, "fwd_post": "all_reduce", "bwd_post": None},
    "mlp.up": {"fwd_pre": None, "fwd_post": None, "bwd_post": "all_reduce"},
    "mlp.down": {"fwd_pre": None, "fwd_post": "all_reduce", "bwd_post": None},
    "head": {"fwd_pre": None, "fwd_post": "all_gather", "bwd_post": "all_reduce"},
}


def test_derived_when_nothing_is_said():
    plan = planned(lambda sch: None)
    assert {path: derived_syncs(plan, path) for path in plan.cuts} == DERIVED


def test_a_row_that_reads_a_whole_input_cuts_it():
    sch = megasched.create_schedule(Mlp(), ParallelDims(tensor_model_parallel_size=2))
    sch["down"].shard("weight", axis=1)
    plan = make_plan(sch, inputs=X)
    assert derived_syncs(plan, "down") == {
        "fwd_pre": "scatter",
        "fwd_post": "all_reduce",
        "bwd_post": "all_gather",
    }


@pytest.mark.parametrize(
    ("path", "mode", "op"), [(path, mode, op) for path, ops in DERIVED.items() for mode, op in ops.items() if op]
)
def test_the_right_statement_is_accepted(path, mode, op):
    planned(lambda sch: sch[path].sync(mode, op))


@pytest.mark.parametrize(
    ("path", "mode", "op", "needs"),
    [
        ("mlp.down", "fwd_post", "reduce_scatter", "a row-sharded module here needs all_reduce at fwd_post"),
        ("mlp.down", "fwd_post", "all_gather", "needs all_reduce at fwd_post"),
        ("mlp.down", "fwd_pre", "scatter", "sends nothing at fwd_pre"),
        ("mlp.down", "bwd_post", "all_reduce", "sends nothing at bwd_post"),
        ("mlp.up", "fwd_post", "all_reduce", "a column-sharded module here sends nothing at fwd_post"),
        ("mlp.up", "bwd_post", "reduce_scatter", "needs all_reduce at bwd_post"),
        ("mlp.up", "fwd_pre", "all_gather", "sends nothing at fwd_pre"),
        ("embed", "fwd_post", "all_gather", "a vocab-sharded module here needs all_reduce"),
        ("head", "fwd_post", "scatter", "needs all_gather at fwd_post"),
        ("mlp.down", "fwd_post", negated, "sync('fwd_post', 'negated') contradicts the placement"),
    ],
)
def test_a_contradiction_is_refused_with_the_line(path, mode, op, needs):
    fill = lambda sch: sch[path].sync(mode, op)  # noqa: E731
    with pytest.raises(ScheduleError) as raised:
        planned(fill)
    (problem,) = raised.value.problems
    assert needs in problem.what
    assert problem.module == path
    assert problem.source == f"{__file__}:{fill.__code__.co_firstlineno}"


def test_gathering_what_need_not_be_is_the_users_choice():
    plan = planned(lambda sch: sch["mlp.up"].sync("fwd_post", "all_gather"))
    assert (plan.tp_facts.gather.keys(), plan.tp_facts.scatter) == ({"head", "mlp.up"}, {"mlp.down"})


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (("fwd", "all_reduce"), "no sync mode 'fwd'", "one of fwd_pre, fwd_post, bwd_post"),
        (
            ("fwd_pre", "gather"),
            "no sync operation 'gather'",
            "one of all_reduce, all_gather, reduce_scatter, scatter",
        ),
    ],
)
def test_unknown_modes_and_operations(arguments, what, remedy):
    with pytest.raises(ScheduleError) as raised:
        planned(lambda sch: sch["mlp"].sync(*arguments))
    (problem,) = raised.value.problems
    assert problem.what == what
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize("path", ["mlp", ""])
@pytest.mark.parametrize("arguments", [("bwd_post", "all_reduce"), ("fwd_post", "reduce_scatter", 1)])
def test_a_sum_around_sharded_modules_is_one_too_many(path, arguments):
    """As Slapo's schedules have it on an attention, of which it shards the projections."""
    with pytest.raises(ScheduleError) as raised:
        planned(lambda sch: (sch[path] if path else sch).sync(*arguments))
    (problem,) = raised.value.problems
    assert problem.what.startswith(
        f"sync('{arguments[0]}', '{arguments[1]}') on a module with sharded ones in it, "
    )
    assert "mlp.up" in problem.what
    assert problem.what.endswith("they sum what they send, and this would sum it again")
    assert problem.remedy == "leave the call out: what must be sent follows from the shards"
    assert problem.module == path


class Squared(nn.Module):
    def forward(self, x, *, scale=1.0):
        return scale * x * x


class Several(nn.Module):
    """Returns a structure, takes its tensor by name; what it is given is used elsewhere too."""

    def __init__(self):
        super().__init__()
        self.inner = Squared()

    def forward(self, x):
        return x + self.inner(x=x, scale=2.0), "beside"


def _here():
    """This rank's input [2, 4], different on each."""
    rank = torch.distributed.get_rank()
    return (torch.arange(8.0).reshape(2, 4) + 10 * rank).requires_grad_()


def _carried_out(turned):
    """(mode, operation) -> output and gradient of a module that squares, and is not sharded.

    Turned round, the input is [4, 2], and what is along an axis is along the first.
    """
    init_megatron(tp=2)
    found = {}
    for mode in ("fwd_pre", "fwd_post", "bwd_post"):
        for op in ("all_reduce", "all_gather", "reduce_scatter", "scatter", negated):
            model = nn.Sequential(Squared())
            sch = megasched.create_schedule(model)
            axis = {"axis": 0} if turned and op in ALONG_AN_AXIS else {}
            sch["0"].sync(mode, sync_op_or_fn=op, **axis) if turned else sch["0"].sync(mode, op)
            megasched.build(sch)
            x = _here().detach().t().contiguous().requires_grad_() if turned else _here()
            output = model(x)
            output.sum().backward()
            results = (output, x.grad) if not turned else (output.t(), x.grad.t())
            found[mode, op if isinstance(op, str) else "function"] = results
    return found


def _expected(rank):
    """The same by hand: every operation on plain tensors of both ranks."""
    x = [torch.arange(8.0).reshape(2, 4) + 10 * r for r in (0, 1)]
    whole, total = torch.cat(x, dim=-1), x[0] + x[1]
    half = slice(2 * rank, 2 * rank + 2)
    mine = x[rank]
    squares = [t * t for t in x]
    both = 2 * x[0] + 2 * x[1]

    def placed(piece):
        """A gradient of one half of the features, zero elsewhere, as both ranks send theirs."""
        return torch.cat([piece[0], piece[1]], dim=-1)

    return {
        ("fwd_pre", "all_reduce"): (total**2, 2 * total),
        ("fwd_pre", "all_gather"): (whole**2, 2 * mine),
        ("fwd_pre", "reduce_scatter"): (total[:, half] ** 2, placed([2 * total[:, :2], 2 * total[:, 2:]])),
        ("fwd_pre", "scatter"): (mine[:, half] ** 2, placed([2 * x[0][:, :2], 2 * x[1][:, 2:]])),
        ("fwd_pre", "function"): (mine**2, 2 * mine),
        ("fwd_post", "all_reduce"): (squares[0] + squares[1], 2 * mine),
        ("fwd_post", "all_gather"): (torch.cat(squares, dim=-1), 2 * mine),
        ("fwd_post", "reduce_scatter"): ((squares[0] + squares[1])[:, half], 2 * mine),
        ("fwd_post", "scatter"): (squares[rank][:, half], 2 * mine),
        ("fwd_post", "function"): (-squares[rank], -2 * mine),
        ("bwd_post", "all_reduce"): (squares[rank], both),
        ("bwd_post", "all_gather"): (squares[rank][:, half], placed([2 * x[0][:, :2], 2 * x[1][:, 2:]])),
        ("bwd_post", "reduce_scatter"): (whole**2, 2 * 2 * mine),
        ("bwd_post", "scatter"): (whole**2, 2 * mine),
        ("bwd_post", "function"): (squares[rank], -2 * mine),
    }


@pytest.mark.parametrize("turned", [False, True])
def test_on_an_unsharded_module_every_operation_is_carried_out(ranks, turned):
    for rank, found in enumerate(ranks.run(2, _carried_out, turned)):
        expected = _expected(rank)
        assert found.keys() == expected.keys()
        for key, (output, gradient) in expected.items():
            assert torch.equal(found[key][0], output), key
            assert torch.equal(found[key][1], gradient), key


def _in_a_structure():
    """An operation on one of several outputs, and on an input given by name that others use too."""
    init_megatron(tp=2)
    found = {}
    for name, path, mode in (
        ("output", "0", "fwd_post"),
        ("input", "0.inner", "fwd_pre"),
        ("back", "0.inner", "bwd_post"),
    ):
        model = nn.Sequential(Several())
        sch = megasched.create_schedule(model)
        sch[path].sync(mode, "all_reduce")
        megasched.build(sch)
        x = _here()
        output, beside = model(x)
        assert beside == "beside"
        output.sum().backward()
        found[name] = (output, x.grad, x.detach().clone())
    return found


def test_what_others_use_is_left_alone(ranks):
    x = [torch.arange(8.0).reshape(2, 4) + 10 * r for r in (0, 1)]
    total = x[0] + x[1]
    for rank, found in enumerate(ranks.run(2, _in_a_structure)):
        mine = x[rank]
        expected = {
            "output": (total + 2 * (x[0] ** 2 + x[1] ** 2), 1 + 4 * mine),
            "input": (mine + 2 * total**2, 1 + 4 * total),
            "back": (mine + 2 * mine**2, 1 + 4 * total),
        }
        for name, (output, gradient) in expected.items():
            assert torch.equal(found[name][2], mine), name
            assert torch.equal(found[name][0], output), name
            assert torch.equal(found[name][1], gradient), name


def _stated_and_derived():
    init_megatron(tp=2)

    def fill(sch):
        shard_all(sch)
        sch["mlp.down"].sync("fwd_post", "all_reduce")
        sch["mlp.up"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")

    ids = {"ids": torch.arange(10).reshape(2, 5)}
    return too_far(compare(randomize(Embedded()), fill, ids, ids))


def test_a_statement_changes_nothing_but_a_gather_asked_for(ranks):
    assert ranks.run(2, _stated_and_derived) == [{}, {}]
