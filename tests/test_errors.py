"""How problems are told."""

from __future__ import annotations

from megasched.errors import Problem, ScheduleError, indivisible


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


def test_what_one_parallel_size_does_not_divide_is_one_problem():
    heads = [indivisible("TP 3", "4 heads of qkv.q", 4, module=f"layers.{i}.q", source="s.py:3") for i in range(5)]
    error = ScheduleError([*heads, indivisible("TP 3", "weight [64, 130] along axis 1", 130, module="layers.0.o")])
    assert str(error) == (
        "the schedule has a problem:\n"
        "  - TP 3 does not divide 4 heads of qkv.q and another size\n"
        "      4 heads of qkv.q: layers.0.q, layers.1.q, layers.2.q and 2 more (asked for at: s.py:3)\n"
        "      weight [64, 130] along axis 1: layers.0.o\n"
        "    remedy: a tensor parallel size that divides all of them: 1, 2"
    )
    assert str(ScheduleError(heads[:1])) == (
        "the schedule has a problem:\n"
        "  - TP 3 does not divide 4 heads of qkv.q\n"
        "    module: layers.0.q\n"
        "    asked for at: s.py:3\n"
        "    remedy: a tensor parallel size that divides 4"
    )
