"""The matrix as people see it, and the page that is made of it."""

from pathlib import Path

import pytest

from megasched.cli.check import archs
from megasched.cli.main import main
from megasched.errors import ConfigError
from megasched.trainer.evidence.compatibility import load_matrix
from megasched.verify.matrix import LAYOUT_NAMES, check_here

DOCS = Path(__file__).parents[2] / "docs"
GOOD = {"loss": 1e-8, "logits": 2e-7, "gradient": 3e-7, "grad_norm": 0.0}
FUSED = {"tied": True, "fused": ["joint", "block"]}
MATRIX = {
    "versions": {"transformers": "5.24.0"},
    "older": {"half": {"transformers": "5.23.0"}, "none": {"transformers": "5.23.0"}},
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
    assert "\n\nWith transformers 5.23.0: half, none.\n\n" in page
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows["| `good`"].startswith("| `good` | yes |")
    assert rows["| `good`"].endswith("| yes | joint, block | plan and inferred |")
    assert "WRONG" in rows["| `half`"]
    assert "refused" in rows["| `half`"]
    assert rows["| `half`"].endswith("| whole |")
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


def test_what_is_not_there(matrix):
    with pytest.raises(ConfigError, match="the matrix holds nothing of 'gone'; `megasched archs gone --run`"):
        archs.known_results("gone")
    with pytest.raises(ConfigError, match="no causal language model 'llamma'; did you mean llama"):
        check_here("llamma")
