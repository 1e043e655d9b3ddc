"""The order of a step is Megatron's own, and times follow from it."""

from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel import schedules

from megasched.planner.pipeline import Chunk, in_flight, order_of, simulate


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 5), st.data())
def test_warm_up_and_order_are_those_of_megatron(pp, vpp, groups, data):
    rank = data.draw(st.integers(0, pp - 1))
    group = data.draw(st.integers(pp, 2 * pp))
    rest = data.draw(st.sampled_from([0, *range(pp, group)]))
    microbatches = groups * group + rest
    names = ("world_size", "rank")
    values = dict(zip(names, (pp, rank), strict=True))
    state = {f"get_pipeline_model_parallel_{name}": (lambda value=value: value) for name, value in values.items()}
    state["get_virtual_pipeline_model_parallel_world_size"] = lambda: vpp if vpp > 1 else None
    with patch.multiple(schedules.parallel_state, **state):
        total, _, warm_up, _ = schedules.get_pp_rank_microbatches(microbatches, vpp, group)
    table = schedules.get_schedule_table(microbatches, vpp, group)
    order = order_of(rank, pp, vpp, microbatches, group)
    assert group != pp or order == order_of(rank, pp, vpp, microbatches)
    assert len(order) == 2 * total
    assert [work.forward for work in order[:warm_up]] == [True] * warm_up
    steady = order[warm_up : 2 * total - warm_up]
    assert [work.forward for work in steady] == [True, False] * (total - warm_up)
    assert [(work.microbatch, work.chunk) for work in order if work.forward] == table
    backwards = [(work.microbatch, vpp - 1 - work.chunk) for work in order if not work.forward]
    assert backwards == table


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_a_work_runs_after_what_it_needs_and_ranks_do_one_thing_at_a_time(pp, vpp, groups):
    vpp = vpp if pp > 1 else 1
    chunks = [[Chunk(1.0 + rank, 2.0 + chunk, 0.25) for chunk in range(vpp)] for rank in range(pp)]
    spans = simulate(chunks, groups * pp)
    assert len(spans) == 2 * pp * vpp * groups * pp
    when = {(s.kind, s.microbatch, s.chunk * pp + s.rank): s for s in spans}
    for (kind, microbatch, stage), span in when.items():
        before = when.get((kind, microbatch, stage + (-1 if kind == "forward" else 1)))
        if before is not None:
            assert span.start >= before.end + 0.25
        if kind == "backward":
            assert span.start >= when["forward", microbatch, stage].end
    for one, following in pairwise(spans):
        assert one.rank != following.rank or one.end <= following.start


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(1, 1, 5), (4, 1, 8), (4, 2, 8), (8, 4, 64)])
def test_the_bubble_is_that_of_the_paper(pp, vpp, microbatches):
    """(p - 1) / (v m) of the ideal time: arXiv 2104.04473, section 2.2."""
    chunks = [[Chunk(1.0 / vpp, 2.0 / vpp)] * vpp] * pp
    end = max(span.end for span in simulate(chunks, microbatches))
    ideal = 3.0 * microbatches
    assert end == pytest.approx(ideal * (1 + (pp - 1) / (vpp * microbatches)))


def test_what_is_in_flight_of_1f1b_is_the_stages_behind():
    for rank in range(4):
        assert max(alive for (alive,) in in_flight(rank, 4, 1, 16)) == 4 - rank


def test_interleaving_refuses_a_remainder():
    with pytest.raises(ValueError, match="6 micro-batches in groups of 4 are fewer than PP 4"):
        order_of(0, 4, 2, 6)
