"""Runs on ghost GPUs go on from what runs have saved, at the same layout and at another one.

Values are zeros, so what is shown is that a run is written and read, goes on from the right iteration, and that
its ranks agree.
"""

import pytest

from tests.ghost.process import INTEGERS
from tests.ghost.runs import LENGTH, OVERLAP, TP2, train, write_model

SHARED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
# Level; ranks and flags of the run that saves, and of the one that goes on.
CASES = {
    "one rank": ("fused", (1, ""), (1, "")),
    "blocks, tp2 + sp": ("block", (2, TP2), (2, TP2)),
    "from tp2 + sp to one rank": ("fused", (2, f"{TP2} {SHARED}"), (1, SHARED)),
    "blocks, from tp2 + sp to one rank": ("block", (2, f"{TP2} {SHARED}"), (1, SHARED)),
    "dp2, overlapped": ("fused", (2, OVERLAP), (2, OVERLAP)),
}

pytestmark = pytest.mark.slow
with_te = pytest.mark.usefixtures("transformer_engine")


@with_te
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_from_what_another_has_saved(tmp_path, case):
    level, (ranks, flags), (later_ranks, later_flags) = CASES[case]
    model, saved = write_model(tmp_path / "model"), str(tmp_path / "saved")
    save = ["--save", saved, "--save-interval", "2", "--ckpt-format", "torch_dist"]
    first = train(model, level, [*flags.split(), *save], ranks=ranks, te=True, length=LENGTH, **INTEGERS)
    assert first.faults() == []
    # The learning rate's course is as long as the run, and Megatron asks whether a longer one is meant.
    load = ["--load", saved, "--ckpt-format", "torch_dist", "--override-opt-param-scheduler"]
    flags_then = [*later_flags.split(), *load]
    then = train(model, level, flags_then, ranks=later_ranks, te=True, length=LENGTH, iterations=4, **INTEGERS)
    assert then.faults([3, 4]) == []
