"""Traced modules in Megatron's own trainer: under sequence parallelism and over stages, against plain HF."""

import pytest

from tests import tiny, training

SCHEDULE = """
from megasched.graph import patterns
from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout):
    auto(sch, layout)
    sch["model.layers.0"].trace()
    sch["model.layers.1.self_attn"].trace()
    mlp = sch["model.layers.1.mlp"]
    mlp.trace()
    mlp.fuse(mlp.find(patterns.swiglu)[0], compiler="megatron")
    last = sch["model.layers.2"]
    last.trace()
    last.checkpoint(last.find(patterns.rms_norm)[0])
"""


LAYOUTS = {
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "pp2": (1, "--pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_the_trainer(layout, ranks, tmp_path):
    tp, flags = LAYOUTS[layout]
    folder = tiny.save("llama", tmp_path)
    (tmp_path / "sch.py").write_text(SCHEDULE)
    schedule = str(tmp_path / "sch.py")
    reports = ranks.run(2, training.train, folder, flags.split(), iterations=1, schedule=schedule)
    want = training.hf_step(folder, training.batches_of(reports))
    found = training.gather(reports, "gradients", tp)
    assert found.keys() == want.gradients.keys()
    floor = 1e-3 * max(float(g.abs().max()) for g in want.gradients.values())
    far = {n: training.relative(found[n], g, floor) for n, g in want.gradients.items()}
    assert {name: gap for name, gap in far.items() if not gap <= 1e-5} == {}
    assert training.losses(reports)[0] == pytest.approx(want.loss, rel=1e-5)
    assert reports[0].grad_norms[0] == pytest.approx(want.grad_norm, rel=1e-5)
