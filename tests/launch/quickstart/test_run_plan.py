"""The quickstart's layout and command for every machine."""

import json
import subprocess
from pathlib import Path

import pytest

from megasched.language.parallel_dims import ParallelDims
from megasched.launch.quickstart import run_plan
from megasched.launch.quickstart.run_plan import Plan, choose_layout

# devices -> TP, PP, VPP, DP
LAYOUTS = {
    1: (1, 1, 1, 1),
    2: (2, 1, 1, 1),
    3: (2, 1, 1, 1),
    4: (2, 2, 2, 1),
    7: (2, 2, 2, 1),
    8: (2, 2, 2, 2),
    72: (2, 2, 2, 2),
}


def command(plan, iters=400):
    return run_plan.training_command(
        plan,
        schedule="auto",
        model=Path("/m"),
        corpus_prefix="/d/tokens",
        cache=Path("/d/cache"),
        checkpoints=Path("/c"),
        iters=iters,
    )


def value(words, flag):
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("devices", LAYOUTS)
def test_layout_for_a_number_of_devices(devices):
    layout = choose_layout(devices)
    assert (layout.tp, layout.pp, layout.vpp, layout.data_parallel_size) == LAYOUTS[devices]


@pytest.mark.parametrize("devices", LAYOUTS)
def test_the_layout_fits_model_and_batch(devices, tmp_path):
    layout = choose_layout(devices)
    run_plan.write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_key_value_heads"] % layout.tp == 0
    assert config["num_hidden_layers"] % (layout.pp * layout.vpp) == 0
    per_replica = run_plan.GLOBAL_BATCH_SIZE // layout.data_parallel_size
    micro_batches = per_replica // run_plan.MICRO_BATCH_SIZE
    assert micro_batches % layout.pp == 0


def test_the_model_is_a_stock_llama_of_five_to_ten_million_parameters(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    run_plan.write_model(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 5_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 10_000_000


@pytest.mark.parametrize(
    ("gpus", "engine", "ranks", "flags"),
    [
        (0, True, 4, {"--rehearse"}),
        (1, True, 1, {"--bf16"}),
        (2, False, 2, {"--bf16"}),
        (8, True, 8, {"--bf16"}),
    ],
)
def test_the_machine_decides_ranks_and_precision(monkeypatch, gpus, engine, ranks, flags):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(run_plan.importlib.util, "find_spec", lambda name: engine or None)
    plan = run_plan.detect_plan()
    words = command(plan)
    assert value(words, "--nproc-per-node") == str(ranks)
    assert {"--bf16", "--rehearse"}.intersection(words) == flags
    assert ("OMP_NUM_THREADS" in run_plan.rank_environment(plan)) == (gpus == 0)


def test_the_model_is_told_by_its_config_alone():
    words = command(Plan(layout=choose_layout(4), on_gpus=False, transformer_engine=False))
    assert value(words, "--hf-model") == "/m"
    told = {"--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings", "--swiglu"}
    assert not told.intersection(words)


@pytest.mark.parametrize("iters", [1, 2, 3, 20, 400])
def test_validation_falls_inside_training_and_not_on_its_end(iters):
    words = command(Plan(layout=ParallelDims(), on_gpus=True, transformer_engine=True), iters)
    assert int(value(words, "--lr-warmup-iters")) < iters
    interval = int(value(words, "--eval-interval"))
    assert iters < 4 or (interval < iters and iters % interval != 0)


def test_the_script_runs_the_command_and_takes_more_flags(tmp_path):
    script = tmp_path / "train.sh"
    words = ["printf", "%s\\n", "--save", "a folder/$HOME", "--save-interval", "4"]
    script.write_text(run_plan.shell_script(words, {"OMP_NUM_THREADS": "1"}))
    done = subprocess.run(["bash", str(script), "--train-iters", "5"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [*words[2:], "--train-iters", "5"]


def test_the_other_layout_uses_the_same_ranks():
    plan = Plan(layout=choose_layout(8), on_gpus=True, transformer_engine=True)
    assert run_plan.other_layout_flags(plan) == [
        *("--tensor-model-parallel-size", "1"),
        *("--pipeline-model-parallel-size", "4"),
        *("--num-virtual-stages-per-pipeline-rank", "1"),
    ]
