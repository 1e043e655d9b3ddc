"""Construction, primitives and plots on tiny shapes; times are looked at by nobody."""

import json
import re
import subprocess
import sys
from pathlib import Path

import construct
import machine
import memory
import plot
import primitives
import pytest

from tests.bench.conftest import BENCH


def test_growth_of_a_line_and_of_a_square() -> None:
    line = [{"layers": n, "s": 3.0 + 2.0 * n} for n in (8, 16, 32, 64)]
    assert construct.growth(line, "s") == pytest.approx({"base": 3.0, "per_layer": 2.0, "bend": 1.0})
    square = [{"layers": n, "s": float(n * n)} for n in (8, 16, 32, 64)]
    assert construct.growth(square, "s")["bend"] > 2


def test_a_plan_is_measured_without_building() -> None:
    row = construct.measure_one("tiny", 3, 2, 1, 0, "none")
    assert row.keys() == {
        *("layers", "tp", "pp", "imports_seconds", "imports_bytes", "plan_seconds", "plan_bytes"),
    }
    assert row["layers"] == 3
    assert row["plan_seconds"] > 0
    assert construct._line(row).startswith("3 layers: ")


def test_a_stage_is_built_and_its_shards_are_counted() -> None:
    given = json.dumps(["tiny", 4, 2, 2, 1, "zeros"])
    run = subprocess.run([sys.executable, construct.__file__, "--one", given], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    row = json.loads(run.stdout.splitlines()[-1])
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48  # q, o; k, v; gate, up, down
    numel = 2 * (layer // 2 + 2 * 32) + 32 + 256 * 32 // 2  # two norms a layer, the last norm, half the head
    assert row["shard_bytes"] == 2 * numel
    assert (row["stage"], row["stage_layers"], row["values"]) == (1, 2, "zeros")


def test_every_primitive_is_measured() -> None:
    import megasched

    found = primitives.measure(2, 1)
    # A plan has nothing to do for the one, and what is measured has no batch norm for the other.
    apart = {"cut_pipeline_stage", "sync_batch_norm"}
    assert found.keys() - {"auto"} == set(megasched.list_primitives()) - apart
    for row in found.values():
        assert row["records"] > 0
        assert row["plan_seconds_of_empty"] > 0


def test_memory_is_that_of_this_process() -> None:
    assert 0 < memory.resident_bytes() <= memory.peak_resident_bytes()


def test_every_committed_result_says_what_it_was_taken_on() -> None:
    for path in machine.RESULTS.glob("*.json"):
        described = json.loads(path.read_text())["machine"]
        assert {"processor", "cores", "torch", "megatron-core", "transformers", "commit"} <= described.keys()


def test_results_are_drawn(tmp_path: Path) -> None:
    spread = {"median": 1.0, "low_quartile": 0.9, "high_quartile": 1.2}
    files = {
        "contenders": {"tokens_per_second": {"a": 5.0}, "seconds": {"a": spread}},
        "construct": {"rows": [{"layers": n, "plan_seconds": n} for n in (1, 2)]},
        "primitives": {"primitives": {"shard": {"milliseconds_added_per_layer": 0.1}}},
        "other": {},
    }
    drawn = {}
    for name, data in files.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"machine": {"gpu": None, "processor": "some"}, **data}))
        drawn[name] = plot.draw(path, tmp_path)
    assert drawn.pop("other") is None
    assert all(target is not None and target.stat().st_size > 1000 for target in drawn.values())


def test_no_script_has_the_name_of_a_package_that_transformers_looks_for() -> None:
    """The folder of a script is the first place that Python looks into: ``kernels`` was there for all."""
    from transformers.utils import import_utils

    source = Path(import_utils.__file__).read_text()
    wanted = set(re.findall(r'_is_package_available\(\s*"(\w+)', source))
    assert {"kernels", "accelerate", "datasets"} <= wanted
    scripts = {path.stem for folder in (BENCH, BENCH / "gpu") for path in folder.glob("*.py")}
    assert not wanted & scripts
