"""``megasched.tune``: the optimum of a function is found, and what it raises is learned from."""

import subprocess
import sys

import pytest
import torch

import megasched
from megasched import ConfigError, ScheduleError


def make():
    space = megasched.Space()
    batch = space.choice("batch", [1, 2, 4, 8, 16, 32, 64], memory="grows")
    layers = space.integer("layers", 0, 12, step=2, memory="shrinks")
    space.choice("chunks", [1, 2, 3], when=batch > 4)
    space.where((batch >= 2) | (layers < 12))
    return space


class Measured:
    """Best at a batch of 16, 6 layers and 2 chunks, the largest batch that fits with the fewest layers."""

    def __init__(self):
        self.tried = []

    def __call__(self, point):
        self.tried.append(point)
        if point["batch"] > 4 + 2 * point["layers"]:
            raise torch.OutOfMemoryError(f"{point['batch']} sequences do not fit\nin this memory")
        return point["batch"] ** 0.5 * (1 - 0.02 * point["layers"]) / (1 + 0.1 * abs(point.get("chunks", 1) - 2))


def best_of(space):
    """By a look at all points."""
    found = {}
    for number, point in enumerate(space.points):
        try:
            found[number] = Measured()(point)
        except torch.OutOfMemoryError:
            continue
    return space.points[max(found, key=found.get)]


@pytest.mark.parametrize(("sampler", "trials"), [("model", 40), ("tpe", 40), ("grid", 200)])
def test_the_optimum_is_found(sampler, trials):
    space, measured = make(), Measured()
    found = megasched.tune(measured, space, sampler=sampler, trials=trials)
    assert found.best.point == best_of(space) == {"batch": 16, "layers": 6, "chunks": 2}
    assert found.best.result.score == Measured()(found.best.point)
    assert [trial.point for trial in found.trials] == measured.tried
    assert (found.points, len(space.points)) == (104, 104)
    if sampler == "grid":
        assert len(measured.tried) + found.ruled_out == found.points


def test_what_runs_out_of_memory_rules_out_what_needs_as_much():
    measured = Measured()
    found = megasched.tune(measured, make(), trials=1000)
    failed = [trial for trial in found.trials if trial.result.outcome == "oom"]
    assert failed
    assert found.ruled_out > 0
    assert {trial.result.why for trial in failed if trial.point["batch"] == 64} <= {
        "OutOfMemoryError: 64 sequences do not fit"
    }
    for number, before in enumerate(found.trials):
        for after in found.trials[number + 1 :] if before in failed else ():
            point, later = dict(before.point), dict(after.point)
            more = later.pop("batch") >= point.pop("batch") and later.pop("layers") <= point.pop("layers")
            assert not (more and point == later)


def test_what_is_raised_is_the_outcome():
    raised = {
        1: MemoryError(),
        2: RuntimeError("CUDA error: out of memory"),
        3: ScheduleError([]),
        4: ConfigError("no such layout"),
        5: ZeroDivisionError("division by zero"),
        6: None,
    }

    def objective(point):
        if raised[point["case"]] is not None:
            raise raised[point["case"]]
        return 2

    space = megasched.Space()
    space.choice("case", [6, 1, 2, 3, 4, 5])
    found = megasched.tune(objective, space, sampler="grid")
    results = {trial.point["case"]: trial.result for trial in found.trials}
    outcomes = {case: result.outcome for case, result in results.items()}
    assert outcomes == {1: "oom", 2: "oom", 3: "refused", 4: "refused", 5: "crash", 6: "ok"}
    assert results[4].why == "ConfigError: no such layout"
    assert (results[6].score, results[5].score) == (2.0, None)


def crashes(point):
    raise KeyError(point["batch"])


def test_a_function_that_never_runs_ends_the_search():
    with pytest.raises(ConfigError, match=r"first 3 trials all failed.*\n  - trial 0 crash: KeyError: "):
        megasched.tune(crashes, make())


@pytest.mark.parametrize("score", [0, -1.0, float("nan"), float("inf"), None, "fast"])
def test_a_score_is_a_positive_number(score):
    with pytest.raises(ConfigError, match="a positive number, larger where it is better"):
        megasched.tune(lambda point: score, make())


def test_a_search_goes_on_from_its_folder(tmp_path):
    calls = []

    def objective(point):
        calls.append(point)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return float(point["batch"])

    with pytest.raises(KeyboardInterrupt):
        megasched.tune(objective, make(), sampler="grid", trials=6, folder=tmp_path / "study")
    found = megasched.tune(objective, make(), sampler="grid", trials=6, folder=tmp_path / "study")
    assert len(found.trials) == 6
    assert calls[3] == calls[4]  # which was cut off
    assert len(calls) == 7
    with pytest.raises(ConfigError, match="is of something else"):
        megasched.tune(crashes, make(), folder=tmp_path / "study")


def test_without_optuna_it_says_what_to_install():
    code = "import sys; sys.modules['optuna'] = None; import megasched; megasched.tune"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: optuna is missing: pip install 'megasched[tune]'" in done.stderr
