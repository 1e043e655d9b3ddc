"""Megatron's arguments from HF configs, and the flags that are refused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from megasched.errors import ConfigError
from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.trainer.flags import te
from megasched.trainer.flags.arguments import (
    add_megasched_arguments,
    apply_derived,
    check_tokenizer,
    explicit_flags,
    layout_from_args,
    refuse_unsupported,
)
from megasched.trainer.flags.model_shape import derive, derive_megatron_args
from megasched.trainer.flags.refused_flags import REFUSED
from megasched.trainer.flags.rehearsal import DROPPED, SWITCHES, VALUES, rehearsal_flags, rehearsal_mode
from megasched.trainer.seams import registry

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "initializer_range": 0.03,
}
GPT2 = {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 301}


def config(model_type: str, **fields: Any) -> PretrainedConfig:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return CONFIG_MAPPING[model_type](**(tokens | fields))


# What all of the Llama kind made from SMALL share.
LLAMA_LIKE = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 112,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "init_method_std": 0.03,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}

FAMILIES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "llama": (
        config(
            "llama",
            **SMALL,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        ),
        LLAMA_LIKE
        | {
            "group_query_attention": True,
            "num_query_groups": 2,
            "kv_channels": 8,
            "layernorm_epsilon": 1e-5,
            "rotary_base": 500000,
            "rotary_percent": 1.0,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": True,
            "use_rope_scaling": False,
        },
    ),
    "mistral": (
        config("mistral", **SMALL, num_key_value_heads=3, head_dim=16),
        LLAMA_LIKE | {"num_query_groups": 3, "kv_channels": 16, "layernorm_epsilon": 1e-6},
    ),
    "qwen2": (
        config("qwen2", **SMALL, num_key_value_heads=6, tie_word_embeddings=True, attention_dropout=0.2),
        LLAMA_LIKE
        | {
            "group_query_attention": False,
            "num_query_groups": 6,
            "kv_channels": 8,
            "add_qkv_bias": True,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": False,
            "attention_dropout": 0.2,
        },
    ),
    "qwen3": (
        config("qwen3", **SMALL, num_key_value_heads=2, head_dim=32),
        LLAMA_LIKE | {"num_query_groups": 2, "kv_channels": 32, "qk_layernorm": True, "add_qkv_bias": False},
    ),
    "gemma2": (
        config("gemma2", **SMALL, num_key_value_heads=3, head_dim=24),
        LLAMA_LIKE | {"num_query_groups": 3, "kv_channels": 24, "untie_embeddings_and_output_weights": False},
    ),
    "phi3": (
        config(
            "phi3",
            **SMALL,
            num_key_value_heads=3,
            resid_pdrop=0.15,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        LLAMA_LIKE
        | {
            "num_query_groups": 3,
            "kv_channels": 8,
            "hidden_dropout": 0.15,
            "layernorm_epsilon": 1e-5,
            "rotary_percent": 0.5,
        },
    ),
    "gpt2": (
        config("gpt2", **GPT2, attn_pdrop=0.05, resid_pdrop=0.25, layer_norm_epsilon=1e-4),
        {
            "num_layers": 3,
            "hidden_size": 48,
            "ffn_hidden_size": 192,
            "num_attention_heads": 4,
            "kv_channels": 12,
            "group_query_attention": False,
            "num_query_groups": 4,
            "max_position_embeddings": 32,
            "vocab_size": 301,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-4,
            "swiglu": False,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": False,
            "attention_dropout": 0.05,
            "hidden_dropout": 0.25,
            "init_method_std": 0.02,
        },
    ),
    "opt": (
        config(
            "opt",
            num_hidden_layers=2,
            hidden_size=48,
            word_embed_proj_dim=48,
            ffn_dim=80,
            num_attention_heads=4,
            max_position_embeddings=40,
            vocab_size=303,
            dropout=0.3,
            attention_dropout=0.4,
            init_std=0.05,
        ),
        {
            "num_layers": 2,
            "ffn_hidden_size": 80,
            "kv_channels": 12,
            "max_position_embeddings": 40,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-5,
            "swiglu": False,
            "add_bias_linear": True,
            "hidden_dropout": 0.3,
            "attention_dropout": 0.4,
            "init_method_std": 0.05,
        },
    ),
    "gpt_neox": (
        config(
            "gpt_neox",
            **SMALL,
            layer_norm_eps=1e-3,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        {
            "num_layers": 2,
            "ffn_hidden_size": 112,
            "num_query_groups": 6,
            "position_embedding_type": "rope",
            "rotary_percent": 0.25,
            "rotary_base": 10000,
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-3,
            "swiglu": False,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "untie_embeddings_and_output_weights": True,
        },
    ),
    # No field of the config says how wide the MLP is, and positions are a bias on the scores.
    "bloom": (
        config("bloom", n_layer=2, hidden_size=48, n_head=4, vocab_size=300),
        {"ffn_hidden_size": 192, "position_embedding_type": "none", "swiglu": False, "add_qkv_bias": True},
    ),
    "gptj": (
        config("gptj", n_layer=2, n_embd=48, n_head=4, rotary_dim=6, n_positions=32, vocab_size=300),
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "ffn_hidden_size": 192},
    ),
    "falcon": (
        config("falcon", num_hidden_layers=2, hidden_size=48, num_attention_heads=4, vocab_size=300),
        {"num_query_groups": 1, "group_query_attention": True},
    ),
    # One token goes through two experts of width 112.
    "mixtral": (
        config("mixtral", **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
        {"ffn_hidden_size": 224, "swiglu": True},
    ),
    # ... or through two of width 20 and a shared one of width 56.
    "qwen2_moe": (
        config(
            "qwen2_moe",
            **SMALL,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=56,
        ),
        {"ffn_hidden_size": 96, "swiglu": True},
    ),
    # Two sets of RoPE parameters; that of full attention counts.
    "gemma3_text": (
        config("gemma3_text", **SMALL, num_key_value_heads=3, head_dim=8),
        {"rotary_base": 1000000, "qk_layernorm": True},
    ),
    # The recurrence has parameters of three dimensions, which are no experts; the MLP is gated.
    "recurrent_gemma": (
        config("recurrent_gemma", **SMALL, num_key_value_heads=1, lru_width=48, head_dim=8),
        {"swiglu": True},
    ),
    # No attention at all: one head, so that Megatron has its number.
    "mamba": (
        config("mamba", num_hidden_layers=2, hidden_size=48, vocab_size=300),
        {"num_attention_heads": 1, "position_embedding_type": "none"},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_derived_values(family: str) -> None:
    hf_config, expected = FAMILIES[family]
    tp_facts = derive_megatron_args(hf_config)
    assert {dest: tp_facts.get(dest) for dest in expected} == expected


def test_rope_scaling_of_llama3_is_told_to_megatron() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    tp_facts = derive_megatron_args(config("llama", **SMALL, rope_parameters=rope))
    assert tp_facts["use_rope_scaling"] is True
    assert tp_facts["rope_scaling_factor"] == 4.0


def test_deriving_leaves_the_config_alone() -> None:
    hf_config = config("gpt2", **GPT2)
    before = hf_config.to_dict()
    derive(hf_config)
    assert hf_config.to_dict() == before


def test_sources_name_the_field_as_config_json_spells_it() -> None:
    tp_facts = derive(config("gpt2", **GPT2))
    assert tp_facts["hidden_size"].source == "n_embd = 48"
    assert tp_facts["position_embedding_type"].source == "transformer.wpe is a table of positions"


def test_a_model_that_transformers_can_not_build_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="can't build a causal language model from this T5Config"):
        derive(config("t5"))


# ---- flags ------------------------------------------------------------------------------------------


@pytest.fixture
def hf_model(tmp_path: Path) -> str:
    folder = tmp_path / "llama"
    config("llama", **SMALL, num_key_value_heads=2).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def gpt2_model(tmp_path: Path) -> str:
    folder = tmp_path / "gpt2"
    config("gpt2", **GPT2, resid_pdrop=0.0, attn_pdrop=0.0).save_pretrained(folder)
    return str(folder)


def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megasched_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def derived_args(*argv: str) -> argparse.Namespace:
    """As the patch does it."""
    args = megatron_parser().parse_args(list(argv))
    args.world_size = 1
    apply_derived(args, explicit_flags(megatron_parser(), argv))
    return args


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        derived_args(*argv)
    return str(caught.value)


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


def test_every_refused_name_is_one_of_megatrons() -> None:
    dests = {action.dest for action in megatron_parser()._actions}
    unknown = [pattern for pattern in REFUSED if not any(fnmatchcase(dest, pattern) for dest in dests)]
    # ModelOpt's flag is added by scripts that found ModelOpt.
    assert unknown == ["modelopt_enabled"]


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
    FAMILIES["bloom"][0].save_pretrained(folder)
    assert derived_args("--hf-model", str(folder), "--seq-length", "77").max_position_embeddings == 77


def test_no_model_is_a_config_error() -> None:
    assert "--model-schedule needs --hf-model" in refusal("--model-schedule", "auto")


def test_tokenizer_may_be_smaller_but_not_larger(hf_model: str) -> None:
    args = derived_args("--hf-model", hf_model, "--tokenizer-model", "tokens.json")
    check_tokenizer(args, SimpleNamespace(vocab_size=300))
    check_tokenizer(args, SimpleNamespace(vocab_size=10))
    with pytest.raises(ConfigError, match=r"tokens\.json.* has 301 tokens.*vocab_size = 300"):
        check_tokenizer(args, SimpleNamespace(vocab_size=301))


# ---- layout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "virtual"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 1", 3),
        ("--num-layers-per-virtual-pipeline-stage 3", None),
        ("--pipeline-model-parallel-layout Et|tt||tttL", 2),
        ("", None),
    ],
)
def test_layout_before_megatron_has_validated(flags: str, virtual: int | None) -> None:
    parallel = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    args = megatron_parser().parse_args(
        [*parallel.split(), "--num-layers", "6", "--micro-batch-size", "3", *flags.split()]
    )
    args.world_size = 16
    assert layout_from_args(args) == ParallelDims(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
        data_parallel_size=4,
        micro_batch_size=3,
    )


def test_ranks_that_do_not_divide() -> None:
    args = megatron_parser().parse_args(["--tensor-model-parallel-size", "2"])
    args.world_size = 3
    with pytest.raises(ConfigError, match="3 ranks are no multiple of TP 2 x PP 1 x CP 1"):
        layout_from_args(args)


# ---- the patch --------------------------------------------------------------------------------------


@pytest.fixture
def patched() -> Iterator[None]:
    assert registry.apply("arguments")
    yield
    registry.undo("arguments")


def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--of-the-script", type=int, default=0)
    return parser


RUN = (
    "--seq-length 32 --micro-batch-size 2 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--mock-data --of-the-script 5"
)


def parse(monkeypatch: pytest.MonkeyPatch, *argv: str) -> argparse.Namespace:
    from megatron.training import arguments, global_vars

    monkeypatch.setattr(sys, "argv", ["pretrain.py", *argv])
    try:
        return arguments.parse_and_validate_args(extra_args_provider=extra)
    finally:
        global_vars.unset_global_variables()


@pytest.mark.usefixtures("patched")
def test_patched_parser_sets_the_model_before_validation(monkeypatch: pytest.MonkeyPatch, hf_model: str) -> None:
    model = ("--model-schedule", "auto", "--hf-model", hf_model, "--hf-random-init")
    args = parse(monkeypatch, *model, *RUN.split())
    assert args.of_the_script == 5
    assert (args.num_layers, args.encoder_num_layers) == (2, 2)
    # Megatron has built its tokenizer by now, and kept the size.
    assert (args.padded_vocab_size, args.vocab_size) == (384, 300)
    assert layout_from_args(args) == ParallelDims(micro_batch_size=2)


@pytest.mark.usefixtures("patched")
def test_patched_parser_refuses_a_large_tokenizer(monkeypatch: pytest.MonkeyPatch, hf_model: str) -> None:
    from megasched.trainer.flags import arguments

    # As if Megatron had found a tokenizer whose size no flag tells.
    monkeypatch.setattr(arguments, "NULL_TOKENIZERS", ())
    model = ("--model-schedule", "auto", "--hf-model", hf_model, "--hf-random-init")
    with pytest.raises(ConfigError, match="has 512 tokens"):
        parse(monkeypatch, *model, *RUN.split(), "--vocab-size", "512")


@pytest.mark.usefixtures("patched")
def test_patched_parser_without_a_schedule_is_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--num-layers 3 --hidden-size 12 --num-attention-heads 2 --max-position-embeddings 40 --vocab-size 9"
    args = parse(monkeypatch, *sizes.split(), *RUN.split())
    assert args.model_schedule is None
    assert (args.num_layers, args.padded_vocab_size, args.hidden_dropout) == (3, 128, 0.1)


# ---- rehearsal --------------------------------------------------------------------------------------


def test_rehearsal_adds_what_is_missing_and_keeps_the_rest() -> None:
    argv = ["--bf16", "--num-workers", "2", "--data-path", "a", "b", "--adam-eps=-1", "--no-rope-fusion"]
    flags = rehearsal_flags(argv)
    assert flags.argv[: len(argv)] == argv
    assert flags.replaced == []
    assert flags.added == [
        "--distributed-backend gloo",
        "--transformer-impl local",
        "--rerun-mode disabled",
        "--use-cpu-initialization",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
        "--no-masked-softmax-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-dropout-fusion",
    ]
    parsed, unknown = megatron_parser().parse_known_args(flags.argv)
    assert unknown == []
    assert (parsed.distributed_backend, parsed.bf16, parsed.num_workers) == ("gloo", True, 2)


def test_rehearsal_replaces_what_needs_a_gpu() -> None:
    argv = (
        "--distributed-backend=nccl --transformer-impl transformer_engine --fp8-format hybrid "
        "--tp-comm-overlap --cuda-graph-modules attn mlp --attention-backend flash "
        "--rerun-mode disabled --lr 1e-3"
    )
    flags = rehearsal_flags(argv.split())
    kept = "--distributed-backend gloo --transformer-impl local --rerun-mode disabled --lr 1e-3"
    assert " ".join(flags.argv).startswith(kept + " --num-workers 0 --use-cpu-initialization")
    shown = [str(one) for one in flags.replaced]
    assert shown[0] == "--distributed-backend=nccl -> --distributed-backend gloo (NCCL needs GPUs)"
    assert shown[2] == "--fp8-format hybrid -> left out (8-bit kernels need a GPU)"
    assert [one.given for one in flags.replaced[3:]] == [
        "--tp-comm-overlap",
        "--cuda-graph-modules attn mlp",
        "--attention-backend flash",
    ]
    assert "stays as it will run on the cluster" in str(flags)


def test_rehearsal_of_a_rehearsal_changes_nothing() -> None:
    once = rehearsal_flags(["--lr", "1e-3", "--fp8-format", "hybrid"])
    twice = rehearsal_flags(once.argv)
    assert (twice.argv, twice.added, twice.replaced) == (once.argv, [], [])


def test_every_flag_of_the_rehearsal_is_one_of_megatrons() -> None:
    options = set(megatron_parser()._option_string_actions)
    patterns = [*DROPPED, *VALUES, *SWITCHES]
    assert [p for p in patterns if not any(fnmatchcase(option, p) for option in options)] == []


@pytest.mark.parametrize(
    ("argv", "environ", "mode"),
    [
        ([], {}, ""),
        (["--rehearse"], {}, "1"),
        ([], {"MEGASCHED_REHEARSE": "1"}, "1"),
        (["--rehearse"], {"MEGASCHED_REHEARSE": "force"}, "force"),
        ([], {"MEGASCHED_REHEARSE": "0"}, ""),
        ([], {"MEGASCHED_REHEARSE": ""}, ""),
        (["--rehearse"], {"MEGASCHED_REHEARSE": "0"}, "1"),
    ],
)
def test_when_a_rehearsal_is_asked_for(argv: list[str], environ: dict[str, str], mode: str) -> None:
    assert rehearsal_mode(argv, environ) == mode


def test_other_values_of_the_variable_are_refused() -> None:
    with pytest.raises(ConfigError, match="MEGASCHED_REHEARSE=yes"):
        rehearsal_mode([], {"MEGASCHED_REHEARSE": "yes"})
