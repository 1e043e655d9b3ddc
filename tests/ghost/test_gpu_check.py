"""The whole check of a GPU (docs/gpu_check.md) on ghost GPUs: each step ends and writes all that it must.

Numbers are zeros there: what a step says of them is looked at as far as it tells that they were compared.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.process import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # scripts, which find each other there
sys.path.insert(0, str(ROOT / "bench" / "gpu"))

import check
import nccl_groups
import numerics
from contenders import BASES

pytestmark = pytest.mark.slow
# A step may take ten minutes, and goes on in a second run.
LONG = pytest.mark.timeout(1500)
# What a contender that can't be built here says.
WITHOUT_LIGER = {} if importlib.util.find_spec("liger_kernel") else {"hf_liger"}
FIGURES = {"outcome", "limit", "loss", "logits", "gradients", "worst", "missing", "modules", "errors", "seconds"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def run(results, transformer_engine):
    """Runs a step in the folder of this module, and again where it was cut off; returns its record."""

    def run_step(name, gpus=1):
        command = [sys.executable, str(ROOT / "bench" / "gpu" / "check.py"), "--ghost", str(gpus)]
        for _ in range(2):
            subprocess.run([*command, "--results", str(results), "--only", name], check=False, cwd=ROOT)
            record = json.loads((results / f"{name}.json").read_text())
            if record["status"] != "cut off":
                return record
        pytest.fail(f"{name} was cut off twice")

    return run_step


def test_doctor(run):
    record = run("doctor")
    assert record["status"] == "passed", record["log"]
    assert [device["capability"] for device in record["found"]["doctor.json"]["devices"]] == ["9.0"]


def test_quickstart(run):
    record = run("quickstart")
    assert record["status"] == "passed", record["log"]
    assert record["found"]["quickstart.json"]["ranks"] == 1


def test_nccl_by_two_ranks(run):
    """Few numbers are computed among ghost ranks, so that they must be right."""
    record = run("nccl", gpus=2)
    assert record["status"] == "passed", record["log"]
    assert set(record["found"]) == {"ranks_1.json", "ranks_2.json"}
    for rank in record["found"]["ranks_2.json"]["ranks"]:
        assert rank["tp"]["size"] == 2
        assert rank["tp"]["operations"].keys() == nccl_groups.OPERATIONS.keys()


@LONG
@pytest.mark.parametrize("te", [False, True])
def test_numerics(run, te):
    """Each case comes to its verdict, which can't be good: all is zeros."""
    found = run("numerics_te" if te else "numerics")["found"][numerics.RESULTS]
    assert sorted(found) == sorted(numerics.cases(te))
    # In 8 bits Megatron's layers are their own yardstick, and zeros are as far off as zeros.
    assert {case: one for case, one in found.items() if one["outcome"] != "wrong"} == {}
    assert all(one.keys() == FIGURES and not one["missing"] for one in found.values())
    if te:  # of each family, but for what its kernels don't take
        assert all(found[f"{family}:block"]["modules"]["FusedAttention"] for family in ("llama", "mixtral"))


CONTENDERS = [one.name for one in check.steps() if "contenders.py" in one.command[0]]


@LONG
@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders(run, results, name):
    record = run(name)
    assert record["status"] == "passed", record["log"]
    data = record["found"]["contenders.json"]
    out = WITHOUT_LIGER if name.endswith("others") else set()
    assert set(data["left_out"]) <= out, data["left_out"]
    command = record["command"]
    asked = set(command[command.index("--only") + 1 : command.index("--folder")]) | {BASES[0]}
    assert data["tokens_per_second"].keys() | data["left_out"].keys() == asked
    assert data["speed_relative_to"]["native"].keys() == data["tokens_per_second"].keys() - {"native"}
    # All are timed; torch's profiler sees nothing of a ghost GPU.
    assert data["kernels"].keys() == data["tokens_per_second"].keys()
    assert all(len(one["step_milliseconds"]) == 3 for one in data["kernels"].values())
    said = (results / name / "log").read_text()
    assert all(f"{each:16} kernels: torch has seen none" in said for each in data["kernels"])


@LONG
def test_planner_after_contenders(run, results):
    for name in ("1b_bf16", "1b_others"):
        run(name)
    record = run("planner")
    assert record["status"] == "passed", record["log"]
    rows = record["found"]["planned.json"]["rows"]
    assert {("bf16", level) for level in ("block", "fused", "leaf")} <= {
        (row["precision"], row["level"]) for row in rows if row["shape"] == "tiny"
    }
    assert all(row["planned_bytes"] > 0 and row["measured_bytes"] > 0 for row in rows)


def test_calibration_tells_that_this_is_no_gpu(run):
    record = run("calibration")
    assert record["status"] == "failed"
    assert "--calibrate" in record["log"][-1]
