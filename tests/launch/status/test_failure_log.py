"""What a run's output says of its failure. (That of one trial as a whole: tests/tuner/test_outcome.py.)"""

import pytest

from megasched.launch.status.failure_log import FailureLog


def reason(*lines):
    log = FailureLog()
    for line in lines:
        log.read(line + "\n")
    return next((reason for reason in log.reasons if reason), "")


@pytest.mark.parametrize(
    "label",
    ["", "3: ", " 3: ", "003: ", "[default3]:", "[rank3]: ", "11: [default3]:", "11: [default3]:[rank11]: "],
)
def test_labels_of_srun_torchrun_and_pytorch(label):
    assert reason(f"{label}RuntimeError: shapes do not match") == "RuntimeError: shapes do not match"
    assert reason(f"{label}megasched: error on rank 3: no such file") == "no such file"


def test_a_cause_comes_before_what_follows_from_it():
    followed = [
        "[rank0]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 17 got signal: 15",
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:35022",
        "srun: error: node2: tasks 2-3: Terminated",
    ]
    assert reason(*followed) == followed[0].removeprefix("[rank0]: ")
    assert reason(*followed, "[rank3]: KeyError: 'x'") == "KeyError: 'x'"
    assert reason(*followed, "KeyError: 'x'", "torch.OutOfMemoryError: CUDA out of memory.").startswith(
        "torch.OutOf"
    )


def test_what_ended_a_run_of_a_launcher_comes_before_what_the_ranks_say_then():
    assert reason("RuntimeError: aborted", "megasched: ended by Ctrl-C or SIGTERM") == "ended by Ctrl-C or SIGTERM"


def test_torchruns_report_of_a_rank_that_was_killed():
    told = ["Root Cause (first observed failure):", "  exitcode  : -9 (pid: 14018)  (SIGKILL)"]
    assert reason("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", *told).startswith(
        "a rank was ended by SIGKILL"
    )


def test_a_job_that_was_ended():
    told = "slurmstepd-node1: error: *** JOB 1 ON node1 CANCELLED AT 2026-11-22T15:25:33 DUE TO TIME LIMIT ***"
    because = "JOB 1 ON node1 CANCELLED AT 2026-11-22T15:25:33 DUE TO TIME LIMIT"
    assert reason("KeyboardInterrupt", "RuntimeError: x", told) == because
    # A step is also cancelled when one of its tasks fails.
    step = "slurmstepd: error: *** STEP 1.0 ON node1 CANCELLED AT 2026-11-22T15:10:33 ***"
    assert reason(step, "RuntimeError: x") == "RuntimeError: x"
    assert reason(step, "srun: error: node2: tasks 2-3: Terminated") == "node2: tasks 2-3: Terminated"


@pytest.mark.parametrize(
    "line",
    [
        "UserWarning: the given NumPy array is not writable",
        "[Rank 1] (after 1 iterations) memory (MB) | allocated: 0.00 | max allocated: 0.00",
        "WARNING: could not find the metadata file checkpoints/latest_checkpointed_iteration.txt",
        "  error_injection_rate ............................ 0",
        "slurmstepd-node1: error: mpi/pmix_v4: no PMIx library",
        "Exception ignored in: <function _ConnectionBase.__del__ at 0x7f>",
    ],
)
def test_lines_that_are_no_failure(line):
    assert reason(line) == ""
