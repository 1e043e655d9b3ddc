"""The Gaussian process: it passes through what it was told, and knows what it does not know."""

import numpy as np
import pytest

from megasched.tuner.surrogate import GaussianProcess, expected_improvement, normal_cdf


def test_it_passes_through_smooth_values_and_is_unsure_far_from_them():
    x = np.linspace(0, 1, 9)[:, None]
    process = GaussianProcess(x, np.sin(3 * x[:, 0]))
    mean, std = process.predict(x)
    assert mean == pytest.approx(np.sin(3 * x[:, 0]), abs=0.02)
    between = np.array([[0.31], [0.69]])
    assert process.predict(between)[0] == pytest.approx(np.sin(3 * between[:, 0]), abs=0.02)
    assert process.predict(np.array([[4.0]]))[1] > 5 * std.max()


def test_an_axis_without_effect_gets_a_long_length():
    random = np.random.default_rng(0)
    x = random.random((14, 2))
    process = GaussianProcess(x, np.cos(6 * x[:, 0]))
    assert process.lengths[1] >= 4 * process.lengths[0]


def test_equal_values_are_no_trouble():
    mean, std = GaussianProcess(np.array([[0.0], [0.5], [1.0]]), np.full(3, 2.0)).predict(np.array([[0.25]]))
    assert mean == pytest.approx([2.0])
    assert std[0] > 0


def test_expected_improvement_is_the_mean_of_what_lies_above():
    draws = np.random.default_rng(0).normal(1.0, 0.5, 200_000)
    expected = np.maximum(draws - 1.3, 0).mean()
    found = expected_improvement(np.array([1.0]), np.array([0.5]), 1.3)
    assert found == pytest.approx([expected], rel=0.02)


def test_normal_cdf():
    assert normal_cdf(np.array([-1.96, 0.0, 1.96])) == pytest.approx([0.025, 0.5, 0.975], abs=1e-4)
