"""The example schedules: each plans without a problem on the family it is for, and does what it says."""

from collections import Counter
from math import prod
from pathlib import Path

import pytest

from megasched.layout import Layout
from megasched.report.show import ShowReport, inspect_schedule
from tests import tiny

SCHEDULES = Path(__file__).resolve().parents[1] / "examples" / "schedules"
FAMILIES = {
    "llama.py": ("llama", "mistral", "qwen2", "qwen3", "gemma2"),
    "gpt2.py": ("gpt2",),
    "blocks.py": ("llama", "qwen2", "qwen3"),
    "recompute_and_cuts.py": ("llama", "qwen3", "phi3"),
}
LAYERS = 4


def plan(name: str, family: str, folder: Path, **layout) -> ShowReport:
    return inspect_schedule(str(SCHEDULES / name), tiny.save(family, folder), Layout(**layout))


def recomputed(report: ShowReport) -> list[str]:
    return [module.path for module in report.modules if module.recompute]


def test_every_example_is_tested_here():
    assert {path.name for path in SCHEDULES.glob("*.py")} == set(FAMILIES)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("name", "family"), [(name, one) for name, every in FAMILIES.items() for one in every])
def test_every_matrix_is_cut_at_tp2(name, family, sp, tmp_path):
    report = plan(name, family, tmp_path, tensor_model_parallel_size=2, sequence_parallel=sp)
    kinds = Counter(module.kind for module in report.modules)
    assert (kinds["vocab"], kinds["row"], kinds["replicated"]) == (1, 2 * LAYERS, 0)
    matrices = {m.path: (m, p) for m in report.modules for p in m.parameters if len(p.shape) == 2}
    # A learned table of positions is looked up alike on every rank.
    whole = [path for path, (module, _) in matrices.items() if module.kind == "whole"]
    assert whole == (["transformer.wpe"] if family == "gpt2" else [])
    for path in matrices.keys() - set(whole):
        _, weight = matrices[path]
        rows, columns = weight.padded or weight.shape[0], weight.shape[1]
        assert 2 * prod(weight.local_shape) == rows * columns, path


def test_gpt2_recomputes_every_second_layer(tmp_path):
    assert recomputed(plan("gpt2.py", "gpt2", tmp_path)) == ["transformer.h.0", "transformer.h.2"]


@pytest.mark.parametrize(
    ("layout", "stages", "again"),
    [
        ({}, [(0, 4)], []),
        ({"pipeline_model_parallel_size": 2}, [(0, 2), (2, 4)], [0, 1]),
        ({"pipeline_model_parallel_size": 4}, [(0, 1), (1, 2), (2, 3), (3, 4)], [0, 1]),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            [(0, 1), (1, 2), (2, 3), (3, 4)],
            [0, 2],
        ),
    ],
)
def test_recompute_and_cuts_follow_the_layout(layout, stages, again, tmp_path):
    report = plan("recompute_and_cuts.py", "llama", tmp_path, **layout)
    assert [(stage.start, stage.stop) for stage in report.stages] == stages
    assert all("recompute_and_cuts.py:" in stage.cut_at for stage in report.stages[:-1])
    assert recomputed(report) == [f"model.layers.{layer}" for layer in again]


@pytest.mark.parametrize("family", FAMILIES["blocks.py"])
def test_blocks_are_megatrons_layers(family, tmp_path):
    report = plan("blocks.py", family, tmp_path, tensor_model_parallel_size=2)
    layers = [module for module in report.modules if module.becomes == "Megatron's TransformerLayer"]
    assert [module.path for module in layers] == [f"model.layers.{index}" for index in range(LAYERS)]


def test_the_readme_shows_the_llama_example():
    source = (SCHEDULES / "llama.py").read_text()
    readme = (SCHEDULES.parents[1] / "README.md").read_text()
    assert source[source.index("def schedule") :] in readme
