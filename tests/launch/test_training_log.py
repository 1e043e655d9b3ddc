"""Megatron's log lines read back as numbers, the second one corrected."""

import math

import pytest

from megasched.launch.training_log import read_log

LINE = (
    " [2026-11-20 10:00:0{i}.686823] iteration {i:8d}/     160 | consumed samples:          424 |"
    " elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.075198E-03 | global batch size:     4 |"
    "{loss} loss scale: 1.0 | grad norm: 0.790 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)


def line(i, ms, loss):
    return LINE.format(i=i, ms=ms, loss=f" lm loss: {loss:.6E} |" if loss is not None else "")


def test_the_second_line_loses_the_first_iterations_share():
    # Iterations of loss 6, 5, 4 and 3000, 1000, 1100 ms: the second line is printed as a mean of two.
    log = read_log([line(1, 3000.0, 6.0), line(2, 2000.0, 5.5), line(3, 1100.0, 4.0)])
    assert [step.loss for step in log.printed] == [6.0, 5.5, 4.0]
    assert [step.loss for step in log.iterations] == pytest.approx([6.0, 5.0, 4.0])
    assert [step.seconds for step in log.iterations] == pytest.approx([3.0, 1.0, 1.1])


def test_with_a_longer_log_interval_the_share_is_smaller():
    # Losses 10, 6, 5, 4, 3: printed after 1 (alone) and after 5 (mean of all five).
    log = read_log([line(1, 1000.0, 10.0), line(5, 1000.0, 28 / 5), line(10, 1000.0, 2.0)])
    assert [step.loss for step in log.iterations] == pytest.approx([10.0, 4.5, 2.0], abs=1e-5)


def test_a_resumed_run_starts_anywhere():
    log = read_log([line(101, 1000.0, 3.0), line(102, 1000.0, 2.5)])
    assert [step.iteration for step in log.iterations] == [101, 102]
    assert [step.loss for step in log.iterations] == pytest.approx([3.0, 2.0])


def test_one_iteration_needs_no_correction():
    assert read_log([line(1, 1000.0, 3.0)]).iterations == read_log([line(1, 1000.0, 3.0)]).printed


def test_a_line_without_loss_is_a_nan_not_a_gap():
    steps = read_log([line(1, 1000.0, 3.0), line(2, 1000.0, 3.0), line(3, 1000.0, None)]).iterations
    assert math.isnan(steps[2].loss)
    assert steps[2].iteration == 3


def test_validation_losses_of_training_and_of_its_end():
    log = read_log(
        [
            "-----\n",
            " validation loss at iteration 40 | lm loss value: 5.374705E+00 | lm loss PPL: 2.15E+02 | \n",
            " validation loss at iteration 160 on validation set | lm loss value: 2.508214E+00 | \n",
            " validation loss at iteration 160 on test set | lm loss value: 9.000000E+00 | \n",
        ]
    )
    assert log.validation == {40: 5.374705, 160: 2.508214}


def test_other_output_is_passed_over():
    log = read_log(["> building train, validation and test datasets ...\n", "iteration 3\n", "\n"])
    assert log.iterations == []
    assert log.validation == {}
