"""Dumps of what is decided are told apart by what they say alone."""

from __future__ import annotations

import json

import pytest

from tests.house import dump


def test_two_dumps_of_one_commit_are_equal_and_whole(tmp_path, capsys):
    files = [str(tmp_path / f"{number}.json.xz") for number in range(2)]
    for file in files:
        assert dump.main([file, "--types", "gpt2", "--layouts", "tp2-pp2", "ep2"]) == 0
    assert dump.main(["--compare", *files]) == 0
    made = dump._read(files[0])
    assert made["gpt2 ep2"].keys() == {"refused"}
    decided = made["gpt2 tp2-pp2"]
    assert decided["cuts"]["transformer.h.0.mlp.c_fc"] == "column"
    assert decided["placements"]["transformer.h.0.mlp.c_fc.weight"]["local shape"] == [128, 64]
    assert decided["stages"]["layers"] == [2, 2]
    assert len(decided["flops"]["layers"]) == decided["layers"]["count"] == 4
    assert decided["ties"] == {"lm_head.weight": "transformer.wte.weight"}
    assert "0x" not in json.dumps(decided)


def test_what_differs_is_told_by_its_place(tmp_path, capsys):
    before = {"llama tp2": {"cuts": {"a": "row", "b": "column"}}, "gpt2 tp2": {}}
    after = {"llama tp2": {"cuts": {"a": "column"}}, "gpt2 tp2": {}}
    assert list(dump.differences(before, after)) == [
        'llama tp2 / cuts / a: "row" is now "column"',
        'llama tp2 / cuts / b: "column" is now "(nothing)"',
    ]


@pytest.mark.parametrize(
    ("value", "plain"),
    [({"b": 1, "a": (2,)}, [["a", [2]], ["b", 1]]), ({3, 1}, ["1", "3"]), ([None, 1.5], [None, 1.5])],
)
def test_values_are_told_without_names_of_ours(value, plain):
    assert dump._plain(value) == plain
