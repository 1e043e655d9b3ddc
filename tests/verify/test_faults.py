"""Mistakes of the kinds that a comparison of one step on one rank lets pass: each is found, at its place."""

from pathlib import Path

import pytest

from megasched.definition.small_models.small_models import small_config
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.compare_step import StepComparison
from megasched.verify.steps import Steps, make_subject

FAULTS = Path(__file__).with_name("faults_of_code.py")
TP2 = ParallelDims(tensor_model_parallel_size=2)
DP2 = ParallelDims(data_parallel_size=2)
EP2 = ParallelDims(expert_model_parallel_size=2, data_parallel_size=2)
NORM = "model.layers.1.input_layernorm.weight"

# Model, layout, where the mistake is found, on which ranks, and a part of what is said of it.
PLANTED = {
    "low_ids_zeroed": ("llama", TP2, "model.embed_tokens", (0, 1), ""),
    "upper_ids_wrong": ("llama", TP2, "model.embed_tokens", (0, 1), ""),
    "one_id_wrong": ("llama", TP2, "model.embed_tokens", (0, 1), ""),
    "rotary_wrong_beyond_16": ("llama", TP2, "model.rotary_emb", (0, 1), ""),
    "positions_off_by_one": ("gpt2", TP2, "transformer.wpe", (0, 1), ""),
    "wrong_from_the_second_step": ("llama", TP2, "model.layers.1.mlp", (0, 1), "from step 2 on"),
    "mixture_scaled": ("qwen3_moe", TP2, "model.layers.1.mlp", (0, 1), "0.7 times"),
    "router_too_warm": ("qwen3_moe", TP2, "model.layers.1.mlp.experts", (0, 1), ""),
    "wrong_experts": ("qwen3_moe", TP2, "model.layers.1.mlp.experts", (0, 1), ""),
    "norm_clamped": ("llama", TP2, "model.layers.1.input_layernorm", (0, 1), ""),
    "attention_scaled": (
        "llama",
        TP2,
        "model.layers.1.self_attn.o_proj",
        (0, 1),
        "look at the code of model.layers.1.self_attn",
    ),
    "bias_dropped": ("gpt2", TP2, "transformer.h.1.mlp.c_fc", (0, 1), "same vector"),
    "buffer_wrong": ("llama", TP2, "model.rotary_emb", (0, 1), ""),
    "buffer_written": ("llama", TP2, "model.rotary_emb.original_inv_freq", (0, 1), "buffers"),
    "rounded_activation": ("llama", TP2, "model.layers.2.mlp.down_proj", (0, 1), ""),
    "gradient_doubled_on_one_rank": ("llama", TP2, NORM, (1,), "right on 1 of the 2 ranks"),
    "gradient_on_one_rank_alone": ("llama", TP2, NORM, (1,), "right on 1 of the 2 ranks"),
    "gradient_times_tp": ("llama", TP2, NORM, (0, 1), "2 times the right value"),
    "norm_counted_twice": ("llama", TP2, "gradient norm", (0, 1), "each gradient is right"),
    "wrong_on_the_second_replica": ("llama", DP2, "model.layers.2.mlp", (1,), "1.01 times"),
    "experts_of_one_rank_untrained": ("qwen3_moe", EP2, "model.layers.1.mlp.experts", (1,), "gradients of"),
    "loss_of_its_own": ("llama", TP2, "loss", (0, 1), "the logits are right"),
    "labels_shifted_twice": ("llama", TP2, "loss", (0, 1), "the logits are right"),
    "padding_counted": ("llama", TP2, "loss", (0, 1), "the logits are right"),
    "replica_drifts": ("llama", DP2, NORM, (1,), "no longer hold the same"),
    "norms_decayed": ("llama", TP2, "model.layers.0.input_layernorm", (0, 1), "weight decay"),
    "parameter_not_trained": ("llama", TP2, "model.layers.3.mlp.up_proj.weight", (0, 1), "trained at all"),
    "only_the_last_step_lost": ("llama", TP2, NORM, (0, 1), "weights"),
}


@pytest.fixture(scope="module")
def steps(ranks, tmp_path_factory):
    """Of a model at a layout; plain transformers run once for each."""
    made = {}

    def get(model_type, layout):
        if (model_type, layout) not in made:
            folder = tmp_path_factory.mktemp(model_type)
            small_config(model_type).save_pretrained(folder)
            options = {"full_size": False, "layers": None, "overrides": (), "trust_remote_code": False}
            subject = make_subject(str(folder), folder / "model", layout, **options)
            made[model_type, layout] = Steps(ranks, subject, layout, False, 120, lambda doing: None)
        return made[model_type, layout]

    return get


# The others take as long and show no more of what finds them.
QUICK = (
    "low_ids_zeroed",
    "rotary_wrong_beyond_16",
    "wrong_from_the_second_step",
    "gradient_doubled_on_one_rank",
    "norm_counted_twice",
    "padding_counted",
    "replica_drifts",
    "only_the_last_step_lost",
)


def _marked(fault):
    return pytest.param(fault, marks=() if fault in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("fault", [_marked(fault) for fault in PLANTED])
def test_a_mistake_is_found_at_its_place(ranks, steps, fault):
    model_type, layout, where, on, words = PLANTED[fault]
    checks, why, finding = StepComparison(steps(model_type, layout), f"{FAULTS}:{fault}").judge()
    ranks.renew()
    assert not all(check.equal for check in checks)
    assert finding is not None
    assert finding.where == where or finding.where.startswith(f"{where}.")
    assert finding.ranks == on
    assert words in f"{why} {finding.relation} {finding.cause}"
