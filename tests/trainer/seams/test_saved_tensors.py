"""What Megatron writes of single steps on request, of every rank's shards: gradients, parameters, activations."""

from __future__ import annotations

import pytest
import torch

from megasched.verify.trainer_run import train
from tests import tiny
from tests.parity.mixtures import small_model

SAVED = ("wgrads", "dgrads", "params", "activations")
TP2 = "--tensor-model-parallel-size 2"


def train_anew(folder, argv):
    """In a rank: Megatron keeps what writes, with its folder, as long as a process lives."""
    from megatron.training import activation_logging, dgrad_logging

    activation_logging._LOGGER = dgrad_logging._LOGGER = None
    return train(folder, argv, iterations=1)


def saved(ranks, folder, save, world, flags):
    """The reports of a run of one step, and the files of each of ``SAVED`` by their names, without endings."""
    argv = [*flags.split(), "--save", str(save), "--save-interval", "9"]
    for name in SAVED:
        argv += [f"--save-{name}-interval", "1"]
    reports = ranks.run(world, train_anew, folder, argv)
    return reports, {
        name: {file.stem: torch.load(file) for file in (save / name / "iter_0000001").iterdir()} for name in SAVED
    }


def of_rank(of_file):
    return {name.removeprefix("definition."): tensor for name, tensor in of_file["model_chunk0"].items()}


@pytest.mark.parametrize(("world", "flags"), [(2, TP2), (4, TP2)], ids=["tp2", "tp2-dp2"])
def test_shards_of_every_tp_rank_are_written(ranks, tmp_path, world, flags):
    reports, files = saved(ranks, tiny.save("llama", tmp_path / "model"), tmp_path / "save", world, flags)
    for report in reports[:2]:
        assert report.tp_rank == reports.index(report)
        name = f"mp_rank_{report.tp_rank:02d}"
        wgrads, params = (of_rank(files[kind][name]) for kind in ("wgrads", "params"))
        for written, seen in ((wgrads, report.gradients), (params, report.weights)):
            assert written.keys() == seen.keys()
            for path, (shard, _) in seen.items():
                torch.testing.assert_close(written[path].reshape(shard.shape), shard, rtol=0, atol=0, msg=path)
        dgrads, activations = (of_rank(files[kind][name]) for kind in ("dgrads", "activations"))
        for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
            assert activations[f"{path}/output0"].shape == dgrads[f"{path}/output0"].shape
            assert float(dgrads[f"{path}/output0"].abs().max()) > 0
    assert all(sorted(of_ranks) == ["mp_rank_00", "mp_rank_01"] for of_ranks in files.values())


def test_experts_of_every_ep_rank_are_written(ranks, tmp_path):
    folder = ranks.run(1, small_model, "mixtral", str(tmp_path / "model"), {})[0]
    flags = f"{TP2} --expert-model-parallel-size 2 --sequence-parallel"
    _, files = saved(ranks, folder, tmp_path / "save", 4, flags)
    assert sorted(files["wgrads"]) == ["mp_rank_00_000", "mp_rank_01_001"]
