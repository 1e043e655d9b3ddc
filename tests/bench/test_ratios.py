"""Arithmetic of the interleaved timings."""

import pytest
import ratios
import step_time


def test_spread_is_median_and_quartiles() -> None:
    assert ratios.spread([1.0, 2.0, 3.0]) == {"median": 2.0, "low_quartile": 1.0, "high_quartile": 3.0}
    assert ratios.spread([4.0]) == {"median": 4.0, "low_quartile": 4.0, "high_quartile": 4.0}


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that gets slower from round to round does not change it."""
    assert ratios.ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0]) == ratios.spread([2.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="shorter"):
        ratios.ratio([1.0, 2.0], [1.0])


def test_what_was_left_out_is_in_no_ratio() -> None:
    seconds = {"native": [2.0, 2.0], "ours": [1.0, 4.0]}
    assert ratios.ratios_to(seconds, "hf_eager") == {}
    assert list(ratios.ratios_to(seconds, "native")) == ["ours"]
    found = ratios.summary(seconds, tokens=10, bases=("native", "hf_eager"))
    assert found["tokens_per_second"] == {"native": 5.0, "ours": 4.0}
    assert found["speed_relative_to"]["native"]["ours"]["median"] == pytest.approx(1.25)
    assert found["speed_relative_to"]["hf_eager"] == {}
    assert found["rounds"] == seconds


def test_step_time_says_how_much_longer_ours_takes() -> None:
    from argparse import Namespace

    data = step_time.results({"native": [1.0, 2.0], "megasched": [2.0, 4.0]}, Namespace(shape="tiny"))
    assert data["ratio_median"] == 2.0
    assert data["ratio_quartiles"] == [2.0, 2.0]
    assert data["median_seconds"] == {"native": 1.5, "megasched": 3.0}
