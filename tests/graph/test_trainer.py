"""Traced modules in Megatron's own trainer, in every form of a run: against plain HF, or against the untraced."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from megasched.verify import trainer_run as training
from megasched.verify.ranks.pool import RankError
from tests import tiny
from tests.parity.cases import case, slow
from tests.parity.steps import assert_first_step_equals_hf

LLAMA = """
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
    norm = sch["model.norm"]
    norm.trace()
    norm.checkpoint(norm.find("rsqrt")[0])
"""
VPP = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "tp2-sp": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "pp2": (2, 1, "--pipeline-model-parallel-size 2"),
    "tp2-sp-pp2-vpp2": (4, 2, f"--tensor-model-parallel-size 2 --sequence-parallel {VPP}"),
}


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", slow("tp2-sp-pp2-vpp2")])
def test_gradients_equal_hf(layout, ranks, tmp_path):
    world, tp, flags = LAYOUTS[layout]
    folder = tiny.save("llama", tmp_path)
    (tmp_path / "sch.py").write_text(LLAMA)
    schedule = str(tmp_path / "sch.py")
    reports = ranks.run(world, training.train, folder, flags.split(), iterations=1, schedule=schedule)
    assert_first_step_equals_hf(ranks, folder, reports, tp, random_init=True)


def _accumulating(folder, flags, schedule):
    """A run with Megatron's gradient accumulation fusion, whose GPU kernel torch stands in for."""
    from megatron.core.tensor_parallel import layers

    from megasched.trainer.flags import rehearsal

    added = []
    kernel = ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.__spec__ = ModuleSpec(kernel.__name__, None)
    kernel.wgrad_gemm_accum_fp32 = lambda x, dy, out: added.append(out.shape) or out.addmm_(dy.t(), x)
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, kernel.__name__, kernel)
    patch.setattr(layers, kernel.__name__, kernel, raising=False)
    patch.setattr(layers, "_grad_accum_fusion_available", True)
    switches = [flag for flag in rehearsal.SWITCHES if "accumulation" not in flag]
    patch.setattr(rehearsal, "SWITCHES", switches)
    try:
        return training.train(folder, flags, iterations=1, schedule=schedule), len(added)
    finally:
        patch.undo()


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_accumulated_by_the_fused_kernel_equal_hf(ranks, tmp_path, tied):
    """A tied table has two gradients, of which the kernel adds that of the logits."""
    folder = tiny.save("llama", tmp_path, tie_word_embeddings=tied)
    (tmp_path / "sch.py").write_text(LLAMA)
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    found = ranks.run(2, _accumulating, folder, flags, str(tmp_path / "sch.py"))
    assert [added > 0 for _, added in found] == [True, True]
    assert_first_step_equals_hf(ranks, folder, [report for report, _ in found], 2, random_init=True)


# Whole layers and parts of layers; no edit changes a bit of what is computed, nor does a trace.
TRACED = """
from megasched.graph import patterns
from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout):
    auto(sch, layout)
    layers = sch["{layers}.*"]
    layers.level("leaf")
    if not {traced}:
        return
    first, second, third, fourth = layers
    first.trace()
    first.checkpoint(first.find(patterns.{norm})[0])
    for name in {parts}:
        second[name].trace()
    third["mlp"].trace()
    third["mlp"].checkpoint(third["mlp"].find(patterns.{activation})[0])
    fourth.trace()
    fourth.replace(lambda old: old, subgraph=fourth.find(patterns.{norm})[1])
"""
FAMILIES = {
    "llama": {
        "layers": "model.layers",
        "norm": "rms_norm",
        "activation": "swiglu",
        "parts": ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    },
    "gpt2": {
        "layers": "transformer.h",
        "norm": "layer_norm",
        "activation": "gelu",
        "parts": ("attn", "mlp", "ln_1", "ln_2"),
    },
}
# Small buckets, so that a norm's weight is gathered by itself and must be waited for by itself.
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 40"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
FORMS = {
    "overlapped": (2, OVERLAP),
    "bf16": (2, f"{TP2_SP} --bf16"),
    "bf16-vpp": (2, f"--bf16 {VPP}"),
    "fp16": (2, f"{TP2_SP} --fp16 --initial-loss-scale 1024"),
}
RECOMPUTE = {
    "full-uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "full-block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "core-attn": "--recompute-granularity selective",
    "mlp": "--recompute-granularity selective --recompute-modules mlp core_attn",
}


def _run(ranks, world, family, folder, flags, traced):
    schedule = folder / f"{family}-{traced}.py"
    schedule.write_text(TRACED.format(**FAMILIES[family], traced=traced))
    return ranks.run(world, training.train, str(folder), flags.split(), iterations=2, schedule=str(schedule))


def _same_bits(one, other):
    assert training.losses(one) == training.losses(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.grad_norms == theirs.grad_norms
        assert mine.gradients.keys() == theirs.gradients.keys()
        for what in ("gradients", "weights"):
            for name, (tensor, _) in getattr(mine, what).items():
                assert torch.equal(tensor, getattr(theirs, what)[name][0]), (what, name)


FAST = ("overlapped", "bf16-vpp")


@pytest.mark.parametrize("form", [case(form, fast=form in FAST) for form in FORMS])
def test_a_trace_changes_no_bit_of_two_steps(form, ranks, tmp_path):
    world, flags = FORMS[form]
    tiny.save("llama", tmp_path)
    _same_bits(*(_run(ranks, world, "llama", tmp_path, flags, traced) for traced in (True, False)))


@pytest.mark.parametrize("names", [("full-block", "mlp"), slow(tuple(RECOMPUTE))])
def test_recompute_by_flags_changes_no_bit_of_traced_layers_with_dropout(ranks, tmp_path, names):
    tiny.save("gpt2", tmp_path, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    plain = _run(ranks, 2, "gpt2", tmp_path, TP2_SP, traced=False)
    for flags in ("", *(RECOMPUTE[name] for name in names)):
        _same_bits(_run(ranks, 2, "gpt2", tmp_path, f"{TP2_SP} {flags}", traced=True), plain)


def test_an_edit_inside_of_what_a_flag_recomputes_is_refused(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    text = LLAMA.replace("patterns.rms_norm", "patterns.swiglu")
    (tmp_path / "sch.py").write_text(text)
    with pytest.raises(RankError) as caught:
        ranks.run(
            1,
            training.train,
            folder,
            RECOMPUTE["mlp"].split(),
            iterations=1,
            schedule=str(tmp_path / "sch.py"),
        )
    said = str(caught.value)
    assert "no operation mlp.act_fn.silu, mlp.mul: mlp is one call in it" in said
    assert "sch.py:15" in said
    assert 'sch["model.layers.2.mlp"].trace()' in said
