"""Megatron's arguments from an HF model and flags, and the flags that are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megasched.errors import ConfigError
from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.trainer.flags import te
from megasched.trainer.flags.arguments import (
    check_tokenizer,
    layout_from_args,
    refuse_unsupported,
)
from megasched.trainer.flags.flag_classes import explicit_flags
from tests.trainer.flags.models import config, derived_args, megatron_parser, refusal


def test_explicit_flags_in_every_spelling() -> None:
    argv = (
        "--hidden-size=64 --disable-bias-linear --swiglu --train-iters 10 --no-overlap-p2p-communication "
        "--cp-comm-type p2p a2a --norm-epsilon 1e-5 --hidden-dropout 0.1 --some-flag-of-the-script 3"
    )
    given = explicit_flags(megatron_parser(), argv.split())
    assert {dest: flag.value for dest, flag in given.items()} == {
        "hidden_size": 64,
        "add_bias_linear": False,
        "swiglu": True,
        "train_iters": 10,
        "overlap_p2p_comm": False,
        "cp_comm_type": ["p2p", "a2a"],
        "layernorm_epsilon": 1e-5,
        # Given with its default value, and given all the same.
        "hidden_dropout": 0.1,
    }
    assert str(given["hidden_size"]) == "--hidden-size 64"
    assert str(given["add_bias_linear"]) == "--disable-bias-linear"
    assert str(given["cp_comm_type"]) == "--cp-comm-type p2p a2a"
    assert given["hidden_dropout"].default == 0.1


def test_nothing_given_everything_derived(hf_model: str) -> None:
    args = derived_args("--model-schedule", "auto", "--hf-model", hf_model, "--seq-length", "32")
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (2, 48, 112)
    assert (args.num_query_groups, args.group_query_attention, args.kv_channels) == (2, True, 8)
    assert (args.attention_dropout, args.hidden_dropout) == (0.0, 0.0)
    assert args.max_position_embeddings == 64
    assert args.seq_length == 32
    assert args.vocab_size is None


def test_overrides_are_derived_from(hf_model: str) -> None:
    args = derived_args("--hf-model", hf_model, "--hf-override", "num_hidden_layers=5", "rms_norm_eps=1e-3")
    assert args.num_layers == 5
    assert args.layernorm_epsilon == 1e-3


@pytest.mark.parametrize(
    ("flags", "padded"),
    [
        ("", 384),
        ("--tensor-model-parallel-size 2", 512),
        ("--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 1", 300),
        ("--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 32", 384),
    ],
)
def test_vocabulary_is_padded_from_the_models_own(hf_model: str, flags: str, padded: int) -> None:
    args = derived_args("--hf-model", hf_model, "--vocab-size", "99", *flags.split())
    assert args.padded_vocab_size == padded
    assert args.vocab_size == 99


def test_null_tokenizer_takes_the_models_vocabulary(hf_model: str) -> None:
    assert derived_args("--hf-model", hf_model, "--tokenizer-type", "NullTokenizer").vocab_size == 300
    message = refusal("--hf-model", hf_model, "--tokenizer-type", "NullTokenizer", "--vocab-size", "301")
    assert "--vocab-size 301 of the NullTokenizer, but vocab_size = 300" in message


def test_flags_that_agree_are_fine(hf_model: str) -> None:
    flags = (
        "--num-layers 2 --hidden-size=48 --swiglu --disable-bias-linear --normalization RMSNorm "
        "--norm-epsilon 0.000001 --group-query-attention --num-query-groups 2 --rotary-base 10000 "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
        "--padded-vocab-size 384"
    )
    assert derived_args("--hf-model", hf_model, *flags.split()).num_layers == 2


def test_all_contradictions_in_one_message(hf_model: str) -> None:
    flags = (
        "--hidden-size 64 --norm-epsilon=1e-4 --attention-dropout 0.1 --num-query-groups 3 "
        "--position-embedding-type learned_absolute --padded-vocab-size 300 --add-qkv-bias"
    )
    message = refusal("--hf-model", hf_model, *flags.split(), "--micro-batch-size", "7")
    for line in (
        "--hidden-size 64, but hidden_size = 48",
        "--norm-epsilon 0.0001, but rms_norm_eps = 1e-06",
        "--attention-dropout 0.1, but attention_dropout = 0.0",
        "--num-query-groups 3, but num_key_value_heads = 2",
        "--position-embedding-type learned_absolute, but rope_type = default",
        "--padded-vocab-size 300, but vocab_size = 300, padded to a multiple of 128: 384",
        "--add-qkv-bias, but LlamaDecoderLayer has no bias in attention",
    ):
        assert line in message
    assert message.count("\n  - ") == 7
    assert "--hf-override" in message


def test_legacy_rope_flag_contradicts_learned_positions(gpt2_model: str) -> None:
    message = refusal("--hf-model", gpt2_model, "--use-rotary-position-embeddings")
    assert "--use-rotary-position-embeddings, but transformer.wpe is a table of positions" in message


@pytest.mark.parametrize(
    "flag",
    [
        "--reset-position-ids",
        "--reset-attention-mask",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--mtp-num-layers 1",
        "--hybrid-context-parallel",
        "--overlap-moe-expert-parallel-comm",
        "--init-model-with-meta-device",
        "--spec local x",
        "--distribute-saved-activations",
        "--fp4-format e2m1",
        "--fp8-param-gather",
        "--fp8-output-proj",
        "--use-te-activation-func",
        "--use-checkpoint-args",
        "--num-experts 8",
        "--attention-backend local",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl te",
        "--yaml-cfg x.yaml",
        "--freeze-all-layers",
        "--apply-wd-to-qk-layernorm",
        "--no-weight-decay-cond-type apply_wd_to_qk_layernorm",
        "--embedding-init-method-std 0.5",
        "--mup-width-mult 2.0",
        "--rope-type yarn",
        "--rotary-scaling-factor 4.0",
        "--mscale 2.0",
        "--mscale-all-dim 1.0",
        "--yarn-beta-fast 16.0",
        "--overlap-param-gather-with-optimizer-step",
        "--yarn-original-max-position-embeddings 32",
        "--q-lora-rank 16",
        "--kv-lora-rank 16",
        "--qk-head-dim 16",
        "--v-head-dim 16",
        "--relative-attention-num-buckets 8",
        "--dsa-indexer-topk 8",
        "--linear-key-head-dim 16",
        "--mamba-state-dim 16",
    ],
)
def test_flags_refused_under_a_schedule(hf_model: str, flag: str) -> None:
    message = refusal("--hf-model", hf_model, "--train-iters", "3", *flag.split())
    assert f"{flag}" in message
    assert "--train-iters" not in message


def test_default_values_of_refused_flags_are_fine(hf_model: str) -> None:
    flags = "--context-parallel-size 1 --expert-model-parallel-size 1 --fp8-margin 0 --attention-backend auto"
    assert derived_args("--hf-model", hf_model, *flags.split()).context_parallel_size == 1
    refuse_unsupported(flags.split())


FP8 = "--fp8-format hybrid --seq-length 24 --micro-batch-size 2"


def test_8_bits_need_transformer_engine(hf_model: str) -> None:
    message = refusal("--hf-model", hf_model, *FP8.split())
    assert "--fp8-format hybrid: Transformer Engine does that, and it is not installed here" in message
    assert message.count("\n  - ") == 1
    message = refusal("--hf-model", hf_model, "--tp-comm-overlap")
    assert "--tp-comm-overlap: Transformer Engine does that" in message


def test_8_bits_take_a_multiple_of_tokens(hf_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "find_spec", lambda name: name)
    flags = ["--hf-model", hf_model, *FP8.split()]
    assert derived_args(*flags).fp8 == "hybrid"
    message = refusal(*flags, "--fp8-recipe", "mxfp8")
    assert "--seq-length 24 x --micro-batch-size 2: 8-bit matrix products (mxfp8) take a multiple of 32" in message
    message = refusal(*flags, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert "/ TP 2 under --sequence-parallel: 8-bit matrix products (delayed) take a multiple of 16" in message


def test_8_bits_in_the_layout() -> None:
    flags = "--fp8-format e4m3 --fp8-recipe tensorwise --num-layers-at-start-in-bf16 3 --tp-comm-overlap"
    args = megatron_parser().parse_args(flags.split())
    args.world_size = 1
    assert layout_from_args(args) == ParallelDims(fp8=Fp8(fp8_recipe="tensorwise"), tp_comm_overlap=True)
    args.first_last_layers_bf16 = True
    assert layout_from_args(args).fp8 == Fp8(
        fp8_recipe="tensorwise", num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=1
    )


def test_sequence_beyond_the_models_positions(hf_model: str, gpt2_model: str) -> None:
    message = refusal("--hf-model", hf_model, "--seq-length", "65")
    assert "--seq-length 65, but max_position_embeddings = 64" in message
    assert "--hf-override max_position_embeddings=65" in message
    message = refusal("--hf-model", gpt2_model, "--seq-length", "33")
    assert "--seq-length 33, but n_positions = 32: the model has a learned table" in message
    override = ("--hf-override", "max_position_embeddings=65")
    assert derived_args("--hf-model", hf_model, "--seq-length", "65", *override).seq_length == 65


def test_some_iteration_is_to_be_recorded(hf_model: str) -> None:
    none = ("--hf-model", hf_model, "--profile-step-start", "12")
    message = refusal(*none, "--megasched-trace", "trace.json")
    assert (
        "--megasched-trace records from --profile-step-start 12 to --profile-step-end 12, which is none" in message
    )
    assert derived_args(*none).megasched_trace is None


def test_positions_without_a_limit_are_as_long_as_the_sequence(tmp_path: Path) -> None:
    folder = tmp_path / "bloom"
    config("bloom", n_layer=2, hidden_size=48, n_head=6, vocab_size=300).save_pretrained(folder)
    assert derived_args("--hf-model", str(folder), "--seq-length", "77").max_position_embeddings == 77


def test_positions_reach_to_the_longer_of_two_sequences(tmp_path: Path) -> None:
    config("t5", vocab_size=300).save_pretrained(tmp_path / "t5")
    config("bart", vocab_size=300, max_position_embeddings=24).save_pretrained(tmp_path / "bart")
    flags = ("--objective", "seq2seq_lm", "--seq-length", "16", "--decoder-seq-length", "32")
    t5 = ("--hf-model", str(tmp_path / "t5"), *flags)
    assert derived_args(*t5).max_position_embeddings == 32
    message = refusal(*t5, "--max-position-embeddings", "20")
    assert "--max-position-embeddings 20, but no limit in the HF config" in message
    message = refusal("--hf-model", str(tmp_path / "bart"), *flags)
    assert "--decoder-seq-length 32, but max_position_embeddings = 24" in message


def test_the_length_of_the_encoder_is_that_of_the_sequence(hf_model: str) -> None:
    args = derived_args("--hf-model", hf_model, "--encoder-seq-length", "32")
    assert (args.seq_length, args.encoder_seq_length) == (32, None)
    assert "--seq-length 65, but" in refusal("--hf-model", hf_model, "--encoder-seq-length", "65")


def test_no_model_is_a_config_error() -> None:
    assert "--model-schedule needs --hf-model" in refusal("--model-schedule", "auto")


def test_tokenizer_may_be_smaller_but_not_larger(hf_model: str) -> None:
    args = derived_args("--hf-model", hf_model, "--tokenizer-model", "tokens.json")
    check_tokenizer(args, SimpleNamespace(vocab_size=300))
    check_tokenizer(args, SimpleNamespace(vocab_size=10))
    with pytest.raises(ConfigError, match=r"tokens\.json.* has 301 tokens.*vocab_size = 300"):
        check_tokenizer(args, SimpleNamespace(vocab_size=301))
