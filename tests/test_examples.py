"""The example schedules: each plans without a problem on the family it is for, and does what it says."""

import os
import re
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

import pytest

from megasched.cli.show.report import ShowReport, inspect_schedule
from megasched.language.parallel_dims import ParallelDims
from tests import tiny

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCHEDULES = EXAMPLES / "schedules"
FAMILIES = {
    "llama.py": ("llama", "mistral", "qwen2", "qwen3", "gemma2"),
    "gpt2.py": ("gpt2",),
    "lora.py": ("llama", "phi3", "gpt2"),
    "blocks.py": ("llama", "qwen2", "qwen3"),
    "recompute_and_cuts.py": ("llama", "qwen3", "phi3"),
}
LAYERS = 4


def plan(name: str, family: str, folder: Path, **layout) -> ShowReport:
    return inspect_schedule(str(SCHEDULES / name), tiny.save(family, folder), ParallelDims(**layout))


def recomputed(report: ShowReport) -> list[str]:
    return [module.path for module in report.modules if module.recompute]


def test_every_example_is_tested_here():
    assert {path.name for path in SCHEDULES.glob("*.py")} == set(FAMILIES)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("name", "family"), [(name, one) for name, every in FAMILIES.items() for one in every])
def test_every_matrix_is_cut_at_tp2(name, family, sp, tmp_path):
    report = plan(name, family, tmp_path, tensor_model_parallel_size=2, sequence_parallel=sp)
    modules = [module for module in report.modules if ".lora_" not in module.path]
    kinds = Counter(module.kind for module in modules)
    assert (kinds["vocab"], kinds["row"], kinds["replicated"]) == (1, 2 * LAYERS, 0)
    matrices = {m.path: (m, p) for m in modules for p in m.parameters if len(p.shape) == 2}
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


@pytest.mark.parametrize("family", FAMILIES["lora.py"])
def test_lora_trains_adapters_of_attention_alone(family, tmp_path):
    report = plan("lora.py", family, tmp_path)
    adapted = [m.path for m in report.modules if any(asked.primitive == "adapt" for asked in m.asked)]
    names = {"llama": "qkvo", "phi3": ("qkv", "o"), "gpt2": ("c_attn", "c_proj")}[family]
    assert len(adapted) == len(names) * LAYERS
    assert not any("mlp" in path for path in adapted)
    sizes = [prod(p.shape) for m in report.modules if ".lora_" in m.path for p in m.parameters]
    assert report.trained == sum(sizes) < report.parameters


@pytest.mark.parametrize("family", FAMILIES["blocks.py"])
def test_blocks_are_megatrons_layers(family, tmp_path):
    report = plan("blocks.py", family, tmp_path, tensor_model_parallel_size=2)
    layers = [module for module in report.modules if module.becomes == "Megatron's TransformerLayer"]
    assert [module.path for module in layers] == [f"model.layers.{index}" for index in range(LAYERS)]


def test_the_readme_shows_the_llama_example():
    source = (SCHEDULES / "llama.py").read_text()
    readme = (SCHEDULES.parents[1] / "README.md").read_text()
    assert source[source.index("def schedule") :] in readme


def test_the_schedule_for_fine_tuning_recomputes_every_layer(tmp_path):
    layout = ParallelDims(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    report = inspect_schedule(str(EXAMPLES / "sft" / "schedule.py"), tiny.save("llama", tmp_path), layout)
    assert recomputed(report) == [f"model.layers.{index}" for index in range(LAYERS)]
    assert Counter(module.kind for module in report.modules)["row"] == 2 * LAYERS


def test_the_flags_of_the_script_for_fine_tuning_exist():
    import argparse
    import re

    from megatron.training.arguments import add_megatron_arguments

    from megasched.trainer.flags.arguments import add_megasched_arguments

    parser = add_megasched_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    known = {option for action in parser._actions for option in action.option_strings} | {"--nproc-per-node"}
    command = (EXAMPLES / "sft" / "train.sh").read_text().partition("set -eu")[2]
    flags = re.findall(r"--[a-z][a-z0-9-]+", command)
    assert "--sft" in flags
    assert set(flags) <= known


def test_the_resnet_on_four_ranks_trains_as_in_one_process():
    import torch
    from torchvision.models.resnet import Bottleneck, ResNet

    script = str(EXAMPLES / "torchvision" / "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-4000:]

    torch.manual_seed(0)
    model = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=8)
    pictures, labels = torch.randn(8, 3, 64, 64), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    wanted = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    losses = [float(line.rpartition(" ")[2]) for line in run.stdout.splitlines() if line.startswith("step ")]
    assert losses == pytest.approx(wanted, rel=1e-3)  # float32 drifts by itself


@pytest.mark.parametrize("name", ["sft", "families"])
def test_a_folder_that_cannot_be_written_is_one_line(name, tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, EXAMPLES / name / "make.py", tmp_path / "file" / "folder"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/file\S*: Not a directory\n", done.stderr)
