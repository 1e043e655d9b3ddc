"""Further families on a ghost GPU with Transformer Engine, rows of several sequences, and fp16."""

import runpy

import pytest

from tests.ghost.process import INTEGERS, ROOT
from tests.ghost.runs import LENGTH, train, write_model

# Each has something in its layers that Llama's have not.
FAMILIES = {
    "qwen3": {"head_dim": 64},  # norms of heads
    "gemma2": {"head_dim": 64},  # soft caps, windows
    "gpt2": {"n_embd": 256, "n_positions": 256},  # biases, one product for queries, keys and values
    "phi3": {"original_max_position_embeddings": 256},  # gate and up in one
    "deepseek_v3": {  # latent attention
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},  # sinks
}
LEVELS = dict.fromkeys(FAMILIES, ("fused", "block")) | {"gemma2": ("fused",)}

pytestmark = pytest.mark.slow
with_te = pytest.mark.usefixtures("transformer_engine")


@with_te
@pytest.mark.parametrize(
    ("family", "level"), [(family, level) for family, levels in LEVELS.items() for level in levels]
)
def test_a_family_trains(tmp_path, family, level):
    model = write_model(tmp_path, family, **FAMILIES[family])
    run = train(model, level, [], te=True, length=LENGTH, iterations=1, **INTEGERS)
    assert run.faults([1]) == []


@with_te
@pytest.mark.parametrize("level", ["fused", "block"])
def test_fp16_trains(tmp_path, level):
    run = train(write_model(tmp_path), level, [], te=True, length=LENGTH, precision="--fp16")
    assert run.faults() == []


@with_te
@pytest.mark.parametrize("level", ["fused", "block"])
def test_rows_of_several_sequences_train(tmp_path, level):
    example = runpy.run_path(str(ROOT / "examples" / "sft" / "make.py"))
    model, lines = tmp_path / "model", tmp_path / "lines.jsonl"
    write_model(model, vocab_size=example["write_tokenizer"](model))
    every = list(example["conversations"]())
    example["write_lines"](lines, [every[start : start + 3] for start in range(0, 48, 3)])
    data = ["--sft", "--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--tokenizer-type", "SFTTokenizer"]
    data += ["--tokenizer-model", str(model), "--data-path", str(lines), "--split", "100,0,0"]
    run = train(model, level, [], te=True, length=LENGTH, data=data, **INTEGERS)
    assert run.faults() == []
