"""Two iterations of Megatron's own trainer on ghost GPUs, by torch's CUDA build: what rehearsal can't run."""

import pytest

from tests import tiny
from tests.ghost.process import INTEGERS
from tests.ghost.runs import OVERLAP, PP2, TP2, train

# test_communication.py has a run of two ranks that is not slow.
pytestmark = pytest.mark.slow

RUNS = {
    "fused": ("fused", 1, ""),
    "tp2 + sp": ("fused", 2, TP2),
    "leaf": ("leaf", 1, ""),
    "block": ("block", 1, ""),
    "recompute": ("fused", 1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "asked to begin on the CPU": ("fused", 1, "--use-cpu-initialization"),
    "pp2": ("fused", 2, PP2),
    "vpp2": ("fused", 2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "cp2": ("fused", 2, "--context-parallel-size 2"),
    "dp2, overlapped": ("fused", 2, OVERLAP),
    "tp2 x pp2, blocks": ("block", 4, f"{TP2} {PP2}"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny.config("llama", num_hidden_layers=4, vocab_size=512, max_position_embeddings=64).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", RUNS)
def test_a_run_trains_and_its_ranks_agree(llama, case):
    level, ranks, flags = RUNS[case]
    run = train(llama, level, flags.split(), ranks=ranks, **INTEGERS)
    assert run.faults() == []
