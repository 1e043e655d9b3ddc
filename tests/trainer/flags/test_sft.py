"""What ``--sft`` is refused for, said before anything is built."""

from __future__ import annotations

import runpy
from argparse import Namespace
from pathlib import Path

import pytest

from megasched.errors import ConfigError
from megasched.trainer.entry import check_data_paths
from megasched.trainer.flags import sft
from megasched.trainer.flags.sft import refuse_splits, sft_conflicts, unlearned_end

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "sft" / "make.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    EXAMPLE["write_tokenizer"](made)
    return made


def arguments(folder, **changes):
    args = Namespace(
        sft=True,
        mock_data=False,
        context_parallel_size=1,
        objective=None,
        tokenizer_type="SFTTokenizer",
        tokenizer_model=str(folder),
        sft_tokenizer_prompt_format="nemotron-nano-v2",
    )
    vars(args).update(changes)
    return args


def misfits(folder, **changes):
    return sft_conflicts(arguments(folder, **changes))


@pytest.mark.parametrize("prompt_format", ["nemotron-nano-v2", "identity", "default"])
def test_formats_that_a_tokenizer_has_all_tokens_for(folder, prompt_format):
    assert misfits(folder, sft_tokenizer_prompt_format=prompt_format) == []


def test_a_format_whose_tokens_the_tokenizer_has_not(folder):
    """Megatron's default: it would spell its marks out as text, and fill rows with what is no token."""
    (line,) = misfits(folder, sft_tokenizer_prompt_format="nemotron-h-aligned")
    assert "writes <SPECIAL_233>" in line
    assert "say --sft-tokenizer-prompt-format default" in line


def test_a_format_that_megatron_has_not(folder):
    (line,) = misfits(folder, sft_tokenizer_prompt_format="chatml")
    assert line.endswith("Megatron has nemotron-h-aligned, nemotron-nano-v2, identity and default")


def test_megatron_has_the_formats_that_are_known(folder):
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

    for prompt_format in (*sft.MARKS, "default"):
        SFTTokenizer(str(folder), prompt_format)


def test_a_tokenizer_without_a_chat_template_or_without_a_token_to_fill_with(tmp_path):
    from transformers import AutoTokenizer

    EXAMPLE["write_tokenizer"](tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    (line,) = misfits(tmp_path, sft_tokenizer_prompt_format="default")
    assert "neither a padding nor an end token" in line
    (tmp_path / "chat_template.jinja").unlink()
    (line,) = misfits(tmp_path, sft_tokenizer_prompt_format="default")
    assert "has none (chat_template.jinja)" in line


def test_it_is_said_where_ends_of_answers_are_out_of_the_loss(folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for pad in (None, tokenizer.eos_token):
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path)
        said = unlearned_end(arguments(tmp_path, sft_tokenizer_prompt_format="default"))
        assert "filled with <SPECIAL_12>, which is then out of the loss" in said
    assert unlearned_end(arguments(folder, sft_tokenizer_prompt_format="default")) == ""
    assert unlearned_end(arguments(tmp_path)) == ""  # Megatron's own formats fill with other tokens


GOOD = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": []}]}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no line"),
        ("\n\n", "it has no line"),
        (GOOD + '{"messages": [{"role"', "line 2: column 22: it is no JSON"),
        ('{"text": "Hi"}\n', "line 1: messages is missing"),
        (GOOD + '{"messages": []}\n', "line 2: messages is empty"),
        ('{"messages": [{"content": "Hi"}]}\n', "line 1: messages[0].role is missing"),
    ],
)
def test_a_file_without_conversations_is_named_with_its_line(tmp_path, text, said):
    good, file = tmp_path / "good.jsonl", tmp_path / "data.jsonl"
    good.write_text(GOOD)
    file.write_text(text)
    argv = ["--sft", "--train-data-path", "0.5", str(good), "0.5", str(file)]
    with pytest.raises(ConfigError) as raised:
        check_data_paths(argv)
    assert str(raised.value).startswith(f"--train-data-path {file}: {said}")
    check_data_paths(argv[1:])
    check_data_paths(argv[:4])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mock_data": True}, "--mock-data has no conversations"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2: "),
        ({"objective": "masked_lm"}, "--objective masked_lm: "),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "conversations are read by SFTTokenizer"),
        ({"tokenizer_model": None}, "--tokenizer-model: name the folder"),
        ({"tokenizer_model": "/nowhere"}, "--tokenizer-model /nowhere: "),
    ],
)
def test_flags_that_do_not_go_with_it(folder, changes, said):
    (line,) = misfits(folder, **changes)
    assert said in line
    assert misfits(folder, **changes, sft=False) == []


def test_the_package_that_reads_the_data(folder, monkeypatch):
    monkeypatch.setattr(sft, "find_spec", lambda name: None)
    (line,) = misfits(folder)
    assert "pip install 'megasched[sft]'" in line


def _splits(**changes):
    none = dict.fromkeys(("split", "train_data_path", "valid_data_path", "test_data_path"))
    return Namespace(**{**none, "sft": True, "eval_iters": 0, "full_validation": False, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train_data_path": ["a"], "split": "90,10,0", "sft": False},
            "--split 90,10,0 is of --data-path: leave it out, as there is --train-data-path",
        ),
        (
            {"train_data_path": ["a"], "valid_data_path": ["b"], "test_data_path": ["c"]},
            "--valid-data-path and --test-data-path with --eval-iters 0: a file of conversations of which the run "
            "takes none ends it; leave it out, or give --eval-iters 1",
        ),
    ],
)
def test_files_that_megatron_ends_at_are_refused_by_their_flags(changes, said):
    with pytest.raises(ConfigError) as caught:
        refuse_splits(_splits(**changes))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "changes",
    [
        {"train_data_path": ["a"]},
        {"train_data_path": ["a"], "valid_data_path": ["b"], "eval_iters": 1},
        {"train_data_path": ["a"], "valid_data_path": ["b"], "full_validation": True},
        {"train_data_path": ["a"], "valid_data_path": ["b"], "sft": False},
        {"split": "90,10,0"},
    ],
)
def test_files_that_megatron_reads_are_taken(changes):
    refuse_splits(_splits(**changes))
