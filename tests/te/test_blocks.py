"""Level ``block`` with Transformer Engine's modules: what they are, their weights, and what they compute."""

import subprocess
import sys

import pytest

from tests.process import TE, run_case

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "phi3")
# Of other kinds than Llama's: the norms, the activation, how projections lie.
KINDS = ("gemma", "gemma3_text", "glm4", "exaone4", "gpt2", "opt", "starcoder2", "nemotron", "persimmon")
# Without norms before attention and the MLP.
POST_NORMED = ("exaone4",)
# The layers of the last two stay HF's.
MIXTURES = ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "olmoe", "qwen3_next")
# Layers that stay HF's: a gate and GELU; a bias and GELU; a gate.
MLPS = ("gemma2", "phi", "cohere")
# Attention alone: scaled; neighbours rotated, biases; norms of heads; partly rotated, packed;
# sinks; latent; gated.
ATTENTIONS = (
    *("granite:self_attn", "ernie4_5_moe:self_attn", "qwen3:self_attn", "apertus:self_attn"),
    *("gpt_neox:attention", "gpt_oss:self_attn", "deepseek_v3:self_attn", "qwen3_next:self_attn"),
)


@pytest.fixture(scope="module")
def found():
    return run_case(TE, "tests.te.blocks_case", *FAMILIES, *KINDS, *MIXTURES, *MLPS, *ATTENTIONS)


@pytest.mark.parametrize("family", [*FAMILIES, *KINDS])
def test_the_layer_is_made_of_transformer_engines_modules(found, family):
    classes = found[family]["classes"]
    first = "TEColumnParallelLinear" if family in POST_NORMED else "TELayerNormColumnParallelLinear"
    assert {first, "TERowParallelLinear", "TEDotProductAttention"} <= set(classes)
    own = {name for name in classes if name.startswith("ZeroCentered")}
    assert not own | {"ColumnParallelLinear", "RowParallelLinear", "CoreAttention"} & set(classes)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_experts_are_transformer_engines_too(found, family):
    classes = found[family]["classes"]
    assert {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TopKRouter"} <= set(classes)
    assert not {"ColumnParallelLinear", "RowParallelLinear", "CoreAttention", "SequentialMLP"} & set(classes)


@pytest.mark.parametrize("family", MLPS)
def test_an_mlp_alone_is_transformer_engines(found, family):
    assert found[family]["classes"] == ["MLP", "MegatronMlp", "TEColumnParallelLinear", "TERowParallelLinear"]


@pytest.mark.parametrize("family", ATTENTIONS)
def test_attention_alone_is_transformer_engines(found, family):
    """Its norm is HF's, so that the projection has none in it."""
    classes = set(found[family]["classes"])
    assert {"MegatronAttention", "TERowParallelLinear", "TEDotProductAttention"} <= classes
    assert not {"ColumnParallelLinear", "RowParallelLinear", "CoreAttention"} & classes
    latent = family.startswith("deepseek")
    assert ("TELayerNormColumnParallelLinear" in classes, "TEColumnParallelLinear" in classes) == (
        latent,
        not latent,
    )


@pytest.mark.parametrize("family", [*FAMILIES, *KINDS, *MIXTURES, *MLPS, *ATTENTIONS])
def test_output_and_every_gradient_equal_the_definitions(found, family):
    assert found[family]["missing"] == []
    assert {name: gap for name, gap in found[family]["distances"].items() if not gap < 1e-5} == {}


def test_it_is_not_importable_here():
    """Megatron would pick its optimizer and norms in every other test."""
    run = subprocess.run([sys.executable, "-c", "import transformer_engine"], capture_output=True, check=False)
    assert run.returncode != 0
