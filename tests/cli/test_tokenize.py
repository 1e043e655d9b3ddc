"""``megasched tokenize``: what it writes, prints, and says of bad input."""

import json

from megasched.launch.quickstart.corpus import write_tokenizer


def test_what_is_written_and_what_a_run_reads_it_with(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "a tokenizer")
    (tmp_path / "corpus.jsonl").write_text('{"text": "ab"}\n{"text": ""}\n{"text": "c"}\n')
    words = ("tokenize", "corpus.jsonl", "--tokenizer-model", "a tokenizer", "--output", "made/corpus")
    status, out, _ = run(*words)
    assert status == 0
    assert out.splitlines() == [
        "made/corpus: 2 documents, 5 tokens; 1 without text left out",
        "a run reads it with --tokenizer-type HuggingFaceTokenizer --tokenizer-model 'a tokenizer' "
        "--data-path made/corpus",
    ]
    assert (tmp_path / "made" / "corpus.idx").is_file()
    status, out, err = run(*words)
    assert (status, out) == (1, "")
    assert "made/corpus.bin: it is there already; --force replaces it" in err
    status, out, _ = run(*words, "--force", "--json")
    assert (status, json.loads(out)["tokens"]) == (0, 5)
    status, _, err = run(*words[:1], "absent.jsonl", *words[2:], "--force")
    assert status == 1
    assert "absent.jsonl: No such file or directory" in err
    name = "n" * 248  # for which there is room with .bin, and none with the name of a temporary folder
    status, _, err = run(*words[:-1], name)
    assert (status, err.splitlines()[-1]) == (1, f"megasched: error: {name}: File name too long")
