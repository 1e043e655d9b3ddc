"""What the pictures show."""

import pytest

from megasched.tuner.outcome import Result
from megasched.tuner.plots import best_of_cells, draw_heatmap, draw_history, save_plots, two_symbols
from megasched.tuner.space import Space
from megasched.tuner.study import Trial


@pytest.fixture
def space():
    space = Space()
    space.choice("kind", ["a", "b"])
    batch = space.choice("batch", [4, 1, 2])
    space.choice("layers", [0, 1, 2, 3], when=batch > 1)
    return space


TRIALS = [
    Trial(0, {"kind": "a", "batch": 4, "layers": 3}, Result("ok", 5.0, 0.1)),
    Trial(1, {"kind": "b", "batch": 4, "layers": 3}, Result("ok", 7.0, 0.1)),
    Trial(2, {"kind": "a", "batch": 2, "layers": 0}, Result("oom")),
    Trial(3, {"kind": "b", "batch": 1}, Result("ok", 2.0, 0.1)),
]


@pytest.fixture
def axes():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def test_the_heat_map_is_of_the_largest_symbols_and_shows_the_best_of_each_cell(space, axes):
    assert [symbol.name for symbol in two_symbols(space)] == ["layers", "batch"]
    assert best_of_cells(space, TRIALS) == {(3, 2): TRIALS[1], (0, 1): TRIALS[2]}
    draw_heatmap(axes, space, TRIALS)
    (image,) = axes.get_images()
    assert image.get_array()[2, 3] == 7.0
    assert image.get_array().count() == 1
    assert [text.get_text() for text in axes.texts] == ["oom"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "4"]


def test_the_history_shows_the_best_so_far(space, axes):
    draw_history(axes, space, TRIALS)
    assert axes.get_lines()[0].get_ydata().tolist() == [5.0, 7.0, 7.0, 7.0]


def test_files(space, tmp_path):
    written = save_plots(space, TRIALS, tmp_path / "plots")
    assert [path.name for path in written] == ["history.png", "parallel.png", "heatmap.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written)
    assert save_plots(space, TRIALS[2:3], tmp_path / "none") == []
    single = Space()
    single.choice("batch", [4, 1, 2])
    names = [path.name for path in save_plots(single, [Trial(0, {"batch": 1}, Result("ok", 5.0, 0.1))], tmp_path)]
    assert names == ["history.png", "parallel.png"]
