"""The matrix as people see it, and the page that is made of it."""

from pathlib import Path

import pytest

from megasched.cli.check import archs
from megasched.cli.main import main
from megasched.cli.output import report_console as console
from megasched.errors import ConfigError
from megasched.trainer.evidence.matrix import LAYOUT_NAMES, load_matrix
from megasched.verify.matrix import check_here

DOCS = Path(__file__).parents[2] / "docs"
GOOD = {"loss": 1e-8, "logits": 2e-7, "gradient": 3e-7, "grad_norm": 0.0}
FUSED = {"tied": True, "fused": ["joint", "block"], "class": "FineForCausalLM"}
LONG = "a_model_with_a_name_longer_than_most_columns_are"
OLDER = {"transformers": "5.23.0"}
MATRIX = {
    "versions": {"transformers": "5.24.0"},
    "older": {"half": OLDER, "none": OLDER},
    "types": {
        "good": {
            "facts": {"adapter": False, "plan": True, "inferred": ["h.0-3.up.weight"], "whole": {}, **FUSED},
            "tp2": {"verdict": "equal", "errors": GOOD, "why": ""},
        },
        "half": {
            "facts": {"adapter": False, "plan": False, "inferred": [], "whole": {"h.0-3.qkv": "no pair"}, **FUSED},
            "tp2": {"verdict": "wrong", "errors": {**GOOD, "loss": 0.5}, "why": "loss differ"},
            "pp2": {
                "verdict": "refused",
                "errors": {},
                "why": "no |",
            },
        },
        "none": {"model": {"verdict": "failed", "errors": {}, "why": "ImportError: timm"}},
    },
}


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.setattr(archs, "load_matrix", lambda: MATRIX)


def test_the_page_is_made_of_the_data():
    """Stale? Make it again: the command is ``archs.COMMAND``."""
    assert (DOCS / "architectures.md").read_text() == archs.markdown(load_matrix())


def test_the_page_says_yes_no_and_why_not():
    page = archs.markdown(MATRIX)
    assert "3 architectures; equal to HF within 1e-5: tp2 1 of 2, pp2 0 of 1. transformers 5.24.0.\n" in page
    assert "\n\n2 of them were checked with transformers 5.23.0.\n\n" in page
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows["| `good`"].startswith("| `good` | yes |")
    assert rows["| `good`"].endswith("| 5.24.0 | yes | joint, block | plan and inferred | FineForCausalLM |")
    assert "WRONG" in rows["| `half`"]
    assert "refused" in rows["| `half`"]
    assert rows["| `half`"].endswith("| 5.23.0 | yes | joint, block | whole | FineForCausalLM |")
    assert rows["| `none`"].count("no model") == len(LAYOUT_NAMES)
    assert "- `half`, tp2: loss differ\n- `half`, pp2: no /\n- `none`, model: ImportError: timm\n" in page


def test_one_architecture(matrix, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["archs", "half"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "WRONG  loss 5e-01, logits 2e-07, gradient 3e-07, grad_norm 0e+00" in out
    assert "whole: h.0-3.qkv: no pair" in out
    with pytest.raises(SystemExit) as ended:
        main(["archs", "good"])
    assert ended.value.code == 0


def test_the_list_has_a_line_for_each_and_cuts_no_name(monkeypatch, capsys):
    types = {**MATRIX["types"], LONG: MATRIX["types"]["good"]}
    monkeypatch.setattr(archs, "load_matrix", lambda: {**MATRIX, "types": types})
    monkeypatch.delenv("COLUMNS", raising=False)
    main_ended(["archs"], 0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["architecture", *types, "4", "2"]
    assert [line.split()[-1] for line in lines[1:3]] == ["FineForCausalLM"] * 2
    assert "…" not in "".join(lines)


def test_on_a_narrow_terminal_no_name_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(archs, "load_matrix", lambda: {**MATRIX, "types": {LONG: MATRIX["types"]["good"]}})
    main_ended(["archs"], 0)
    assert capsys.readouterr().out.splitlines()[1].startswith(LONG)


@pytest.mark.parametrize("name", ["hal", "HALF", "half"])
def test_a_name_is_found_by_a_part_of_it(matrix, capsys, name):
    main_ended(["archs", name], 1)
    assert "whole: h.0-3.qkv: no pair" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["FineForCausalLM", "finefor"])
def test_a_class_finds_all_that_have_it(matrix, capsys, name):
    main_ended(["archs", name], 0)
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert found == ["architecture", "good", "half", "2", "1"]


def test_a_class_finds_the_llama_of_the_real_matrix():
    assert "llama" in archs.find_types("LlamaForCausalLM", load_matrix()["types"])
    assert archs.find_types("llama", load_matrix()["types"]) == ["llama"]


def test_brackets_of_a_reason_are_no_markup(capsys):
    results = {"tp2": {"verdict": "failed", "errors": {}, "why": "of [b, s, h] in [/usr/lib]"}}
    archs.print_architecture("other", {**results, "facts": {"why": "x", "whole": {"h": "a [row] too"}}}, console())
    archs.print_architecture("none", {"model": {"verdict": "failed", "errors": {}, "why": "no [/x]"}}, console())
    told = capsys.readouterr().out
    assert [words in told for words in ("of [b, s, h] in [/usr/lib]", "h: a [row] too", "no [/x]")] == [True] * 3


@pytest.mark.parametrize("words", [["half", "--markdown"], ["--markdown", "--json"]])
def test_the_page_is_of_all_and_no_json(matrix, capsys, words):
    main_ended(["archs", *words], 2)
    assert "--markdown" in capsys.readouterr().err


def test_what_is_not_there(matrix):
    check = r"`.*megasched verify --hf-model DIR --certificate FILE` checks .* --require-certificate FILE"
    with pytest.raises(ConfigError, match=f"no recorded check of 'OtherForCausalLM'.*\n{check}"):
        archs.find_types("OtherForCausalLM", {})
    with pytest.raises(ConfigError, match="did you mean good") as refused:
        archs.find_types("goood", MATRIX["types"])
    assert "--run" not in str(refused.value)  # of no type that transformers has
    with pytest.raises(ConfigError, match=r"`.*megasched archs llama --run` checks a small model"):
        archs.find_types("llama", MATRIX["types"])
    with pytest.raises(ConfigError, match="no causal language model 'llamma'; did you mean llama"):
        check_here("llamma")


def main_ended(words, code):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code
