"""DeepSpeed's checkpoints of a scheduled model: at the same layout, and universal ones at another."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import megasched
from megasched.dialects.deepspeed.engine import imported
from megasched.verify.ranks.pool import init_megatron
from megasched.weights.exporting import export_weights
from tests.dialects.deepspeed_ranks import DEEPSPEED
from tests.dialects.steps import BATCH, adamw, batches, engine_step, gathered
from tests.dialects.test_zero import whole_of, zero_config
from tests.lowering.models import auto, tiny_model

SAVED = 3


def _engine(family: str, tp: int, stage: int, *, universal: bool = False, filled: bool = True) -> Any:
    init_megatron(tp=tp)
    imported().utils.groups._TENSOR_MODEL_PARALLEL_GROUP = None  # of the case before, in this process
    sch = megasched.create_schedule(tiny_model(family))
    auto(sch)
    model = sch.mod
    if not filled:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    config = zero_config(stage, checkpoint={"load_universal": universal})
    config["train_micro_batch_size_per_gpu"] = BATCH * tp // torch.distributed.get_world_size()
    return megasched.initialize(sch, target="deepspeed", config=config, optimizer=adamw)[0]


def _saving(family: str, stage: int, folder: str) -> dict[str, Any]:
    engine = _engine(family, 2, stage)
    losses = [engine_step(engine, ids) for ids in batches()[:SAVED]]
    engine.save_checkpoint(folder, tag="three", client_state={"iteration": SAVED})
    saved = gathered(engine.module, whole_of(stage))
    losses += [engine_step(engine, ids) for ids in batches()[SAVED:]]
    weights = gathered(engine.module, whole_of(stage))
    engine.destroy()
    return {"losses": losses, "saved": saved, "weights": weights}


def _resuming(family: str, tp: int, stage: int, folder: str, tag: str) -> dict[str, Any]:
    engine = _engine(family, tp, stage, universal=tag == "universal", filled=False)
    _, client = engine.load_checkpoint(folder, tag=tag)
    loaded = gathered(engine.module, whole_of(stage))
    losses = [engine_step(engine, ids) for ids in batches()[SAVED:]]
    weights = gathered(engine.module, whole_of(stage))
    engine.destroy()
    return {"iteration": client["iteration"], "loaded": loaded, "losses": losses, "weights": weights}


def _differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def to_universal(folder: Path) -> None:
    """By DeepSpeed's own command, in a process of its own."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder / "three"), "--output_folder", str(folder / "universal")]
    environment = {**os.environ, "PYTHONPATH": str(DEEPSPEED), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def _assert_exported(family: str, folder: Path, saved: dict[str, torch.Tensor]) -> None:
    """The HF folder of a universal checkpoint has the weights bit by bit, under all names."""
    from transformers import AutoModelForCausalLM

    tiny_model(family).config.save_pretrained(folder / "config")
    found = export_weights(
        folder / "universal",
        folder / "hf",
        hf_model=folder / "config",
        progress=lambda size: nullcontext(lambda more: None),
        max_shard_size=1 << 30,
    )
    assert found.dtype == "float32"
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert _differing(dict(model.named_parameters()), saved) == []


@pytest.mark.parametrize(("family", "stage", "then"), [("gpt2", 1, 2), ("phi3", 3, 3)])
def test_a_checkpoint_goes_on_at_its_layout_and_at_another(
    deepspeed_ranks: Any, tmp_path: Path, family: str, stage: int, then: int
) -> None:
    """GPT-2's weights lie transposed, and its vocabulary is padded; Phi-3 packs projections, cut one by one."""
    written = deepspeed_ranks.run(4, _saving, family, stage, str(tmp_path))[0]
    same = deepspeed_ranks.run(4, _resuming, family, 2, stage, str(tmp_path), "three")[0]
    assert same["iteration"] == SAVED
    assert _differing(same["loaded"], written["saved"]) == []
    assert same["losses"] == written["losses"][SAVED:]
    assert _differing(same["weights"], written["weights"]) == []
    to_universal(tmp_path)
    _assert_exported(family, tmp_path, written["saved"])
    other = deepspeed_ranks.run(2, _resuming, family, 1, then, str(tmp_path), "universal")[0]
    assert _differing(other["loaded"], written["saved"]) == []
    assert other["losses"] == pytest.approx(written["losses"][SAVED:], rel=1e-6)
    for name, value in written["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, rtol=1e-5, atol=1e-6, msg=name)
