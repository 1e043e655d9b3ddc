"""Loops of one's own over built models, on ghost GPUs with Transformer Engine: DDP, FSDP2, autocast, TP, CP."""

import json

import pytest

from tests.ghost import process
from tests.ghost.runs import write_model

TP2, CP2 = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
AUTOCAST, FSDP2 = {"autocast": True}, {"trainer": "fsdp2"}

RUNS = {"autocast": ("llama", 1, {}, AUTOCAST)}
SLOW = {
    "fused": ("llama", 1, {}, {}),
    "leaf, tp2": ("llama", 2, TP2, {"level": "leaf"}),
    "tp2 + sp, autocast": ("llama", 2, TP2, {"sp": True, **AUTOCAST}),
    "cp2": ("llama", 2, CP2, {}),
    "cp2, autocast": ("llama", 2, CP2, AUTOCAST),
    "cp2, windows and caps": ("gemma2", 2, CP2, {}),
    "ddp": ("llama", 2, {}, {"trainer": "ddp"}),
    "tp2 x fsdp2": ("llama", 4, TP2, FSDP2),
    "mixture, tp2": ("mixtral", 2, TP2, {}),
    "mixture, ep2": ("mixtral", 2, EP2, {}),
    "gpt2, tp2": ("gpt2", 2, TP2, {}),
}


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("case", [*RUNS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_loop_trains(tmp_path, case):
    family, ranks, sizes, options = {**RUNS, **SLOW}[case]
    model = write_model(tmp_path / "model", family)
    options = {"sizes": sizes, **options}
    if family != "mixtral":
        options["saved"] = str(tmp_path / "saved")
    # torch's compiler, which DDP calls for its buckets, can't trace how whole numbers are computed.
    integers = {} if options.get("trainer") == "ddp" else process.INTEGERS
    command = ["-m", "tests.ghost.own_loop_case", str(model), json.dumps(options)]
    said = process.run(command, ranks=ranks, te=True, **integers)
    assert said.count("trained\n") == ranks
    assert "isn't covered" not in said
