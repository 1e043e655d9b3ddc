"""The corpus: same files, same order, same tokens, and Megatron reads them back."""

import numpy
import pytest

from megasched.errors import ConfigError
from megasched.launch.quickstart.corpus import EOD, prepare_corpus, source_files, stdlib_folder, write_tokenizer

FILES = {
    "alpha.py": b"import os\n",
    "pkg/beta.py": "name = 'ä€'\n".encode(),
    "pkg/empty.py": b"",
    "pkg/latin.py": "# ä\n".encode("latin-1"),
    "pkg/notes.txt": b"not source",
    "test/test_alpha.py": b"assert True\n",
    "pkg/tests/test_beta.py": b"assert True\n",
    "site-packages/other.py": b"pass\n",
}


@pytest.fixture
def sources(tmp_path):
    root = tmp_path / "lib"
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def read_documents(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [numpy.array(dataset[index]) for index in range(len(dataset))]


def test_round_trip_through_the_indexed_dataset(sources, tmp_path):
    corpus = prepare_corpus(tmp_path / "data", sources)
    documents = read_documents(corpus.prefix)
    assert {bytes(ids[:-1].astype(numpy.uint8)) for ids in documents} == {
        FILES["alpha.py"],
        FILES["pkg/beta.py"],
    }
    assert [ids[-1] for ids in documents] == [EOD, EOD]
    assert all(ids.dtype == numpy.uint16 and EOD not in ids[:-1] for ids in documents)
    assert corpus.documents == 2
    assert corpus.tokens == len(FILES["alpha.py"]) + len(FILES["pkg/beta.py"]) + 2


def test_two_corpora_of_the_same_files_are_the_same_bytes(sources, tmp_path):
    first = prepare_corpus(tmp_path / "one", sources)
    second = prepare_corpus(tmp_path / "two", sources)
    for name in ("tokens.bin", "tokens.idx"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_the_second_run_reuses_the_first_ones_files(sources, tmp_path):
    first = prepare_corpus(tmp_path / "data", sources)
    written = (first.folder / "tokens.bin").stat().st_mtime_ns
    assert prepare_corpus(tmp_path / "data", sources) == first
    assert (first.folder / "tokens.bin").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "data").iterdir()] == [first.folder.name]


def test_other_sources_make_another_corpus(sources, tmp_path):
    first = prepare_corpus(tmp_path / "data", sources)
    (sources / "gamma.py").write_text("x = 1\n")
    second = prepare_corpus(tmp_path / "data", sources)
    assert second.folder != first.folder
    assert second.documents == first.documents + 1


def test_an_order_that_does_not_depend_on_the_place(sources, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    sources_there = sources.rename(elsewhere)
    order = [path.relative_to(elsewhere).as_posix() for path in source_files(sources_there)]
    assert order == ["alpha.py", "pkg/beta.py", "pkg/empty.py", "pkg/latin.py"]


def test_the_standard_library_is_large_enough_and_holds_no_tests():
    files = source_files(stdlib_folder())
    assert sum(path.stat().st_size for path in files) > 5_000_000
    assert not [path for path in files if {"test", "site-packages"}.intersection(path.parts[-4:-1])]


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no Python source"):
        prepare_corpus(tmp_path / "data", tmp_path)


def test_the_tokenizer_agrees_with_the_corpus(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    every_byte = bytes(range(128)).decode() + "äöü€漢字🙂\n\t  def f():  return"
    ids = tokenizer.encode(every_byte)
    assert ids == list(every_byte.encode())
    assert tokenizer.decode(ids) == every_byte
    assert (len(tokenizer), tokenizer.eos_token_id) == (257, EOD)


def test_megatron_builds_the_same_tokenizer(tmp_path):
    from megatron.core.tokenizers import MegatronTokenizer

    write_tokenizer(tmp_path)
    tokenizer = MegatronTokenizer.from_pretrained(str(tmp_path), metadata_path={"library": "huggingface"})
    assert tokenizer.tokenize("aé") == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, EOD)
