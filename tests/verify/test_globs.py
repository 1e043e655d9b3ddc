"""Module paths are folded into the globs of an adapter."""

from megasched.verify.new_adapter.globs import fold_paths

LAYERS = [f"model.layers.{index}.{name}" for index in range(3) for name in ("up", "down")]


def test_layers_that_are_alike_fold():
    values = {path: path[-2:] for path in LAYERS} | {"head": "x"}
    assert fold_paths(values, [*values, "model"]) == {
        "model.layers.*.up": "up",
        "model.layers.*.down": "wn",
        "head": "x",
    }


def test_a_layer_of_which_nothing_is_said_keeps_the_others_apart():
    values = {"model.layers.0.up": 1, "model.layers.2.up": 1}
    assert fold_paths(values, LAYERS) == values


def test_layers_of_which_different_things_are_said():
    values = {"model.layers.0.up": 1, "model.layers.1.up": 1, "model.layers.2.up": 2}
    assert fold_paths(values, LAYERS) == values


def test_a_glob_that_would_match_more_is_not_made():
    """``*`` of a glob goes over dots."""
    paths = ["layers.0.up", "layers.1.up", "layers.1.inner.up"]
    values = {"layers.0.up": 1, "layers.1.up": 1}
    assert fold_paths(values, paths) == values
