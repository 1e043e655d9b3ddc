"""Where the pipeline is cut."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from megasched.megatron.cut import balance, layout_string


def brute_force(costs, first, last, stages):
    """Dearest stage of the best of all cuts."""
    count = len(costs)
    found = []
    for ends in combinations(range(1, count), stages - 1):
        bounds = [0, *ends, count]
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        found.append(max(sums))
    return min(found)


@given(
    st.lists(st.integers(1, 20).map(float), min_size=1, max_size=8),
    st.integers(0, 30).map(float),
    st.integers(0, 30).map(float),
    st.data(),
)
def test_balance_is_the_best_of_all_cuts(costs, first, last, data):
    stages = data.draw(st.integers(1, len(costs)))
    layers = balance(costs, first, last, stages)
    assert sum(layers) == len(costs)
    assert min(layers) >= 1
    bounds = [sum(layers[:i]) for i in range(stages + 1)]
    sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    sums[0] += first
    sums[-1] += last
    assert max(sums) == brute_force(costs, first, last, stages)


def test_equal_layers_without_a_head_are_cut_evenly():
    assert balance([1.0] * 12, 0.0, 0.0, 4) == [3, 3, 3, 3]


def test_a_dear_head_takes_layers_off_the_last_stage():
    assert balance([1.0] * 8, 0.0, 2.0, 2) == [5, 3]


def test_layout_string_is_megatrons():
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = layout_string([2, 1, 3, 2])
    assert text == "Ett|t|ttt|ttL"
    layout = PipelineParallelLayerLayout(text, 2)
    layout.validate_layer_layout(8, None)
    # rank 0 holds chunks 0 and 2, rank 1 holds 1 and 3
    assert [len(chunk) for chunk in layout.layout[0]] == [3, 3]
    assert layout.layout[1][1][-1] == LayerType.loss
