"""The host waits for the device as seldom as in a run of Megatron's own model, by Megatron's own trainer."""

from functools import cache

import pytest

from tests.ghost.process import INTEGERS
from tests.ghost.runs import EP2, LENGTH, OVERLAP, TP2, train, train_native, write_model

# What ``write_model`` writes, in Megatron's words.
LLAMA = """--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --max-position-embeddings 256 --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion"""
MIXTRAL = f"""{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm"""
# Family, Megatron's words for it, ranks, flags.
CASES = {
    "one rank": ("llama", LLAMA, 1, ""),
    "tp2 + sp": ("llama", LLAMA, 2, TP2),
    "dp2, overlapped": ("llama", LLAMA, 2, OVERLAP),
    "mixture": ("mixtral", MIXTRAL, 1, ""),
    "mixture, ep2": ("mixtral", MIXTRAL, 2, EP2),
}

pytestmark = pytest.mark.slow
with_te = pytest.mark.usefixtures("transformer_engine")


@cache
def _native(case):
    _, words, ranks, flags = CASES[case]
    given = [*words.split(), *flags.split(), "--seq-length", str(LENGTH)]
    run = train_native(given, ranks=ranks, te=True, **INTEGERS)
    assert run.faults() == []
    return run.waits


@with_te
@pytest.mark.parametrize("level", ["fused", "block"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_no_more_than_megatrons_own(tmp_path, case, level):
    family, _, ranks, flags = CASES[case]
    model = write_model(tmp_path, family)
    run = train(model, level, flags.split(), ranks=ranks, te=True, length=LENGTH, **INTEGERS)
    assert run.faults() == []
    assert all(ours <= native for ours, native in zip(run.waits, _native(case), strict=True))
