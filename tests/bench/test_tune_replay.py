"""The bar of the tuner: within 1 % of the best of a recorded 13 x 7 grid in a fifth of its points."""

import csv
import math

import pytest
import tune_grid_synthetic
import tune_replay


@pytest.fixture(params=tune_replay.GRIDS)
def grid(request):
    return tune_replay.read_grid(tune_replay.DATA / f"{request.param}.csv")


def test_a_recorded_grid_is_13_by_7_with_points_that_do_not_fit(grid):
    assert [len(set(values)) for values in zip(*grid.scores, strict=True)] == [13, 7]
    assert len(grid.scores) == 91
    lost = sum(score is None for score in grid.scores.values())
    assert 10 < lost < 50
    # Not at a corner, and not so flat that any point would do.
    assert next(point for point, score in grid.scores.items() if score == grid.best) not in grid.corners
    assert sum(score >= 0.99 * grid.best for score in grid.scores.values() if score is not None) <= 3


@pytest.mark.parametrize("seed", [0, 1])
def test_the_optimum_is_found_in_a_fifth_of_the_trials_from_every_corner(grid, seed):
    for corner in grid.corners:
        gaps = tune_replay.search(grid, "model", corner, seed)
        assert len(gaps) == 18
        assert gaps[-1] <= 0.01, corner


def test_the_synthetic_grid_is_what_its_script_makes():
    with (tune_replay.DATA / "tune_grid_synthetic.csv").open(newline="") as file:
        recorded = list(csv.DictReader(file))
    made = list(tune_grid_synthetic.rows(tune_grid_synthetic.Machine()))
    assert recorded == [{key: "" if value is None else str(value) for key, value in row.items()} for row in made]


def test_figures_of_a_replay():
    found = tune_replay.summarize([[0.5, 0.009, 0.0], [0.5, 0.2, 0.02], [0.0, 0.0, 0.0]])
    assert found["searches"] == 3
    assert found["within_1_percent"] == pytest.approx(2 / 3)
    assert found["optimum"] == pytest.approx(2 / 3)
    assert found["worst_gap"] == 0.02
    assert (found["median_trials_to_1_percent"], found["most_trials_to_1_percent"]) == (1.5, 2)


def test_noise_is_of_the_measurement_alone():
    grid = tune_replay.Grid(("batch_size", "recompute"), {(8.0, 0.0): 100.0, (16.0, 0.0): None})
    replay = tune_replay.Replay(grid, seed=0, noise=0.1)
    scores = [replay.run(0, {"batch_size": 8.0, "recompute": 0.0}).score for _ in range(400)]
    assert math.log(max(scores) / 100) > 0.15
    assert sum(scores) / 400 == pytest.approx(100, rel=0.03)
    assert replay.run(0, {"batch_size": 16.0, "recompute": 0.0}).outcome == "oom"
