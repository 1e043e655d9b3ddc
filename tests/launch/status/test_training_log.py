"""Megatron's log lines read back as numbers, the second one corrected."""

import math
from datetime import datetime

import pytest

from megasched.launch.status.training_log import Checkpoint, Milestone, RankTimes, merge
from tests.launch.status.runs import read_log

LINE = (
    " [2026-11-20 10:{m:02d}:{s:02d}.686823] iteration {i:8d}/     160 | consumed samples:          424 |"
    " elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.075198E-03 | global batch size:     4 |"
    "{loss} loss scale: 1.0 | grad norm: 0.790 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)


def line(i, ms, loss):
    told = f" lm loss: {loss:.6E} |" if loss is not None else ""
    return LINE.format(i=i, m=i // 60, s=i % 60, ms=ms, loss=told)


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


# As a rehearsal printed it, on rank 3 of 4.
REAL = (
    "[default3]: [2026-11-22 14:59:35.493723] iteration        5/      12 | consumed samples:           20 |"
    " elapsed time per iteration (ms): 418.2 | throughput per GPU (TFLOP/s/GPU): 412.5 |"
    " learning rate: 6.664686E-04 | global batch size:     4 | lm loss: 4.360119E+00 |"
    " load_balancing_loss: 1.0E+00 | loss scale: 1.0 | grad norm: 0.833 |"
    " number of skipped iterations:   1 | number of nan iterations:   2 |\n"
)


def test_all_that_a_line_says():
    (step,) = read_log([REAL]).printed
    assert (step.iteration, step.last, step.samples) == (5, 12, 4)
    assert step.time == datetime(2026, 11, 22, 14, 59, 35, 493723)
    assert (step.loss, step.seconds, step.grad_norm, step.tflops) == (4.360119, 0.4182, 0.833, 412.5)
    assert (step.skipped, step.nan) == (1, 2)


def test_another_loss_does_not_stand_for_one_that_is_none():
    (step,) = read_log([REAL.replace("lm loss: 4.360119E+00 | ", "")]).printed
    assert math.isnan(step.loss)


def test_a_line_that_another_rank_wrote_into_is_passed_over():
    assert read_log([REAL.replace("global batch size:     4", "global batch [Rank 1] size:  x 4")]).printed != []
    assert read_log([REAL.replace("418.2", "41WARNING: 8.2")]).printed == []


def test_messages_of_two_ranks_on_one_line_are_all_read():
    # As a run printed them: rank 0's came between the last rank's message and its line end.
    saving = "[2026-11-22 14:59:36.0] saving checkpoint at iteration      30 to ck in torch_dist format"
    saved = "  [2026-11-22 14:59:37.0] successfully saved checkpoint from iteration      30 to ck [ t 1/2, p 1/1 ]"
    done = "[after training is done] datetime: 2026-11-22 14:59:38.0 "
    validation = " validation loss at iteration 30 | lm loss value: 5.0E+00 | lm loss PPL: 2.15E+02 | "
    first, second = line(29, 1000.0, 3.0).rstrip("\n"), line(30, 1000.0, 2.0).rstrip("\n")
    for printed in (
        [first + saving, second + saved, validation + done],
        [saving + first, saved + validation, done + second],
        [first + second + saving + saved + done + validation],
    ):
        log = read_log([each + "\n" for each in printed])
        assert [(step.iteration, step.nan) for step in log.printed] == [(29, 0), (30, 0)]
        assert log.validation == {30: 5.0}
        assert log.saving == [Checkpoint(30, datetime(2026, 11, 22, 14, 59, 36), "ck")]
        assert log.saved == [Checkpoint(30, datetime(2026, 11, 22, 14, 59, 37), "ck")]
        assert log.ends == [Milestone(datetime(2026, 11, 22, 14, 59, 38), "after training is done")]


def test_checkpoints_starts_ends_and_arguments():
    log = read_log(
        [
            "0:   encoder_seq_length .............................. 32\n",
            "0:   seq_length ...................................... 64\n",
            "0:   inprocess_active_world_size ..................... 8\n",
            "0:   world_size ...................................... 4\n",
            "0: [before the start of training step] datetime: 2026-11-22 14:59:18.629164 \n",
            "0: [2026-11-22 14:59:22.759546] saving checkpoint at iteration       4 to my ck in torch_dist"
            " format\n",
            "0:   [2026-11-22 14:59:35.061950] successfully saved checkpoint from iteration       4 to my ck"
            " [ t 1/2, gtp_remat 1/1, p 1/2 ]\n",
            "0:   [2026-11-22 14:59:36.0] successfully saved local checkpoint from iteration       5\n",
            "0:  loading distributed checkpoint from ck at iteration 6\n",
            "0: [after dataloaders are built] datetime: 2026-11-22 14:59:36.0 \n",
            "0: [exiting program at iteration 6] datetime: 2026-11-22 14:59:37.200998 \n",
        ]
    )
    assert log.arguments == {"seq_length": 64, "world_size": 4}
    assert log.starts == [datetime(2026, 11, 22, 14, 59, 18, 629164)]
    assert log.saving == [Checkpoint(4, datetime(2026, 11, 22, 14, 59, 22, 759546), "my ck")]
    assert log.saved == [
        Checkpoint(4, datetime(2026, 11, 22, 14, 59, 35, 61950), "my ck"),
        Checkpoint(5, datetime(2026, 11, 22, 14, 59, 36), ""),
    ]
    assert log.ends == [Milestone(datetime(2026, 11, 22, 14, 59, 37, 200998), "exiting program at iteration 6")]


START = "[before the start of training step] datetime: 2026-11-20 10:00:{s:02d}.5 \n"


def test_iterations_after_a_restart_replace_those_from_there_on():
    lines = [line(i, 1000.0, 9.0 - i) for i in (1, 2, 3, 4)]
    # From the checkpoint of iteration 2: the second line of these processes holds their first, too.
    lines += [line(i, 1000.0, loss).replace("10:00", "10:01") for i, loss in ((3, 2.0), (4, 1.5), (5, 0.5))]
    log = read_log(lines)
    assert [step.iteration for step in log.iterations] == [1, 2, 3, 4, 5]
    assert [step.loss for step in log.iterations] == pytest.approx([8.0, 6.0, 2.0, 1.0, 0.5])
    assert [step.iteration for step in log.this_start] == [3, 4, 5]
    assert len(log.printed) == 7


def test_a_start_right_after_a_checkpoint_is_known_by_its_line():
    lines = [line(1, 1000.0, 6.0), line(2, 1000.0, 5.5), START.format(s=3)]
    lines += [line(3, 1000.0, 4.0).replace("10:00", "10:01"), line(4, 1000.0, 3.5).replace("10:00", "10:01")]
    log = read_log(lines)
    assert [step.loss for step in log.iterations] == pytest.approx([6.0, 5.0, 4.0, 3.0])
    assert [step.iteration for step in log.this_start] == [3, 4]


def test_what_is_returned_is_corrected_after_each_start():
    log = read_log([line(1, 1000.0, 6.0), line(2, 1000.0, 5.5), START.format(s=3)])
    log.read(line(3, 1000.0, 4.0))
    assert log.read(line(4, 1000.0, 3.5)).loss == pytest.approx(3.0)
    assert log.read(line(5, 1000.0, 3.5)).loss == 3.5


def test_processes_that_have_started_and_printed_nothing_have_no_iterations():
    assert read_log([line(1, 1000.0, 6.0), START.format(s=3)]).this_start == []


def test_logs_are_merged_by_their_times():
    first = read_log([line(1, 1000.0, 6.0), line(3, 1000.0, 4.0), "  seq_length ........... 64\n"])
    second = read_log([line(2, 1000.0, 5.0), "  seq_length ........... 32\n"])
    merged = merge([first, second])
    assert [step.iteration for step in merged.printed] == [1, 2, 3]
    assert merged.arguments == {"seq_length": 32}
    assert merge([second, first]).printed == merged.printed


def test_the_slowest_and_the_fastest_rank():
    # As a rehearsal printed it, less what has to do with GPUs.
    told = (
        "[default0]:INFO:megatron.core.utils:[2026-11-22 19:50:47] | MnRtt/Rnk: 8.80ms/0 |"
        " MxRtt/Rnk: 1511.25ms/13 | MnPwr/Rnk: 0.00W/0\n"
    )
    when = datetime(2026, 11, 22, 19, 50, 47)
    assert read_log([told]).rank_times == [RankTimes(when, 13, 1.51125, 0, 0.0088)]
