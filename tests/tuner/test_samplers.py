"""Samplers: what they never propose, and how each goes on."""

import itertools

import pytest

from megasched.tuner.outcome import Result
from megasched.tuner.samplers import SAMPLERS
from megasched.tuner.space import Space
from megasched.tuner.study import Search

SCORE = {"a": 1.0, "b": 1.2}


def make():
    space = Space()
    tp = space.choice("tp", [1, 2, 4])
    batch = space.choice("batch", [1, 4, 8, 16], memory="grows")
    space.choice("chunks", [1, 2], when=tp > 1)
    space.choice("kind", ["a", "b"])
    space.where(tp * batch <= 32)
    return space


class Synthetic:
    """Beyond a batch of 4 x TP it runs out of memory."""

    def __init__(self):
        self.tried = []

    def run(self, number, point):
        self.tried.append(point)
        if point["batch"] > 4 * point["tp"]:
            return Result("oom")
        return Result("ok", point["batch"] ** 0.5 * SCORE[point["kind"]] / point["tp"] ** 0.2)


def search(name, trials, *, seed=0, first=()):
    space, runner = make(), Synthetic()
    return space, runner, Search(space, name, seed=seed, first=first).run(runner, trials)


@pytest.mark.parametrize("name", SAMPLERS)
def test_points_are_tried_once_until_none_is_left_and_never_where_memory_must_run_out(name):
    space, runner, tuning = search(name, 1000 if name != "tpe" else 12)  # it takes its time
    assert len(runner.tried) == len({str(point) for point in runner.tried})
    assert all(space.place(point) is not None for point in runner.tried)
    for before, after in itertools.combinations(runner.tried, 2):
        others_equal = {**before, "batch": 0} == {**after, "batch": 0}
        assert not (before["batch"] > 4 * before["tp"] and others_equal and after["batch"] > before["batch"])
    if name != "tpe":
        assert tuning.ruled_out == len(space.points) - len(runner.tried) > 0
        assert tuning.best.point["batch"] == 4 * tuning.best.point["tp"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_queue_comes_first_without_what_is_ruled_out(name):
    space = make()
    first = [space.place({"tp": 1, "batch": batch, "kind": "a"}) for batch in (8, 16, 4)]
    _, runner, _ = search(name, 3, first=first)
    assert [point["batch"] for point in runner.tried[:2]] == [8, 4]


def test_the_grid_goes_in_the_order_of_the_space():
    space, runner, _ = search("grid", 4)
    assert runner.tried == list(space.points[:4])


def test_the_model_finds_the_best_point_in_a_fifth_of_the_space():
    space = make()
    best = max(
        (point for point in space.points if point["batch"] <= 4 * point["tp"]),
        key=lambda point: point["batch"] ** 0.5 * SCORE[point["kind"]] / point["tp"] ** 0.2,
    )
    found = [search("model", len(space.points) // 3, seed=seed)[2].best.point for seed in range(6)]
    assert sum(point["batch"] == best["batch"] and point["kind"] == best["kind"] for point in found) >= 5


def test_equal_seeds_make_equal_searches():
    for name in SAMPLERS:
        assert search(name, 8, seed=3)[1].tried == search(name, 8, seed=3)[1].tried
    assert search("model", 8, seed=3)[1].tried != search("model", 8, seed=4)[1].tried


def test_what_is_slow_or_refused_is_learned_from_and_a_crash_is_not():
    """Where large values time out, and where they are refused, few of them are tried; crashes are by chance."""
    tried = {}
    for outcome in ("timeout", "refused"):
        space = Space()
        space.integer("x", 0, 39)
        seen = []

        class Runner:
            def run(self, number, point, seen=seen, outcome=outcome):
                seen.append(point["x"])
                return Result(outcome) if point["x"] >= 20 else Result("ok", 10.0 - abs(point["x"] - 15))

        Search(space).run(Runner(), 16)
        tried[outcome] = sum(x >= 20 for x in seen)
        assert 15 in seen
    assert all(count <= 5 for count in tried.values()), tried
