"""All of torch's operators in a definition of one's own: the numbers of plain Hugging Face, or a refusal."""

from __future__ import annotations

from collections import Counter

import pytest

from megasched.verify.ranks.pool import RankPool
from tests.parity.cases import slow
from tests.parity.operators.cases import operators
from tests.parity.operators.steps import Verdict, check_all

GROUPS = 24
BEST_FIRST = ("no case", "equal", "refused", "wrong", "crash")


def checked(ranks: RankPool, layout: str, names: list[str], samples: int, every: int) -> dict[str, list[Verdict]]:
    """Kind -> verdicts, of which that of the rank counts that has the worse one."""
    found: dict[str, list[Verdict]] = {kind: [] for kind in BEST_FIRST}
    for verdicts in zip(*ranks.run(2, check_all, layout, names, samples, every, timeout=900), strict=True):
        worst = max(verdicts, key=lambda verdict: BEST_FIRST.index(verdict.kind))
        found[worst.kind].append(worst)
    return found


def assert_right(found: dict[str, list[Verdict]], least: int) -> None:
    """
    Args:
        least: numbers of cases that there have to be.
    """
    equal, refused = len(found["equal"]), Counter(verdict.why for verdict in found["refused"])
    assert found["wrong"] == []
    assert found["crash"] == []
    assert equal + refused.total() >= least
    assert equal >= 0.9 * (equal + refused.total()), refused


@pytest.mark.parametrize(
    ("layout", "first", "step"), [slow("tp2", 0, 16), ("tp2", 8, 16), ("tp2-sp", 0, 20), ("cp2", 0, 20)]
)
def test_some_operators(ranks, layout, first, step):
    names = list(operators())[first::step]
    assert_right(checked(ranks, layout, names, samples=1, every=3), len(names) // 2)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_all_operators(ranks, group):
    assert_right(checked(ranks, "tp2", list(operators())[group::GROUPS], samples=2, every=1), 2000 // GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2"])
@pytest.mark.parametrize("group", range(4))
def test_a_tenth_where_the_sequence_is_cut(ranks, layout, group):
    assert_right(checked(ranks, layout, list(operators())[group::4], samples=2, every=10), 40)
