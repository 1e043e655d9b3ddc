"""What a run's output and exit status say: how fast it was, or why it was not."""

import pytest

from megasched.tuner.outcome import WARM_UP, RunLog
from tests.tuner.trainer import line


def judged(status, *lines):
    log = RunLog()
    for text in lines:
        log.read(text)
    return log.judge(status)


def test_the_score_is_samples_per_second_of_the_median_iteration_after_warm_up():
    found = judged(0, *(line(i, ms, 32) for i, ms in enumerate([900, 500, 400, 100, 200, 1000], 1)))
    assert found.outcome == "ok"
    assert found.seconds == pytest.approx(0.2)
    assert found.score == pytest.approx(32 / 0.2)


def test_of_a_run_that_was_started_again_the_last_start_counts():
    """torchrun --max-restarts starts all ranks again, and their iterations begin anew."""
    first = [line(i, 900, 32) for i in range(1, 6)]
    found = judged(0, *first, *(line(i, 200, 32) for i in range(1, 9)))
    assert found.outcome == "ok"
    assert (found.seconds, found.score) == (pytest.approx(0.2), pytest.approx(32 / 0.2))
    again = judged(0, *first, *(line(i, 200, 32) for i in range(1, WARM_UP + 1)))
    assert "ended after 3 iterations" in again.why


def test_a_run_that_ends_in_its_warm_up_has_no_score():
    found = judged(0, *(line(i, 100, 32) for i in range(1, WARM_UP + 1)))
    assert (found.outcome, found.score) == ("crash", None)
    assert "ended after 3 iterations" in found.why


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...",
        "[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried",
        "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Failed to CUDA calloc; out of memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_out_of_memory(text):
    found = judged(1, "starting", text, "torch.distributed.elastic.ChildFailedError: ")
    assert found.outcome == "oom"
    assert found.why in text


def test_a_killed_rank_is_taken_for_a_host_without_memory():
    assert judged(-9).outcome == "oom"
    assert (
        judged(1, "  exitcode  : -9 (pid: 12)", "  traceback : Signal 9 (SIGKILL) received by PID 12").outcome
        == "oom"
    )
    assert judged(-11).outcome == "crash"


def test_a_run_that_ends_well_has_not_run_out_of_memory_whatever_it_prints():
    steps = [line(i, 100, 8) for i in range(1, 6)]
    assert judged(0, "torch.OutOfMemoryError of an earlier attempt", *steps).outcome == "ok"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["megasched: error: 4 ranks are no multiple of TP 8"], "4 ranks are no multiple of TP 8"),
        (["megasched: error on rank 3: no such file"], "no such file"),
        (
            [
                "megasched: error: the schedule has a problem:",
                "  - TP 3 does not divide 4 attention heads",
                "    remedy",
            ],
            "the schedule has a problem: TP 3 does not divide 4 attention heads",
        ),
        (["usage: x.py", "pretrain_gpt.py: error: unrecognized arguments: --micro-batchsize 1"], "unrecognized"),
        (
            [
                "Traceback (most recent call last):",
                '  File "megatron/training/arguments.py", line 500, in validate_args',
                "    assert args.world_size % total == 0",
                "AssertionError: world size (8) is not divisible by total_model_size",
            ],
            "AssertionError: world size (8)",
        ),
    ],
)
def test_refused_flags(lines, why):
    found = judged(1, *lines)
    assert found.outcome == "refused"
    assert why in found.why


def test_what_slurm_says_of_a_task_is_no_refusal():
    told = ("0: RuntimeError: shapes do not match", "srun: error: node1: task 0: Exited with exit code 1")
    assert judged(1, *reversed(told)).outcome == "crash"
    assert judged(1, *told).why == "RuntimeError: shapes do not match"


def test_anything_else_is_a_crash_with_its_first_exception():
    found = judged(
        1,
        "Traceback (most recent call last):",
        '[rank0]:   File "x.py", line 3, in forward',
        "[rank0]: RuntimeError: shapes do not match",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    )
    assert (found.outcome, found.why) == ("crash", "RuntimeError: shapes do not match")
    assert judged(7).why == "exit status 7"
