"""The tutorial as a notebook: its cells are the page's, whose commands tests/test_docs.py runs."""

from __future__ import annotations

import json
import sys

import pytest

from tests.pages.blocks import blocks, shows
from tests.pages.notebook import NOTEBOOK, PAGE, cells, run


@pytest.fixture
def held():
    return json.loads(NOTEBOOK.read_text())["cells"]


def printed(cell):
    return "".join(text for output in cell["outputs"] for text in output["text"]).rstrip("\n")


def within(block, text):
    """Whether a page's excerpt is in what was printed, beside what goes to standard error meanwhile."""
    return shows(f"...\n{block.shown.rstrip()}\n...\n", text)


def test_its_cells_are_those_of_the_page(held):
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in held]
    assert found == list(cells(PAGE.read_text())), "make notebook writes it anew"


def test_it_shows_what_the_page_shows(held):
    commands = [cell for cell in held if "".join(cell["source"]).startswith("!")]
    shown = [block for block in blocks(PAGE) if block.language == "console"]
    assert len(commands) == len(shown) == 6
    for cell, block in zip(commands, shown, strict=True):
        assert within(block, printed(cell)), block.command


@pytest.mark.slow
def test_its_cells_run(held, tmp_path):
    shown = iter([block for block in blocks(PAGE) if block.language == "console"])
    for cell in held:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            text = run(source, tmp_path)
            assert "Traceback" not in text, source
            assert bool(text) is bool(printed(cell)), source
            if source.startswith("!"):
                assert within(next(shown), text.rstrip("\n")), source


def test_a_cell_does_what_jupyter_does_with_it(tmp_path):
    assert run("%%writefile a.py\n# a.py\nx = 1", tmp_path) == "Writing a.py\n"
    assert (tmp_path / "a.py").read_text() == "# a.py\nx = 1\n"
    assert run("!cat a.py; pwd", tmp_path) == "# a.py\nx = 1\n.\n"
    assert run(f"!echo {sys.prefix}/bin", tmp_path) == ".venv/bin\n"
    assert run("%%bash\necho 1\necho 2 >&2", tmp_path) == "1\n2\n"
