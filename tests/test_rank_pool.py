"""The pool itself: results, failure and hang reports, and a clean state from case to case."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from megasched.trainer.flags.rehearsal import KERNELS
from megasched.verify.ranks import pool
from megasched.verify.ranks.pool import RankError, cache_folder, init_megatron
from megasched.verify.trainer_run import train
from tests import tiny
from tests.waiting import signalled, until


def sum_of_ranks(offset):
    tensor = torch.tensor([float(torch.distributed.get_rank() + offset)], requires_grad=True)
    total = tensor.detach().clone()
    torch.distributed.all_reduce(total)
    print("noise that a passing test must not show")
    return {
        "total": total,
        "own": tensor,
        "view": torch.zeros(1000)[:2],
        "bf16": torch.nn.Parameter(total.bfloat16()),
    }


def fail_on_rank_one():
    print("said before the failure")
    torch.distributed.barrier()  # the other one comes this far
    if torch.distributed.get_rank() == 1:
        raise ValueError("seven is not even")
    torch.distributed.barrier()


def hang_on_rank_zero(folder):
    (folder / f"here-{torch.distributed.get_rank()}").touch()
    if torch.distributed.get_rank() == 0:
        sleep_here()
    torch.distributed.barrier()


def all_hang(folder):
    return len([*folder.glob("here-*")]) == 2


def sleep_here():
    time.sleep(600)  # longer than a test may take


def group_of_a_dtensor(others):
    """What torch has seen before of a tensor over the same ranks is of groups that are gone."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for _ in range(others):
        torch.distributed.new_group([0, 1])
    group = torch.distributed.new_group([0, 1])
    tensor = distribute_tensor(torch.ones(4), DeviceMesh.from_group(group, "cpu"), [Shard(0)]).detach()
    return tensor.device_mesh.get_group() is group


def die_on_rank_one():
    import os

    if torch.distributed.get_rank() == 1:
        os._exit(7)


def groups(tp):
    from megatron.core import parallel_state

    fresh = not parallel_state.model_parallel_is_initialized()
    collection = init_megatron(tp=tp)
    mine = torch.tensor([2.0 ** torch.distributed.get_rank()])
    torch.distributed.all_reduce(mine, group=collection.tp)
    return fresh, collection.tp.size(), collection.dp.size(), mine.item()


def leave_global_state():
    import os

    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import async_utils
    from megatron.training.global_vars import set_args

    set_args("left over")
    init_num_microbatches_calculator(0, None, 4, 1, 4)
    async_utils._async_calls_queue = "left over"
    os.environ["LEFT_OVER"] = "1"
    init_megatron()
    torch.set_default_dtype(torch.float64)


def found_global_state():
    import os

    from megatron.core import num_microbatches_calculator
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.training import async_utils, global_vars

    return [
        async_utils._async_calls_queue,
        global_vars._GLOBAL_ARGS,
        num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR,
        os.environ.get("LEFT_OVER"),
        get_cuda_rng_tracker().get_states(),
        torch.get_default_dtype(),
        torch.initial_seed(),
        os.environ["WORLD_SIZE"],
    ]


def test_results_come_back_in_rank_order_as_plain_tensors(ranks, capfd):
    results = ranks.run(2, sum_of_ranks, 10)
    assert [result["total"].item() for result in results] == [21.0, 21.0]
    assert [result["own"].item() for result in results] == [10.0, 11.0]
    assert not results[0]["own"].requires_grad
    assert type(results[0]["bf16"]) is torch.Tensor
    assert results[0]["bf16"].dtype is torch.bfloat16
    assert results[0]["view"].untyped_storage().nbytes() == 8
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_keyword_arguments_and_another_world_size(ranks):
    (result,) = ranks.run(1, sum_of_ranks, offset=3)
    assert result["total"].item() == 3.0


def test_dtensors_have_the_groups_of_their_case(ranks):
    assert [ranks.run(2, group_of_a_dtensor, others) for others in (0, 2)] == [[True, True]] * 2


def test_groups_are_made_anew_for_each_case(ranks):
    assert ranks.run(2, groups, 2) == [(True, 2, 1, 3.0), (True, 2, 1, 3.0)]
    assert ranks.run(2, groups, 1) == [(True, 1, 2, 1.0), (True, 1, 2, 2.0)]
    assert ranks.run(4, groups, 2) == [(True, 2, 2, 3.0)] * 2 + [(True, 2, 2, 12.0)] * 2


def _drawn() -> torch.Tensor:
    return torch.rand(3)


def test_every_case_begins_with_the_same_random_state(ranks):
    """The first one of new ranks, too: a run and what it is held against are two cases."""
    ranks.renew()
    first, second = (ranks.run(1, _drawn)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_nothing_of_a_case_reaches_the_next(ranks):
    ranks.run(1, leave_global_state)
    (found,) = ranks.run(1, found_global_state)
    assert found == [None, None, None, None, {}, torch.float32, 1234, "1"]


def test_a_failure_shows_the_traceback_and_what_the_others_were_doing(ranks):
    with pytest.raises(RankError) as error:
        ranks.run(2, fail_on_rank_one)
    report = str(error.value)
    assert report.startswith("1 of 2 ranks failed\n--- rank 1 failed:\nTraceback")
    assert "ValueError: seven is not even" in report
    assert 'in fail_on_rank_one\n    raise ValueError("seven is not even")' in report
    assert "rank 0 was still running" in report
    assert "in barrier" in report
    assert "said before the failure" in report


def test_a_hang_shows_every_ranks_stack(ranks, tmp_path, monkeypatch):
    collect = pool._collect

    def collect_of_hanging(started, timeout):
        until(lambda: all_hang(tmp_path))  # its time begins here, however long the start has taken
        return collect(started, timeout)

    monkeypatch.setattr(pool, "_collect", collect_of_hanging)
    with pytest.raises(RankError) as error:
        ranks.run(2, hang_on_rank_zero, tmp_path, timeout=3)
    report = str(error.value)
    assert report.startswith("no end after 3 s (hang?)")
    assert "in sleep_here" in report
    assert "in barrier" in report


def test_a_rank_that_dies_is_told_and_the_pool_works_again(ranks):
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        ranks.run(2, die_on_rank_one)
    assert ranks.run(2, groups, 2) == [(True, 2, 1, 3.0), (True, 2, 1, 3.0)]


def test_ctrl_c_is_for_the_process_that_has_the_pool(ranks):
    """A terminal sends it to all; ranks that ended by it printed tracebacks, and the command failed by that."""
    pids = ranks.run(2, os.getpid)
    for pid in {*pids, *(psutil.Process(pid).ppid() for pid in pids)}:
        os.kill(pid, signal.SIGINT)
    assert ranks.run(2, os.getpid) == pids


def test_a_rank_that_died_between_two_cases_is_told_and_the_pool_works_again(ranks):
    (pid,) = ranks.run(1, os.getpid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(RankError, match="rank 0 died with exit code -9"):
        ranks.run(1, os.getpid)
    assert ranks.run(1, os.getpid) != [pid]


class StoppedError(Exception):
    pass


def test_a_case_that_is_stopped_from_outside_leaves_the_pool_usable(ranks, tmp_path):
    """As pytest-timeout stops one; what the ranks were at must not be taken for the next case's outcome."""

    def stop(signum, frame):
        raise StoppedError

    before = signal.signal(signal.SIGUSR2, stop)
    try:
        with pytest.raises(StoppedError), signalled(signal.SIGUSR2, lambda: all_hang(tmp_path)):
            ranks.run(2, hang_on_rank_zero, tmp_path)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ranks.run(2, groups, 2) == [(True, 2, 1, 3.0), (True, 2, 1, 3.0)]


def write_to_cache(name, fails):
    folder = cache_folder()
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("")
    if fails:
        raise ValueError("in the middle of it")
    return sorted(path.name for path in folder.iterdir())


def test_the_cache_keeps_what_cases_before_a_failed_one_have_written(ranks):
    ranks.run(1, write_to_cache, "whole", False)
    (old,) = ranks.run(1, age_cache)
    with pytest.raises(RankError, match="in the middle of it"):
        ranks.run(1, write_to_cache, "half", True)
    (found,) = ranks.run(1, write_to_cache, "new", False)
    assert sorted({*old, "new"}) == found
    assert "whole" in old


def age_cache():
    for path in cache_folder().iterdir():
        os.utime(path, (0, 0))
    return sorted(path.name for path in cache_folder().iterdir())


def start_a_child_and_die():
    child = subprocess.Popen(["sleep", "600"])
    raise ValueError(f"child {child.pid}")


def test_what_a_rank_started_ends_with_it(ranks):
    with pytest.raises(RankError) as error:
        ranks.run(1, start_a_child_and_die)
    child = int(re.search(r"ValueError: child (\d+)", str(error.value)).group(1))
    until(lambda: not _runs(child))


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def importable_kernels():
    return [name for name in KERNELS if sys.modules.get(name, name) is not None]


def test_ranks_can_import_no_kernels_for_gpus_where_they_are_installed(ranks):
    assert ranks.run(1, importable_kernels) == [[]]


def test_more_ranks_than_the_pool_has_are_refused(ranks):
    with pytest.raises(ValueError, match="1 to 4 ranks"):
        ranks.run(5, groups, 1)


def threads():
    return len(os.listdir("/proc/self/task"))


def test_a_run_of_the_trainer_leaves_no_groups_behind(ranks, tmp_path):
    """The threads of gloo groups that nobody uses would slow every later case."""
    before = ranks.run(2, threads)
    folder = tiny.save("llama", tmp_path)
    flags = ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"]
    ranks.run(2, train, folder, flags, iterations=1)
    after = ranks.run(2, threads)
    assert [there <= here + 8 for here, there in zip(before, after, strict=True)] == [True, True]
