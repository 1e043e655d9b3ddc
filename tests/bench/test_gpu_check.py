"""The check of a GPU, but for its steps: what is run again, what is refused, and what a cut-off leaves."""

import json
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import check
import fatbin
import kernel_times
import nccl_groups
import numerics
import pack
import planned
import pytest
import torch

from tests.process import ROOT

GPU = ROOT / "bench" / "gpu"
WRITES = "import json, sys; open(sys.argv[1] + '/out.json', 'a').write('7'); print('said')"


@pytest.fixture
def made(tmp_path):
    """Makes a check of a commit, always of the same folder."""

    def make(commit="a"):
        return check.Check(tmp_path / "results", commit, {te: dict(os.environ) for te in (False, True)})

    return make


def step(name, program, **more):
    return check.Step(name, ("-c", program, "FOLDER"), **more)


def read(made, name):
    return json.loads((made().results / f"{name}.json").read_text())


def test_a_step_that_has_ended_is_passed_by(made):
    one = step("one", WRITES)
    assert [made().run(one), made().run(one)] == ["passed", "passed"]
    record = read(made, "one")
    assert record["found"] == {"out.json": 7}
    assert (record["status"], record["exit_status"], record["commit"]) == ("passed", 0, "a")


def test_a_step_of_another_commit_or_asked_for_again_begins_anew(made):
    one = step("one", WRITES)
    made().run(one)
    assert made().run(one, again=True) == "passed"
    assert made("b").run(one) == "passed"
    record = read(made, "one")
    assert record["found"] == {"out.json": 7}  # what was there is gone
    assert record["commit"] == "b"


def test_a_step_that_fails_says_what_it_said_last_and_is_passed_by(made):
    one = step("one", "print('a word'); raise SystemExit(3)")
    assert made().run(one) == "failed"
    assert read(made, "one")["log"] == ["a word"]
    assert read(made, "one")["exit_status"] == 3
    before = (made().results / "one.json").stat().st_mtime_ns
    assert made().run(one) == "failed"
    assert (made().results / "one.json").stat().st_mtime_ns == before


def test_a_step_beyond_its_limit_is_cut_off_with_all_that_it_has_started(made, tmp_path):
    child = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {_touches(tmp_path)!r}]); "
    one = step("one", f"{WRITES}; {child} time.sleep(60)", seconds=5)
    assert made().run(one) == "cut off"
    record = read(made, "one")
    assert record["exit_status"] is None
    assert record["found"] == {"out.json": 7}  # what it had written is not lost
    (tmp_path / "beat").unlink()
    time.sleep(0.6)
    assert not (tmp_path / "beat").exists()


def test_what_is_cut_off_ends_with_children_in_groups_of_their_own(made, tmp_path):
    """As torchrun starts its ranks."""
    child = f"subprocess.Popen([sys.executable, '-c', {_touches(tmp_path)!r}], start_new_session=True)"
    one = step("one", f"import subprocess, sys, time; {child}; time.sleep(60)", seconds=5)
    assert made().run(one) == "cut off"
    (tmp_path / "beat").unlink()
    time.sleep(0.6)
    assert not (tmp_path / "beat").exists()


def test_a_check_that_is_stopped_cuts_off_its_steps_and_begins_none(made):
    one, two = made(), step("two", WRITES)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(one.run, step("one", f"{WRITES}; import time; time.sleep(60)"))
        while not (one.results / "one" / "out.json").exists():
            time.sleep(0.05)
        one.stop()
        assert running.result(timeout=20) == "cut off"
    assert one.run(two) == "cut off"
    assert not (one.results / "two.json").exists()
    assert made().run(step("one", WRITES)) == "passed"  # where it was
    assert read(made, "one")["found"] == {"out.json": 77}


def _touches(folder):
    beat = str(folder / "beat")
    return f"import time\nwhile True:\n    open({beat!r}, 'w').close()\n    time.sleep(0.1)"


def test_a_step_that_was_cut_off_goes_on_in_its_folder(made):
    made().run(step("one", f"{WRITES}; import time; time.sleep(60)", seconds=5))
    assert made().run(step("one", WRITES)) == "passed"
    assert read(made, "one")["found"] == {"out.json": 77}


def test_a_check_that_was_killed_runs_its_step_again(made):
    """What it leaves says that the step was running; half a record says nothing."""
    made().run(step("one", WRITES))
    path = made().results / "one.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))
    assert made().record("one")["status"] == "running"
    assert made().run(step("one", WRITES)) == "passed"
    path.write_text(path.read_text()[:20])
    assert made().record("one") == {}
    assert made().run(step("one", WRITES)) == "passed"


def test_what_a_step_prints_may_be_a_file_of_its_own(made):
    made().run(step("one", "print('[1, 2]')", printed="said.json"))
    assert read(made, "one")["found"] == {"said.json": [1, 2]}


def test_every_step_fits_its_limit_and_has_a_file_of_its_own():
    for small in (False, True):
        steps = check.steps(small)
        assert len({one.name for one in steps}) == len(steps)
        assert all(0 < one.seconds <= check.MOST for one in steps)
    for one in check.steps():
        script = one.command[0]
        assert script == "-m" or script.startswith(str(ROOT / "bench")), one


def test_without_a_gpu_nothing_is_run(tmp_path):
    run = subprocess.run(
        [sys.executable, str(GPU / "check.py"), "--results", str(tmp_path / "results")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "no GPU" in run.stderr
    assert not (tmp_path / "results").exists()


def test_numerics_go_on_after_a_process_that_has_died(tmp_path, monkeypatch):
    """The first worker ends without a word, the second one has results of both others."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import sys, pathlib\n"
        f"sys.path[:0] = [{str(GPU)!r}, {str(ROOT)!r}]\n"
        "import numerics\n"
        "folder, cases = pathlib.Path(sys.argv[1]), sys.argv[4:]\n"
        "for case in cases:\n"
        "    if case == 'a':\n"
        "        sys.exit('out of memory')\n"
        "    numerics.note(folder, case, {'outcome': 'passed'})\n"
    )
    monkeypatch.setattr(numerics, "__file__", str(program))
    assert not numerics.run_all(tmp_path, ["a", "b", "c"], [], 1)
    found = numerics.read(tmp_path)
    assert {case: one["outcome"] for case, one in found.items()} == {"a": "died", "b": "passed", "c": "passed"}
    assert found["a"]["log"] == ["out of memory"]
    assert numerics.run_all(tmp_path, ["b", "c"], [])


def test_numerics_are_of_six_families_and_more_at_each_level_and_recipe():
    found = [case.split(":") for case in numerics.cases(te=True)]
    for level in ("leaf", "fused", "block"):
        assert len({family for family, at, *recipe in found if at == level and not recipe}) >= 6
    assert {recipe[0] for _, _, *recipe in found if recipe} == set(numerics.RECIPES)
    assert not [case for case in numerics.cases(te=False) if case.count(":") > 1]


def test_numerics_are_shared_out_by_family():
    every = numerics.cases(te=True)
    for processes in (1, 4, 99):
        shares = numerics.shared_out(every, processes)
        assert sorted(case for share in shares for case in share) == sorted(every)
        families = [{case.split(":")[0] for case in share} for share in shares]
        assert sum(map(len, families)) == len(set().union(*families))
        assert len(shares) == min(processes, len(set().union(*families)))


def test_numerics_of_several_processes_are_all_written(tmp_path, monkeypatch):
    program = tmp_path / "worker.py"
    program.write_text(
        "import sys, pathlib\n"
        f"sys.path[:0] = [{str(GPU)!r}, {str(ROOT)!r}]\n"
        "import numerics\n"
        "for case in sys.argv[4:]:\n"
        "    numerics.note(pathlib.Path(sys.argv[1]), case, {'outcome': 'passed'})\n"
    )
    monkeypatch.setattr(numerics, "__file__", str(program))
    chosen = [f"{family}:{level}" for family in "ab" for level in range(40)]
    assert numerics.run_all(tmp_path, chosen, [], 2)
    assert sorted(numerics.read(tmp_path)) == sorted(chosen)


def test_as_many_contenders_come_at_once_as_memory_has_room_for():
    assert [check.beside(22e9, memory) for memory in (24e9, 85e9, 150e9)] == [1, 1, 3]
    for memory in (24e9, 85e9, 150e9):
        for one in check.steps(memory=memory):
            if one.te and one.alone:
                assert int(one.command[one.command.index("--beside") + 1]) >= 1


def _errors(logits, gradients, **single):
    return {"logits": logits, "gradients": gradients, "single": single}


def test_errors_are_judged_by_the_largest_yardstick():
    mine = _errors(0.02, 0.03, gate=0.05, up=0.01)
    judge = numerics.judged(mine, [_errors(0.01, 0.02, gate=0.01), _errors(0.014, 0.01, gate=0.02)], 0.25)
    assert (judge["outcome"], judge["logits"], judge["gradients"]) == ("passed", [0.02, 0.014], [0.03, 0.02])
    assert judge["worst"] == ["up", 0.01, 0.0]
    assert numerics.judged(mine, [_errors(0.013, 0.02, gate=0.01)], 0.25)["outcome"] == "wrong"
    assert numerics.judged(mine, [_errors(0.3, 0.02, gate=0.01)], 0.25)["outcome"] == "wrong"
    assert numerics.judged(_errors(float("nan"), 0.0, gate=0.0), [mine], 0.25)["outcome"] == "wrong"
    assert numerics.judged(mine, [], 0.25)["outcome"] == "failed"


def test_what_is_off_is_measured_beside_its_size():
    exact = SimpleNamespace(
        logits=[torch.tensor([3.0, 4.0])], gradients={"a": torch.tensor([2.0]), "b": torch.tensor([0.0])}
    )
    found = numerics.errors(
        [torch.tensor([3.0, 4.5])], {"a": torch.tensor([1.0]), "b": torch.tensor([0.0])}, exact
    )
    assert found == {"logits": pytest.approx(0.1), "gradients": pytest.approx(0.5), "single": {"a": 0.5, "b": 1.0}}


def test_in_8_bits_the_yardstick_comes_first():
    cases = numerics.cases(te=True)
    for case in cases:
        if case.count(":") == 2:
            family, _, recipe = case.split(":")
            assert cases.index(f"{family}:block:{recipe}") <= cases.index(case)


def test_values_that_ranks_must_have():
    assert nccl_groups.expected("all_reduce", 0, 2)[:2] == [100, 102]
    assert nccl_groups.expected("reduce_scatter", 1, 2) == [108, 110, 112, 114]
    assert nccl_groups.expected("all_to_all", 1, 2) == [4, 5, 6, 7, 104, 105, 106, 107]
    assert nccl_groups.expected("shift", 0, 4)[0] == 300


def test_kernels_of_a_step_are_added_up_by_name():
    events = [("gemm", 3_000_000), ("add", 6_000_000), ("gemm", 9_000_000)] * kernel_times.STEPS
    assert kernel_times.table(events) == [
        {"name": "gemm", "launches": 2, "milliseconds": 12.0},
        {"name": "add", "launches": 1, "milliseconds": 6.0},
    ]


def test_a_plan_is_set_beside_what_was_measured():
    plan = {"memory_bytes": [{"total": 110}], "step_seconds": 3.0}
    row = planned.beside({"peak_bytes": 100, "seconds": [1.0, 2.0, 9.0]}, plan)
    assert (row["bytes_off"], row["seconds_off"]) == pytest.approx((0.1, 0.5))
    assert planned.beside({"peak_bytes": 1, "seconds": [1.0]}, {"why": "too large"})["why"] == "too large"


def test_the_plan_of_a_contender_is_the_commands():
    plan = planned.planned("tiny", "leaf", "bf16", 2, "h100-80gb")
    assert plan["flags"]["micro_batch_size"] == 2, plan
    assert plan["memory_bytes"][0]["total"] > 0


def test_contenders_of_this_check_are_found(tmp_path):
    folder = tmp_path / "1b_bf16"
    folder.mkdir()
    data = {
        "rounds": {"native": [1.0], "megasched_block": [2.0]},
        "peak_bytes": {"native": 1, "megasched_block": 5},
    }
    (folder / "contenders.json").write_text(json.dumps({**data, "setting": {"shape": "1b", "extra": []}}))
    assert list(planned.measured(tmp_path)) == [
        ("bf16", "block", {"shape": "1b", "extra": [], "peak_bytes": 5, "seconds": [2.0]})
    ]


def _container(*gpus):
    """A container with code for some kinds of GPU, each 64 bytes of its number."""
    code = b"".join(
        fatbin.ENTRY.pack(fatbin.MACHINE_CODE, 0, 64, 64, 0, 0, 0, 0, gpu).ljust(64, b"\0") + bytes([gpu]) * 64
        for gpu in gpus
    )
    return fatbin.CONTAINER.pack(fatbin.MAGIC, 1, fatbin.CONTAINER.size, len(code)) + code


def _library(path, *containers):
    """An ELF file with one section of containers, as far as ``fatbin`` reads it."""
    body, names = b"".join(containers), b"\0.nv_fatbin\0"
    start = 64
    table = start + len(body) + len(names)
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    sections = [(1, start, len(body)), (0, start + len(body), len(names))]
    rows = b"".join(
        struct.pack("<IIQQQQ", name, 0, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections
    )
    path.write_bytes(bytes(header) + body + names + rows)
    return path


def test_machine_code_for_other_gpus_is_dropped(tmp_path):
    library = _library(tmp_path / "a.so", _container(80, 90, 100), _container(90, 120))
    size = library.stat().st_size
    assert fatbin.contents(library) == {"sm_80": 1, "sm_90": 2, "sm_100": 1, "sm_120": 1}
    assert fatbin.keep(library, 90) == {"sm_90": 2} == fatbin.contents(library)
    assert library.stat().st_size == size
    assert library.read_bytes().count(bytes([90]) * 64) == 2
    assert bytes([100]) * 64 not in library.read_bytes()


def test_a_library_without_code_for_the_gpu_is_refused(tmp_path):
    with pytest.raises(fatbin.FormatError, match="sm_90"):
        fatbin.keep(_library(tmp_path / "a.so", _container(80)), 90)
    (tmp_path / "b.so").write_bytes(b"no library" * 20)
    with pytest.raises(fatbin.FormatError, match="ELF"):
        fatbin.contents(tmp_path / "b.so")


def test_an_archive_that_is_too_large_is_refused_and_removed(tmp_path, monkeypatch):
    archive = tmp_path / "kit.tar"
    archive.write_bytes(b"x" * 2000)
    assert pack.check_size(archive) == 2000
    monkeypatch.setattr(pack, "LIMIT", 1000)
    with pytest.raises(pack.PackError, match=r"kit\.tar"):
        pack.check_size(archive)
    assert not archive.exists()
    assert pack.sources() == "transformer_engine_torch==2.20.2"
