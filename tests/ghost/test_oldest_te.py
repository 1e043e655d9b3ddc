"""The oldest Transformer Engine that megasched takes: that of NVIDIA's image, which many clusters run."""

import pytest

from tests.ghost.process import INTEGERS
from tests.ghost.runs import LENGTH, TP2, train, write_model
from tests.ghost.test_trainer_te import CP2, FP8

RUNS = {
    "fused": ("llama", "fused", 1, ""),
    "block": ("llama", "block", 1, ""),
    "fused, blockwise": ("llama", "fused", 1, FP8["blockwise"]),
    "block, delayed": ("llama", "block", 1, FP8["delayed"]),
    "fused, tp2 + sp, tensorwise": ("llama", "fused", 2, f"{TP2} {FP8['tensorwise']}"),
    "fused, cp2 by p2p": ("llama", "fused", 2, f"{CP2} p2p"),
    "block, cp2 by a2a": ("llama", "block", 2, f"{CP2} a2a"),
    "fused, GPT-2": ("gpt2", "fused", 1, ""),
    "fused, Gemma 2": ("gemma2", "fused", 1, ""),
    "block, Mixtral": ("mixtral", "block", 1, ""),
}

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("oldest_transformer_engine")
@pytest.mark.parametrize("case", RUNS)
def test_a_run_trains_and_its_ranks_agree(tmp_path, case):
    family, level, ranks, flags = RUNS[case]
    model = write_model(tmp_path / "model", family)
    run = train(model, level, flags.split(), ranks=ranks, te=True, length=LENGTH, **INTEGERS)
    assert run.faults() == []
