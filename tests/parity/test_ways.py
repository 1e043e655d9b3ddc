"""Definitions whose code goes by values, or by the length of a sequence, in Megatron's trainer against HF."""

from __future__ import annotations

import pytest

from megasched.verify.parity import LAYOUTS, failure
from megasched.verify.ranks.pool import RankError
from tests import remote
from tests.parity.cases import slow
from tests.parity.steps import assert_equal, step_of_own_code
from tests.ways import BY_LENGTH, BY_VALUES

CASES = BY_VALUES | BY_LENGTH


def outcome_of(ranks, tmp_path, name, layout):
    """Of two layers: all ways are tried in each."""
    folder = remote.write(tmp_path / "model", CASES[name], num_hidden_layers=2)
    try:
        return step_of_own_code(ranks, folder, LAYOUTS[layout])
    except RankError as error:
        return failure(str(error))


# Those that are slow ask for a width or a length as another here does.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("another way if above", "tp2"),
        ("a size on another way", "tp2-sp"),
        ("a tensor of a number", "cp2"),
        ("chunks if long", "tp2"),
        ("a width", "tp2"),
        slow("a tensor made of a width", "tp2"),
        slow("an end of a width", "tp2"),
        ("a backward by it", "tp2-sp"),
        ("zeros as long", "tp2-sp"),
        slow("as many ones more", "tp2-sp"),
        slow("numbers drawn for it", "tp2-sp"),
    ],
)
def test_it_is_equal(ranks, tmp_path, name, layout):
    assert_equal(outcome_of(ranks, tmp_path, name, layout))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("a hidden state by its length", "tp2-sp"),
        ("an output between layers", "tp2-sp"),
        ("a tensor of it", "tp2-sp"),
        ("a tensor of it", "cp2"),
        ("another made of it", "cp2"),
    ],
)
def test_lengths_of_a_part_are_refused(ranks, tmp_path, name, layout):
    outcome = outcome_of(ranks, tmp_path, name, layout)
    assert outcome.verdict == "refused"
    assert "goes by the length of the sequence, of which a rank sees a part" in outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "tp2-sp", "cp2", "pp2"])
@pytest.mark.parametrize("name", CASES)
def test_each_is_equal_or_refused(ranks, tmp_path, name, layout):
    outcome = outcome_of(ranks, tmp_path, name, layout)
    assert outcome.verdict in ("equal", "refused"), outcome.why
