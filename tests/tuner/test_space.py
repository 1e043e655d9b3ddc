"""Spaces: symbols, conditions, and which assignments meet them; expressions against Python's own arithmetic."""

import itertools
import operator
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.tuner.expression import INACTIVE
from megasched.tuner.space import Space, flag_of, load_space


def layouts(gpus=8):
    space = Space()
    tp = space.choice("tp", [1, 2, 4])
    pp = space.choice("pp", [1, 2, 4])
    space.choice("vp", [1, 2], when=pp > 1)
    space.where(tp * pp <= gpus)
    return space


def test_points_meet_every_condition_and_conditional_symbols_are_left_out():
    expected = [
        {"tp": tp, "pp": pp, **({"vp": vp} if pp > 1 else {})}
        for tp, pp, vp in itertools.product([1, 2, 4], [1, 2, 4], [1, 2])
        if tp * pp <= 8 and (pp > 1 or vp == 1)
    ]
    assert list(layouts().points) == expected
    assert len(expected) == 13


def test_a_condition_on_a_symbol_without_value_is_not_asked():
    space = Space()
    pp = space.choice("pp", [1, 2])
    vp = space.choice("vp", [2, 4], when=pp > 1)
    space.choice("deep", [True], when=vp == 4)  # of a symbol that has no value itself
    space.where(vp <= 2)
    assert space.points == ({"pp": 1}, {"pp": 2, "vp": 2})


OPERATORS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv]
OPERATORS += [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@given(st.sampled_from(OPERATORS), st.integers(-9, 9), st.integers(1, 9), st.booleans())
def test_an_expression_is_what_python_computes(function, a, b, reflected):
    space = Space()
    x, y = space.choice("x", [a]), space.choice("y", [b])
    point = {"x": a, "y": b}
    assert function(x, y).evaluate(point) == function(a, b)
    one = function(a, y) if reflected else function(x, b)
    assert one.evaluate(point) == function(a, b)


@given(st.booleans(), st.booleans())
def test_conditions_are_joined(a, b):
    space = Space()
    x, y = space.choice("x", [a]), space.choice("y", [b])
    point = {"x": a, "y": b}
    assert (x & y).evaluate(point) == (a and b)
    assert (x | y).evaluate(point) == (a or b)
    assert (~x).evaluate(point) == (not a)
    assert (x & y).evaluate({"y": b}) is (x | y).evaluate({"y": b}) is INACTIVE
    assert (x == y).evaluate({"y": b}) is INACTIVE


def test_what_pythons_words_do_to_symbols_is_explained():
    space = Space()
    tp = space.choice("tp", [1, 2, 4])
    with pytest.raises(ConfigError, match=r"tp > 1 has no value while .* say & for `and`"):
        space.where(tp > 1 and tp < 4)
    with pytest.raises(ConfigError, match=r"\(1 < x\) & \(x < 4\)"):
        space.where(1 < tp < 4)
    with pytest.raises(ConfigError, match=r"takes a condition on symbols.* this is True"):
        space.where(2 > 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: s.choice("a", []), "no values"),
        (lambda s: s.choice("a", [1, 1]), "there twice"),
        (lambda s: s.choice("a", [1, True]), "there twice"),
        (lambda s: s.choice("a", [[1]]), r"\[1\] can't be a value"),
        (lambda s: (s.choice("a", [1]), s.choice("a", [2])), "two symbols a"),
        (lambda s: s.choice("a", [1], when=True), "when= takes a condition"),
        (lambda s: s.choice("a", ["x"], memory="grows"), "no numbers"),
        (lambda s: s.choice("a", [1], memory="more"), '"grows" or "shrinks"'),
        (lambda s: s.choice("a", [1], schedule=True, flag="--b"), "no flag"),
        (lambda s: s.integer("a", 4, 2), "nothing lies between 4 and 2"),
    ],
)
def test_what_can_not_be_used_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make(Space())


def test_a_space_without_points_names_its_conditions():
    space = Space()
    tp = space.choice("tp", [2, 4])
    space.where(tp < 2)
    with pytest.raises(ConfigError, match="no assignment meets all conditions of the space: tp < 2"):
        _ = space.points
    with pytest.raises(ConfigError, match="no symbols"):
        _ = Space().points


def test_a_space_too_large_to_list_is_refused():
    space = Space()
    for name in "abc":
        space.integer(name, 1, 50)
    with pytest.raises(ConfigError, match="more than 100000 points"):
        _ = space.points


def test_a_given_assignment_is_completed_to_a_point():
    space = layouts()
    assert space.complete({"tp": 2, "pp": 1, "vp": 2, "zero": 1}) == {"tp": 2, "pp": 1}
    assert space.complete({"tp": 4, "pp": 4, "vp": 1}) is None  # beyond 8 GPUs
    assert space.complete({"tp": 2}) is None


def test_the_fingerprint_changes_with_what_is_searched():
    assert layouts().fingerprint == layouts().fingerprint
    assert layouts().fingerprint != layouts(gpus=4).fingerprint


def test_names_of_flags():
    assert flag_of("tp") == "--tensor-model-parallel-size"
    assert flag_of("micro_batch_size") == "--micro-batch-size"


# ---- the file ---------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def make(text):
        file = tmp_path / "myspace.py"
        file.write_text(textwrap.dedent(text))
        return file

    return make


def test_a_file_is_run(write):
    space = load_space(write("def space(space):\n    space.integer('tp', 1, 3)\n"))
    assert [point["tp"] for point in space.points] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def space(space):\n    space.choice('a', [])\n", r"myspace\.py:2: a: there are no values"),
        ("def space(space):\n\n    1 / 0\n", r"myspace\.py:3: ZeroDivisionError"),
        ("def space(\n", r"myspace\.py:1: syntax error"),
        ("x = 1\n", "does not define `def space"),
        ("def space(space): pass\n", "no symbols"),
        (
            "def space(space):\n    a = space.choice('a', [0, 1])\n    space.where(4 % a == 0)\n",
            r"\(4 % a\) == 0 can't be computed for a = 0",
        ),
    ],
)
def test_a_file_that_fails_names_the_line(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_space(write(text))


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory; expected a space, a Python file"):
        load_space(tmp_path / "none.py")
