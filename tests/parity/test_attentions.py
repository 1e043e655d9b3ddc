"""Attention by Megatron's ``SelfAttention`` in layers that stay HF's, against the HF model."""

from __future__ import annotations

import pytest

from megasched.compatibility import load_matrix
from megasched.model_adapters.attentions import ATTENTIONS
from megasched.verify.parity import LAYOUTS as CHECKED
from megasched.verify.parity import compare, reference_step
from megasched.verify.shrink import TOKENS
from megasched.verify.trainer_run import batches_of, train
from tests.parity.instances import instances_of
from tests.parity.mixtures import LAYOUTS as OF_MIXTURES
from tests.parity.mixtures import RUN, small_model
from tests.parity.test_experts import SAVE, assert_same_run, run

LAYOUTS = {**CHECKED, **OF_MIXTURES}
# Of the four layers of a small model, those with attention, where some have something else.
LAYERS_WITH = {"jamba": 2, "lfm2": 2, "qwen3_next": 1}
MATRIX = load_matrix()["types"]
# Attention alone, whatever else the layers have; where the default schedule takes whole layers, it is told not to.
ATTENTION = """
from megasched.model_adapters.default_schedule import schedule as default

def schedule(sch, layout):
    default(sch, layout)
    attention = sch.roles.attention
    for path, _ in sch.mod.named_modules():
        if path.endswith(f".{attention.out}"):
            layer = path.removesuffix(f".{attention.out}")
            sch[layer].level("fused")
            sch[f"{layer}.{attention.module}"].level("block")
"""


@pytest.fixture
def attention_alone(tmp_path):
    """A schedule with Megatron's attention in every layer that has attention, and nothing else of Megatron's."""
    schedule = tmp_path / "schedule.py"
    schedule.write_text(ATTENTION)
    return str(schedule)


def attentions_of_run(folder, flags, schedule):
    """A run of one step, and how many modules of Megatron's attention this rank made."""
    from megasched.lowering.block.attention import MegatronAttention

    options = {"schedule": schedule, "random_init": False, "tokens": TOKENS}
    with instances_of(MegatronAttention) as made:
        report = train(folder, [*flags, *RUN], iterations=1, **options)
    return report, len(made)


def folder_of(ranks, small_models, tmp_path, model_type):
    """Of a small model whose attention Megatron's can stand for."""
    if model_type == "gemma2":
        changes = {"attn_logit_softcapping": None}
        return ranks.run(1, small_model, model_type, str(tmp_path / "model"), changes)[0]
    return small_models(model_type)


def _check(ranks, folder, layout, schedule, *more):
    """Loss, logits, every gradient and the norm, where rounding counts as in the matrix; how many modules of
    attention each rank has made."""
    found = ranks.run(layout.world_size, attentions_of_run, folder, [*layout.flags.split(), *more], schedule)
    reports = [report for report, _ in found]
    expected, exact = (
        ranks.run(1, reference_step, folder, batches_of(reports), False, double)[0] for double in (False, True)
    )
    outcome = compare(reports, expected, layout.tp, exact)
    assert outcome.verdict == "equal", outcome.why
    return [made for _, made in found]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        (model_type, "tp2-sp-pp2-vpp2")
        for model_type in ("cohere2", "gpt_neox", "granite", "lfm2", "llama", "phi", "qwen3_next")
    ]
    + [(model_type, "tp2") for model_type in ("gpt_neox", "qwen3")]
    + [(model_type, "cp2") for model_type in ("cohere2", "flint", "jamba", "qwen3_next")]
    + [("olmo", "one"), ("ernie4_5_moe", "tp2-sp")],
)
def test_first_step_equals_hf(ranks, small_models, attention_alone, model_type, name):
    layout = LAYOUTS[name]
    made = _check(ranks, small_models(model_type), layout, attention_alone)
    stages = 2 if "pipeline" in layout.flags else 1
    assert sum(made) == LAYERS_WITH.get(model_type, 4) * layout.world_size // stages


def test_selective_recompute(ranks, small_models, attention_alone):
    """Of the core of attention, as Megatron's own layers do it; there is none of HF's."""
    flags = "--recompute-granularity selective --recompute-modules core_attn"
    made = _check(ranks, small_models("granite"), LAYOUTS["tp2-sp"], attention_alone, *flags.split())
    assert made == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ATTENTIONS))
def test_every_architecture_with_such_attention(ranks, small_models, attention_alone, tmp_path, model_type):
    split = MATRIX[model_type]["tp2-sp"]["verdict"] == "equal"
    folder = folder_of(ranks, small_models, tmp_path, model_type)
    assert all(_check(ranks, folder, LAYOUTS["tp2-sp" if split else "tp2"], attention_alone))


@pytest.mark.parametrize("first", ["block", "fused"])
def test_a_checkpoint_goes_between_levels_and_layouts(ranks, small_models, block, tmp_path, first):
    """Parameters and the optimizer's states, in HF's names; k and v have fewer heads, and heads have norms."""
    folder, where = small_models("qwen3"), "model.layers.*.self_attn"
    second = "fused" if first == "block" else "block"
    whole = run(ranks, folder, LAYOUTS["one"], *SAVE, iterations=4, schedule=block(where, "fused"))
    saving = ["--save", str(tmp_path / "kept"), "--save-interval", "2"]
    wide = LAYOUTS["tp2-sp-pp2-vpp2"]
    run(ranks, folder, wide, *SAVE, *saving, iterations=2, schedule=block(where, first))
    loading = [*SAVE, "--load", str(tmp_path / "kept")]
    resumed = run(ranks, folder, LAYOUTS["one"], *loading, iterations=4, schedule=block(where, second))
    assert_same_run(resumed, whole, skip=2)
