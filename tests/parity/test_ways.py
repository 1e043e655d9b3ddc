"""Definitions whose code goes by values, or by the length of a sequence, in Megatron's trainer against HF."""

from __future__ import annotations

import pytest

from megasched.verify.parity import LAYOUTS, TOLERANCE, compare, failure
from megasched.verify.rank_pool import RankError
from megasched.verify.reference import hf_step
from megasched.verify.trainer_run import batches_of, train
from tests import remote
from tests.ways import BY_LENGTH, BY_VALUES

CASES = BY_VALUES | BY_LENGTH


def outcome_of(ranks, tmp_path, name, layout):
    folder, checked = remote.write(tmp_path / "model", CASES[name]), LAYOUTS[layout]
    try:
        flags = [*checked.flags.split(), "--trust-remote-code"]
        reports = ranks.run(checked.world_size, train, folder, flags, iterations=1)
    except RankError as error:
        return failure(str(error))
    (expected,) = ranks.run(1, hf_step, folder, batches_of(reports), trust_remote_code=True)
    return compare(reports, expected, checked.tp)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("another way if above", "tp2"),
        ("a size on another way", "tp2-sp"),
        ("a tensor of a number", "cp2"),
        ("chunks if long", "tp2"),
    ],
)
def test_it_is_equal(ranks, tmp_path, name, layout):
    outcome = outcome_of(ranks, tmp_path, name, layout)
    assert outcome.verdict == "equal", outcome.why
    assert max(outcome.errors.values()) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "tp2-sp", "cp2", "pp2"])
@pytest.mark.parametrize("name", CASES)
def test_each_is_equal_or_refused(ranks, tmp_path, name, layout):
    outcome = outcome_of(ranks, tmp_path, name, layout)
    assert outcome.verdict in ("equal", "refused"), outcome.why
