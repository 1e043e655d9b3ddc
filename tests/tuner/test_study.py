"""The study in its file: a search goes on where it was, and only if it is the same one."""

import optuna
import pytest

from megasched.errors import ConfigError
from megasched.tuner.outcome import Result
from megasched.tuner.samplers import SAMPLERS, Encoding, distributions
from megasched.tuner.space import Space
from megasched.tuner.study import Search, begin_trial, default_trials, open_study

COMMAND = ["torchrun", "pretrain_gpt.py"]


def make(limit=32):
    space = Space()
    batch = space.choice("batch", [8, 4, 2, 16], memory="grows")
    space.choice("kind", ["a", None, True])
    space.where(batch <= limit)
    return space


class Counting:
    def __init__(self, *results):
        self.results, self.points = list(results), []

    def run(self, number, point):
        self.points.append(point)
        if self.results:
            result = self.results.pop(0)
            if isinstance(result, BaseException):
                raise result
            return result
        return Result("ok", float(point["batch"]), 0.5)


def search(folder, runner, trials, *, space=None, command=COMMAND, name="model"):
    return Search(space or make(), name, folder=folder, command=command).run(runner, trials)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_search_goes_on_in_another_process_as_it_would_have(tmp_path, name):
    first, second = Counting(Result("oom", why="CUDA out of memory")), Counting()
    before = search(tmp_path, first, 2, name=name)
    after = search(tmp_path, second, 4, name=name)
    assert len(second.points) == 2
    assert after.trials[:2] == before.trials
    assert before.trials[0].result == Result("oom", why="CUDA out of memory")
    tried = [*first.points, *second.points]
    assert len({str(point) for point in tried}) == 4
    assert [trial.point for trial in after.trials] == tried
    search(tmp_path, third := Counting(), 4, name=name)
    assert third.points == []


def test_an_interrupted_trial_is_no_trial_and_its_point_is_open_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, runner := Counting(Result("ok", 1.0, 1.0), KeyboardInterrupt()), 4, name="grid")
    cut_off = runner.points[1]
    found = search(tmp_path, runner := Counting(), 2, name="grid")
    assert runner.points == [cut_off]
    assert [trial.number for trial in found.trials] == [0, 2]


def test_a_trial_that_was_cut_off_with_its_process_is_closed(tmp_path):
    space = make()
    sampler = SAMPLERS["grid"](Encoding(space))
    study = open_study(tmp_path, space, COMMAND, sampler)
    begin_trial(study, space)
    found = search(tmp_path, Counting(), 1, name="grid")
    again = open_study(tmp_path, space, COMMAND, sampler)
    assert [trial.state.name for trial in again.trials] == ["FAIL", "COMPLETE"]
    assert [trial.number for trial in found.trials] == [1]


def test_a_second_search_at_the_same_time_is_refused_and_does_no_harm(tmp_path):
    """It closed the trial that ran, whose search then ended in an error of Optuna's."""

    class Searching(Counting):
        def run(self, number, point):
            with pytest.raises(ConfigError, match=f"{tmp_path}: another search of this study is running"):
                search(tmp_path, Counting(), 4)
            return super().run(number, point)

    found = search(tmp_path, Searching(), 2)
    assert [trial.result.outcome for trial in found.trials] == ["ok", "ok"]
    assert len(search(tmp_path, Counting(), 3).trials) == 3


def test_another_space_or_command_is_refused_with_what_changed(tmp_path):
    search(tmp_path, Counting(), 1)
    other = Space()
    other.choice("batch", [8, 4, 2], memory="grows")
    other.choice("kind", ["a", None, True])
    with pytest.raises(ConfigError, match=r"batch: \[8, 4, 2, 16\] then, \[8, 4, 2\] now"):
        search(tmp_path, Counting(), 1, space=other)
    with pytest.raises(ConfigError, match="the conditions of the space"):
        search(tmp_path, Counting(), 1, space=make(limit=8))
    with pytest.raises(ConfigError, match=r"the command: \['torchrun', 'pretrain_gpt\.py'\] then"):
        search(tmp_path, Counting(), 1, command=["python", "x.py"])


def test_a_file_that_is_no_study_is_refused(tmp_path):
    (tmp_path / "study.sqlite").write_text("this is no database, and long enough to be looked at " * 4)
    with pytest.raises(ConfigError, match="can't be used as a study"):
        search(tmp_path, Counting(), 1)


def test_optuna_reads_the_study_with_sizes_in_order(tmp_path):
    search(tmp_path, Counting(), 10, name="grid")
    storage = f"sqlite:///{tmp_path / 'study.sqlite'}"
    study = optuna.load_study(study_name="megasched tune", storage=storage)
    assert study.best_value == 16.0
    assert study.best_params["batch"] == 3  # the largest of four
    assert distributions(make())["kind"].choices == ("a", None, True)


def test_optuna_is_told_that_a_crash_says_nothing(tmp_path):
    results = [Result(outcome) for outcome in ("oom", "timeout", "crash", "refused")]
    search(tmp_path, Counting(*results), 5)
    study = open_study(tmp_path, make(), COMMAND, SAMPLERS["grid"](Encoding(make())))
    assert [trial.state.name for trial in study.trials[:4]] == ["PRUNED", "PRUNED", "FAIL", "PRUNED"]


def test_first_trials_that_all_fail_end_the_search_once(tmp_path):
    bad = [
        Result("refused", why="no such flag"),
        Result("crash", why="ImportError"),
        Result("refused", why="again"),
    ]
    with pytest.raises(ConfigError, match=r"first 3 trials all failed.*\n  - trial 0 refused: no such flag\n"):
        search(tmp_path, Counting(*bad), 10)
    assert len(search(tmp_path, Counting(), 5).trials) == 5


def test_how_many_trials_are_made_by_default():
    assert [default_trials(points) for points in (4, 30, 91, 1000)] == [4, 10, 19, 200]
