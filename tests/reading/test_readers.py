"""What each reader says of a file that it can't read: the file, the place, and what was expected."""

from __future__ import annotations

import pytest

from megasched.errors import CheckpointError, ConfigError
from megasched.reading.files import Expected, printable, read_bytes, read_text
from megasched.reading.forms import misfit
from megasched.reading.idx_file import read_idx
from megasched.reading.json_file import parse_json, read_json
from megasched.reading.toml_file import read_toml
from tests.fuzz.readers import READERS

A_FORM = {"name": str, "sizes?": [int], "parts?": {str: {"share": float}}}
KIND = Expected("a list of parts", CheckpointError, flag="--parts", most=1000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf{}", "line 1: it begins with a byte order mark (BOM); save it as UTF-8 without"),
        (b'{"name":\n"\xe9"}', "line 2: byte 10 is 0xe9, which is not UTF-8"),
        (b'{"name":\n 1 2}', "line 2, column 4: it is no JSON: Expecting ',' delimiter"),
        (b"[" * 200 + b"]" * 200, "nested more than 100 levels deep"),
        (b'{"name": "x",\n "sizes": [1, 12345678901234567890]}', "line 2: a whole number of 20 digits"),
        (b'{"name": "\\ud800"}', "name: '\\ud800' has half a surrogate pair in it"),
        (b"[]", "the whole is a list, an object is due"),
        (b"{}", "name is missing, text is due"),
        (b'{"name": "x", "sizes": [1, true]}', "sizes[1] is True, a whole number is due"),
        (b'{"name": "x", "parts": {"a": {"share": NaN}}}', "parts.a.share is nan, a number is due"),
        (b'{"name": "x"}' + b" " * 1000, "it has more than 1000 bytes, too many for such a file"),
    ],
)
def test_json_that_is_none(tmp_path, content, message):
    path = tmp_path / "parts.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json(path, KIND, A_FORM)
    assert str(caught.value).startswith(f"--parts {path}: ")
    assert str(caught.value).endswith("; expected a list of parts")
    assert message in str(caught.value)


def test_json_of_the_form_is_read(tmp_path):
    path = tmp_path / "parts.json"
    path.write_text('{"name": "é", "parts": {"a": {"share": 1}}, "other": [null]}')
    assert read_json(path, KIND, A_FORM)["parts"] == {"a": {"share": 1}}
    assert misfit({"a": None}, {"a": str | None}) == ""
    with pytest.raises(ValueError, match="named twice: a"):
        parse_json('{"a": 1, "a": 2}', unique=True)


def test_toml_that_is_none(tmp_path):
    path = tmp_path / "gpu.toml"
    path.write_text("a = [\n1,\n?")
    with pytest.raises(ConfigError, match=r"gpu\.toml: .*line 3, column 1.*; expected a GPU"):
        read_toml(path, Expected("a GPU"))
    path.write_text("a = " + "[" * 5000)
    with pytest.raises(ConfigError, match="nested too deep"):
        read_toml(path, Expected("a GPU"))


def test_names_that_no_file_can_have():
    for name in ("a" * 5000, "a\0b", "\udc80"):
        with pytest.raises(ConfigError, match="expected a word") as caught:
            read_text(name, Expected("a word"))
        str(caught.value).encode()
    assert printable("a\udc80\0") == "a\\udc80\\x00"


def test_what_the_kernel_makes_up_has_no_size():
    assert read_bytes("/proc/self/cmdline", Expected("words"))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0, "it begins with b'\\x00MIDIDX"),
        (9, 2, "version 2, 1 is due"),
        (17, 9, "the dtype of tokens has code 9, one from 1 to 8 is due"),
        (18, 200, "200 sequences and 3 ends of documents take 2458 bytes, the file has 94"),
        (34, 99, "sequence 0: 99 tokens of 2 bytes at byte 0; the .bin file has 24 bytes"),
        (46, 1, "sequence 0: 5 tokens of 2 bytes at byte 1"),
        (78, 5, "document 1 ends before it begins"),
        (86, 2, "the documents do not span the 3 sequences: [0] to [2]"),
    ],
)
def test_a_damaged_index_of_a_data_set(tmp_path, at, value, message):
    READERS["idx"].make(tmp_path)
    path = tmp_path / "tokens.idx"
    found = read_idx(path, 24)
    assert (found.dtype, found.lengths.tolist(), found.documents.tolist()) == ("uint16", [5, 3, 4], [0, 1, 3])
    assert [found.document_at(byte) for byte in (0, 9, 10, 23)] == [0, 0, 1, 1]
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_idx(path, 24)
    assert message in str(caught.value)
