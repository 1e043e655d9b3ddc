"""The layout that Megatron's arguments describe, and the parser with the patch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

import pytest

from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.flags.arguments import layout_from_args
from megasched.trainer.seams import registry
from tests.trainer.flags.models import megatron_parser


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


@pytest.mark.usefixtures("patched")
def test_help_lists_every_flag_those_of_megasched_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A help of Megatron's that is no format (`10%)`) ends argparse's in a ValueError."""
    with pytest.raises(SystemExit, match="0"):
        parse(monkeypatch, "--help")
    text = capsys.readouterr().out
    assert text.startswith("usage: megasched pretrain.py --model-schedule FILE --hf-model DIR <flags>\n")
    places = [text.index(word) for word in ("\nmegasched:\n", "  --model-schedule", "  --num-layers ")]
    assert places == sorted(places)
    assert "e.g. 1.10 = 10%)" in text
    for option, action in megatron_parser()._option_string_actions.items():
        assert option in text or action.help == argparse.SUPPRESS


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-layer 3 --tensor-parallel-size=2",
            "--num-layer: there is no such flag; did you mean --num-layers, --mtp-num-layers?\n"
            "--tensor-parallel-size: there is no such flag; did you mean --tensor-model-parallel-size, "
            "--expert-tensor-parallel-size, --context-parallel-size?",
        ),
        ("--rot", "--rot: there is no such flag; `megasched pretrain.py --help` lists them"),
        ("--bf16 yes", "yes: no flag takes this word; is the one before it a flag without a value?"),
        ("--seed one", "argument --seed: invalid int value: 'one'"),
    ],
)
def test_a_wrong_flag_is_one_message(monkeypatch: pytest.MonkeyPatch, flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(monkeypatch, *flags.split())
    assert str(caught.value) == message


@pytest.mark.usefixtures("patched")
def test_a_rule_of_megatrons_is_told_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asserts it without a word."""
    sizes = "--num-layers 3 --hidden-size 12 --num-attention-heads 2 --max-position-embeddings 40 --vocab-size 9"
    with pytest.raises(ConfigError) as caught:
        parse(monkeypatch, *sizes.split(), *RUN.split(), "--bf16", "--fp16")
    message = str(caught.value)
    assert re.sub("rule: .*megatron/training/arguments.py:[0-9]+", "rule: FILE:LINE", message) == (
        "Megatron refuses --fp16, --bf16\n"
        "    rule: FILE:LINE\n"
        "        if args.fp16:\n"
        "            assert not args.bf16\n"
        "    remedy: change one of them"
    )


@pytest.mark.usefixtures("patched")
def test_a_rule_about_a_flag_that_is_absent_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--num-layers 3 --hidden-size 12 --num-attention-heads 2 --max-position-embeddings 40 --vocab-size 9"
    with pytest.raises(ConfigError) as caught:
        parse(monkeypatch, *sizes.split(), *RUN.split(), "--save", "x")
    assert str(caught.value).startswith("Megatron refuses --save, --save-interval\n")
    assert str(caught.value).endswith("\n    remedy: give --save-interval, too")
