"""Levels ``block`` (decoder layers by Megatron's own TransformerLayer) and ``leaf``, against the HF model.

The matrix of test_matrix.py runs at ``fused``, the default.
"""

from __future__ import annotations

import pytest
import torch

from megasched.verify.trainer_run import gather, losses, train
from tests import tiny
from tests.parity.cases import case, refusal, slow, spread
from tests.parity.instances import instances_of
from tests.parity.steps import assert_first_step_equals_hf, assert_same_losses, one_rank
from tests.parity.test_matrix import LAYOUTS

FAMILIES = ("mistral", "qwen2", "qwen3", "phi3", *tiny.BLOCKS)


def _train(folder, flags, schedule, iterations=2):
    """A run, and how many of this rank's layers are Megatron's."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megasched.trainer.scheduled_model import ScheduledModel

    with instances_of(ScheduledModel) as models:
        report = train(folder, flags, iterations=iterations, schedule=schedule)
    return report, sum(isinstance(module, TransformerLayer) for model in models for module in model.modules())


SOME = ("tp2-sp", "tp2", "tp2-sp-pp2-vpp2", "pp2-vpp2")
# Their layers are another type's under another name, or are among the variants below.
TWINS = ("cwm", "internlm3", "iquestcoder", "seed_oss")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(case("llama", layout, fast=layout == "dp2-tp2") for layout in LAYOUTS),
        *spread(FAMILIES, SOME, twins=TWINS),
        *(slow(family, "dp2-tp2") for family in FAMILIES),
    ],
)
def test_blocks_equal_hf(ranks, tmp_path, block, family, layout):
    folder = tiny.save(family, tmp_path / "model")
    world, tp, flags = LAYOUTS[layout]
    found = ranks.run(world, _train, folder, flags.split(), block())
    stages = {"pp2": 2, "pp4": 4}.get(next((part for part in layout.split("-") if part.startswith("pp")), ""), 1)
    assert [count for _, count in found] == [4 // stages] * world
    _equal_hf(ranks, folder, [report for report, _ in found], tp)


VARIANTS = {
    "no window": ("mistral", {"sliding_window": None}),
    "window in later layers": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "window and partial rotation": (
        "phi3",
        {
            "num_key_value_heads": 4,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "attention bias": ("llama", {"attention_bias": True}),
    "MLP bias": ("llama", {"mlp_bias": True}),
    "all biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    spread(VARIANTS, ["tp2-sp", "tp2-sp-pp2-vpp2", "dp2-tp2"], twins=("attention bias", "MLP bias")),
)
def test_variants_equal_hf(ranks, tmp_path, block, variant, layout):
    family, changes = VARIANTS[variant]
    folder = tiny.save(family, tmp_path / "model", **changes)
    world, tp, flags = LAYOUTS[layout]
    found = ranks.run(world, _train, folder, flags.split(), block())
    assert sum(count for _, count in found) == {"dp2-tp2": 16}.get(layout, 8)
    _equal_hf(ranks, folder, [report for report, _ in found], tp)


@pytest.mark.parametrize("layout", ["tp2-sp", slow("tp2"), slow("tp2-sp-pp2-vpp2")])
def test_leaves_equal_hf(ranks, tmp_path, block, layout):
    folder = tiny.save("qwen3", tmp_path / "model")
    world, tp, flags = LAYOUTS[layout]
    found = ranks.run(world, _train, folder, flags.split(), block(level="leaf"))
    assert [count for _, count in found] == [0] * world
    _equal_hf(ranks, folder, [report for report, _ in found], tp)


def _equal_hf(ranks, folder, reports, tp):
    assert_first_step_equals_hf(ranks, folder, reports, tp, random_init=True)
    assert_same_losses(reports, one_rank(ranks, folder))


def test_some_layers_are_blocks_and_others_not(ranks, tmp_path, block):
    folder = tiny.save("qwen3", tmp_path / "model")
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    found = ranks.run(2, _train, folder, flags, block("model.layers.2"))
    assert [count for _, count in found] == [1, 1]
    assert_first_step_equals_hf(ranks, folder, [report for report, _ in found], 2, random_init=True)


RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "core-attn": "--recompute-granularity selective",
    "mlp": "--recompute-granularity selective --recompute-modules mlp core_attn",
    "layernorm": "--recompute-granularity selective --recompute-modules layernorm",
}


def test_recompute_changes_no_bit_even_with_dropout(ranks, tmp_path, block):
    folder = tiny.save("llama", tmp_path / "model", attention_dropout=0.1)
    flags = ["--tensor-model-parallel-size", "2"]
    plain = [report for report, _ in ranks.run(2, _train, folder, flags, block())]
    for name, more in RECOMPUTE.items():
        again = [report for report, _ in ranks.run(2, _train, folder, [*flags, *more.split()], block())]
        assert losses(again) == losses(plain), name
        for one, other in zip(plain, again, strict=True):
            for key, (gradient, _) in one.gradients.items():
                assert torch.equal(gradient, other.gradients[key][0]), (name, key)


DISTRIBUTED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        slow("qwen2", []),
        ("phi3", DISTRIBUTED),
        *(slow(family, DISTRIBUTED) for family in ("qwen2", "seed_oss", "gpt2")),
    ],
)
def test_a_checkpoint_goes_between_levels_and_layouts(ranks, tmp_path, block, family, optimizer):
    """HF's names and shapes, in the optimizer's states too: written as blocks, read as leaves, and back."""
    changes = {"attention_out_bias": True, "mlp_bias": True} if family == "seed_oss" else {}
    folder = tiny.save(family, tmp_path / "model", **changes)
    common = [*optimizer, "--ckpt-format", "torch_dist", "--override-opt-param-scheduler"]
    straight = ranks.run(1, train, folder, common, iterations=4)
    expected = gather(straight, "weights", 1)
    wide = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    blocks = block("transformer.h.*" if family == "gpt2" else "model.layers.*")
    for number, (first, one, second, other) in enumerate(((4, blocks, 1, "auto"), (1, "auto", 4, blocks))):
        place = str(tmp_path / f"ckpt{number}")
        layout = {1: common, 4: [*wide, *common]}
        saving = [*layout[first], "--save", place, "--save-interval", "2"]
        ranks.run(first, train, folder, saving, iterations=2, schedule=one)
        resumed = ranks.run(
            second, train, folder, [*layout[second], "--load", place], iterations=4, schedule=other
        )
        torch.testing.assert_close(losses(resumed), losses(straight)[2:], rtol=2e-6, atol=0)
        for name, weight in gather(resumed, "weights", 2 if second == 4 else 1).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {}, "no block is known for model type 'gemma2'"),
        ("llama", {"hidden_act": "tanh"}, "the activation is 'tanh'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
    ],
)
def test_layers_that_are_not_megatrons_are_refused(tmp_path, block, family, changes, reason):
    said = refusal(block(), tiny.save(family, tmp_path / "model", **changes))
    assert reason in said
    assert "block.py:7" in said
    assert "level('fused')" in said


@pytest.mark.parametrize(
    ("family", "flags"), [("mistral", ""), slow("qwen3", "--tensor-model-parallel-size 2 --sequence-parallel")]
)
def test_blocks_on_parts_of_the_sequence_equal_hf(ranks, tmp_path, block, family, flags):
    """Megatron's layer gets the angles, and its core the mask, of a context parallel rank's positions."""
    folder = tiny.save(family, tmp_path / "model")
    tp = 2 if flags else 1
    found = ranks.run(2 * tp, _train, folder, f"--context-parallel-size 2 {flags}".split(), block())
    assert [count for _, count in found] == [4] * 2 * tp
    _equal_hf(ranks, folder, [report for report, _ in found], tp)
