"""Which points must run out of memory where another one did."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megasched.tuner.samplers import Encoding
from megasched.tuner.space import Space


def make():
    space = Space()
    tp = space.choice("tp", [1, 2])
    space.choice("batch", [8, 1, 4], memory="grows")  # not in order of size
    space.choice("layers", [0, 2, 4], memory="shrinks")
    space.choice("chunks", [2, 3], when=tp == 2, memory="grows")
    space.choice("kind", ["a", "b"])
    return space, Encoding(space)


SPACE, ENCODING = make()


def needs_more(point, other):
    """Whether it needs at least the memory of the other, by the words of the space."""
    return (
        point["tp"] == other["tp"]
        and point["kind"] == other["kind"]
        and point["batch"] >= other["batch"]
        and point["layers"] <= other["layers"]
        and point.get("chunks", 0) >= other.get("chunks", 0)
    )


@given(st.integers(0, len(SPACE.points) - 1))
def test_what_needs_at_least_as_much_memory_is_found(at):
    here = SPACE.points[at]
    assert ENCODING.must_oom(at).tolist() == [needs_more(point, here) for point in SPACE.points]
    assert ENCODING.must_fit(at).tolist() == [needs_more(here, point) for point in SPACE.points]


def test_without_a_word_on_memory_only_the_point_itself_is_known():
    space = Space()
    space.choice("batch", [1, 2, 4])
    assert np.flatnonzero(Encoding(space).must_oom(1)).tolist() == [1]


def test_coordinates_are_evenly_spaced_by_size_and_inactive_is_an_axis():
    x = ENCODING.coordinates
    batches = {point["batch"]: x[i, 1] for i, point in enumerate(SPACE.points)}
    assert batches == {1: 0.0, 4: 0.5, 8: 1.0}
    # tp, batch, layers, chunks, whether there are chunks, and an axis for each kind
    assert x.shape[1] == 7
    inactive = np.array(["chunks" not in point for point in SPACE.points])
    assert (x[inactive, 4] == 1).all()
    assert (x[~inactive, 4] == 0).all()


def test_a_symbol_with_one_value_is_no_axis():
    space = Space()
    space.choice("batch", [4])
    space.choice("layers", [0, 1])
    assert Encoding(space).coordinates.tolist() == [[0.0], [1.0]]
