"""How problems are told."""

from __future__ import annotations

from megasched.errors import Problem, ScheduleError


def test_a_problem_that_many_modules_share_is_told_once():
    shared = [Problem("TP 3 does not divide 4 heads", f"layers.{i}", "s.py:3", "TP 2") for i in range(5)]
    error = ScheduleError([*shared, Problem("no layers")])
    assert str(error) == (
        "the schedule has 2 problems:\n"
        "  - TP 3 does not divide 4 heads\n"
        "    modules: layers.0, layers.1, layers.2 and 2 more\n"
        "    asked for at: s.py:3\n"
        "    remedy: TP 2\n"
        "  - no layers"
    )
    assert len(error.problems) == 6


def test_one_problem_names_its_module():
    assert (
        str(ScheduleError(Problem("wrong", "lm_head")))
        == "the schedule has a problem:\n  - wrong\n    module: lm_head"
    )
