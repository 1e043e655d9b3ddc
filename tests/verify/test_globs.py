"""Paths folded into globs, sizes written as fields of the config, names for what was found."""

from types import SimpleNamespace

import pytest

from megasched.verify.new_adapter.globs import fold_paths
from megasched.verify.new_adapter.sizes import write_sizes

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


def config(hidden, heads, groups, **more):
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups}
    return SimpleNamespace(**sizes, **more)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ([(config(64, 4, 4), (64, 64, 64))], "(config.hidden_size,) * 3"),
        (
            [(config(64, 4, 2, head_dim=32), (128, 64, 64)), (config(64, 8, 2, head_dim=16), (128, 32, 32))],
            "(config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim, "
            "config.num_key_value_heads * config.head_dim)",
        ),
        (
            [(config(64, 4, 2), (64, 32, 32))],
            "(config.hidden_size, config.hidden_size // config.num_attention_heads * config.num_key_value_heads, "
            "config.hidden_size // config.num_attention_heads * config.num_key_value_heads)",
        ),
        ([(config(64, 4, 2, d_ff=100), (100, 100))], "(config.d_ff,) * 2"),
        ([(config(64, 4, 2), (65, 65))], None),
        # 96 is d_ff in one of the two alone
        ([(config(64, 4, 4, d_ff=96), (96, 96)), (config(32, 4, 4, d_ff=80), (96, 96))], None),
    ],
)
def test_sizes_are_fields_of_the_config(seen, text):
    assert write_sizes(seen) == text
    if text is not None:
        for one, sizes in seen:
            assert eval(text, {"config": one}) == sizes
