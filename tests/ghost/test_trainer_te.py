"""Two iterations of Megatron's own trainer on ghost GPUs with the real Transformer Engine."""

import pytest

from tests.ghost.process import INTEGERS
from tests.ghost.runs import LENGTH, OVERLAP, PP2, TP2, train, write_model

CP2 = "--context-parallel-size 2 --cp-comm-type"
EXCHANGES = ("p2p", "all_gather", "a2a")
CP4 = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
FP8 = {
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
EVERY_LAYER = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LEVELS = ("fused", "block")

RUNS = {
    "fused": ("fused", 1, ""),
    "leaf": ("leaf", 1, ""),
    "block": ("block", 1, ""),
    **{f"{level}, {recipe}": (level, 1, flags) for recipe, flags in FP8.items() for level in LEVELS},
    **{f"{level}, tp2 + sp": (level, 2, TP2) for level in LEVELS},
    "fused, tp2 + sp, delayed": ("fused", 2, f"{TP2} {FP8['delayed']}"),
    "block, tp2 + sp, delayed": ("block", 2, f"{TP2} {FP8['delayed']}"),
    "fused, tp2 + sp, blockwise": ("fused", 2, f"{TP2} {FP8['blockwise']}"),
    **{f"{level}, cp2 by {how}": (level, 2, f"{CP2} {how}") for how in EXCHANGES for level in LEVELS},
    **{f"{level}, cp4 by a2a+p2p": (level, 4, CP4) for level in LEVELS},
    **{f"{level}, tp2 x dp2, overlapped": (level, 4, f"{TP2} {OVERLAP}") for level in LEVELS},
    **{f"{level}, recompute": (level, 1, EVERY_LAYER) for level in LEVELS},
    "block, selective recompute": ("block", 1, "--recompute-granularity selective"),
    "block, pp2": ("block", 2, PP2),
    "fused, vpp2": ("fused", 2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("case", RUNS)
def test_a_run_trains_and_its_ranks_agree(llama, case):
    level, ranks, flags = RUNS[case]
    run = train(llama, level, flags.split(), ranks=ranks, te=True, length=LENGTH, **INTEGERS)
    assert run.faults() == []
