"""Text as tokens: what Megatron reads is what its own tokenizer makes of it, and bad input writes nothing."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megasched.data import tokens
from megasched.errors import ConfigError
from megasched.launch.quickstart.corpus import write_tokenizer

TEXTS = ["The first one.", "Ein zweites, mit \u00fc und \u4e16\u754c \U0001f600.", "x", "3 < 4\n\n  and\ttabs"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of a tokenizer of bytes, and of one of words that adds tokens to each text as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizers")
    write_tokenizer(folder / "bytes")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "first": 3, "one": 4}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    wrapped.save_pretrained(folder / "bert")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    wrapped.save_pretrained(folder / "endless")
    return folder


def of_megatron(folder):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    unset = ("chat_template", "vocab_file", "merge_file", "special_tokens", "metadata_path")
    given_ = dict.fromkeys(unset) | {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    off = (
        "tokenizer_hf_no_use_fast",
        "trust_remote_code",
        "tokenizer_hf_no_include_special_tokens",
        "pad_vocab_size",
    )
    return build_tokenizer(Namespace(**given_, **dict.fromkeys(off, False)))


def write(folder, lines, tokenizer, **options):
    file = folder / "corpus.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    options = {"progress": lambda size: nullcontext(lambda count: None), **options}
    return tokens.write_tokens([file], folder / "made" / "corpus", str(tokenizer), **options)


def read(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = IndexedDataset(str(prefix))
    return [found[index].tolist() for index in range(len(found))], found


@pytest.mark.parametrize("name", ["bytes", "bert"])
def test_documents_are_what_megatrons_tokenizer_makes_of_them(tokenizers, tmp_path, name, monkeypatch):
    monkeypatch.setattr(tokens, "AT_ONCE", 40)  # several batches
    made = write(tmp_path, [{"text": text, "n": 1} for text in TEXTS], tokenizers / name)
    theirs = of_megatron(tokenizers / name)
    wanted = [[*theirs.tokenize(text), theirs.eod] for text in TEXTS]
    found, dataset = read(made.prefix)
    assert found == wanted
    assert dataset.index.dtype == np.uint16
    assert dataset.document_indices.tolist() == list(range(len(TEXTS) + 1))
    assert (made.documents, made.tokens, made.empty) == (len(TEXTS), sum(map(len, wanted)), 0)
    assert made.sentences == 0
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["corpus.bin", "corpus.idx"]


@pytest.mark.parametrize("at_once", [1, 8 << 20])
def test_sentences_are_items_of_a_document_without_more_tokens(tokenizers, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(tokens, "AT_ONCE", at_once)
    documents = [["first one", "", "one"], [], ["   "], ["one first"]]
    made = write(tmp_path, [{"text": sentences} for sentences in documents], tokenizers / "bert")
    found, dataset = read(made.prefix)
    assert found == [[3, 4], [4], [4, 3]]
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert (made.documents, made.sentences, made.tokens, made.empty) == (2, 3, 5, 2)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1),
    size=st.integers(1, 200),
)
def test_no_text_is_lost_or_joined_whatever_it_holds(tokenizers, tmp_path, texts, size):
    options = {"force": True, "key": "body"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "AT_ONCE", size)
        if not any(texts):
            with pytest.raises(ConfigError, match="no text in any line"):
                write(tmp_path, [{"body": text} for text in texts], tokenizers / "bytes", **options)
            return
        made = write(tmp_path, [{"body": text} for text in texts], tokenizers / "bytes", **options)
    found, _ = read(made.prefix)
    assert [bytes(ids[:-1]).decode() for ids in found] == [text for text in texts if text]
    assert {ids[-1] for ids in found} == {256}
    assert made.empty == texts.count("")


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([{"text": "a"}, b"{"], {}, r"corpus\.jsonl: line 2: column 2: it is no JSON: .*expected JSON lines"),
        ([{"text": "a"}, {"body": "b"}], {}, r"corpus\.jsonl: line 2: text is missing, text or a list is due"),
        ([{"text": 3}], {"key": "text"}, r"line 1: text is 3, text or a list is due"),
        ([{"text": ["a", 3]}], {}, r"line 1: text\[1\] is 3, text is due"),
        ([{"text": "a"}, {"text": ["b"]}], {}, r"line 2: a list of sentences, .* before it are texts"),
        ([{"text": []}, {"text": "b"}], {}, r"line 2: a text, where documents before it are lists of sentences"),
        ([b'{"text": "\xff"}'], {}, r"line 1: .*can't decode byte 0xff"),
        ([b'{"text": "\\ud800"}'], {}, r"line 1: text: .* has half a surrogate pair"),
        ([b'{"text": ["a", "\\ud800"]}'], {}, r"line 1: text\[1\]: .* has half a surrogate pair"),
        ([b'{"text": ' + b"9" * 5000 + b"}"], {}, r"line 1: text is inf, text or a list is due"),
        ([b"[3]"], {}, r"line 1: the whole is a list, an object is due"),
        ([b"[" * 100_000], {}, r"line 1: it is nested too deep"),
        ([{"other?": "a"}], {"key": "text?"}, r"line 1: text\? is missing, text or a list is due"),
        ([{"text": ""}, b"  "], {}, r"corpus\.jsonl: no text in any line"),
        ([b""], {}, r"corpus\.jsonl: no text in any line"),
    ],
)
def test_bad_lines_are_named_and_write_nothing(tokenizers, tmp_path, lines, options, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, lines, tokenizers / "bytes", **options)
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.parametrize(
    "other", [b"9" * 30, b"9" * 5000, b'"\\ud800"', b"NaN", b"1e999", b"[" * 200 + b"]" * 200, b'{"text": 3}']
)
def test_other_fields_are_left_alone(tokenizers, tmp_path, other):
    """Whatever they hold: a line is refused for its text alone, which has no say in what others have collected."""
    lines = [b'{"what?": "a", "\\ud800": 1, "other": ' + other + b"}"]
    made = write(tmp_path, lines, tokenizers / "bytes", key="what?")
    assert read(made.prefix)[0] == [[97, 256]]


def test_what_is_there_already_stays(tokenizers, tmp_path):
    made = write(tmp_path, [{"text": "a"}], tokenizers / "bytes")
    with pytest.raises(ConfigError, match=r"corpus\.bin: it is there already; --force replaces it"):
        write(tmp_path, [{"text": "b"}], tokenizers / "bytes")
    with pytest.raises(ConfigError, match="line 2"):
        write(tmp_path, [{"text": "b"}, b"{"], tokenizers / "bytes", force=True)
    assert read(made.prefix)[0] == [[97, 256]]
    write(tmp_path, [{"text": "b"}], tokenizers / "bytes", force=True)
    assert read(made.prefix)[0] == [[98, 256]]


def test_a_folder_is_no_corpus(tokenizers, tmp_path):
    """What was meant to lie in it lay beside it."""
    (tmp_path / "made" / "corpus").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--output .*/corpus: it is a folder; .*/corpus/text$"):
        write(tmp_path, [{"text": "a"}], tokenizers / "bytes")


def test_no_index_speaks_of_the_tokens_of_another_corpus(tokenizers, tmp_path, monkeypatch):
    """Of a replacement that ends between its two files: the old index over new tokens would be read."""
    made = write(tmp_path, [{"text": "abc"}], tokenizers / "bytes")
    move = os.replace

    def killed(source, target):
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        move(source, target)

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [{"text": "another"}], tokenizers / "bytes", force=True)
    assert not os.path.exists(f"{made.prefix}.idx")


def test_a_tokenizer_must_have_an_end_and_be_there(tokenizers, tmp_path):
    with pytest.raises(ConfigError, match=r"endless: it has no end token, .*`eos_token`"):
        write(tmp_path, [{"text": "a"}], tokenizers / "endless")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*empty: no tokenizer: "):
        write(tmp_path, [{"text": "a"}], tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"--tokenizer-model mistyped: no such file or folder"):
        write(tmp_path, [{"text": "a"}], "mistyped")
    assert not (tmp_path / "made").exists()
