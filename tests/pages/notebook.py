"""Makes docs/tutorial.ipynb of docs/tutorial.md, and runs it: ``python -m tests.pages.notebook``.

The page is the one source: its text becomes text, a file that it names is written by ``%%writefile``, its commands
are cells of the shell. What the cells print is what they have printed here, so that the notebook reads without a
kernel, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.pages.blocks import FENCE, Block

DOCS = Path(__file__).parents[2] / "docs"
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
# Commands are those of the environment that the kernel runs in, and files go where nothing is overwritten.
FIRST = """\
import os
import sys
import tempfile

os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.chdir(tempfile.mkdtemp())
"""


def cells(page: str) -> Iterator[tuple[str, str]]:
    """Yields the type of each cell, as Jupyter calls it, and its source."""
    heading, _, rest = page.partition("\n\n")
    yield "markdown", heading
    yield "code", FIRST.strip()
    end = 0
    for match in FENCE.finditer(rest):
        yield from _text(rest[end : match.start()])
        block = Block(match[1], match[2].strip(), match[3], False)
        if block.language != "text":  # what a cell of the shell has printed on the page
            yield "code", _code(block)
        end = match.end()
    yield from _text(rest[end:])


def _text(text: str) -> Iterator[tuple[str, str]]:
    if text.strip():
        yield "markdown", text.strip()


def _code(block: Block) -> str:
    if block.name:
        return f"%%writefile {block.name}\n{block.text.rstrip()}"
    if block.language == "console":
        return f"!{block.command}"
    assert block.language == "bash"
    return f"%%bash\n{block.text.rstrip()}"


def run(source: str, folder: Path) -> str:
    """Does what Jupyter does with a cell of one of these forms, and returns what it prints."""
    if source.startswith("import "):
        return ""
    if source.startswith("%%writefile "):
        line, _, text = source.partition("\n")
        name = line.removeprefix("%%writefile ")
        (folder / name).write_text(text + "\n")
        return f"Writing {name}\n"
    command = source.removeprefix("%%bash\n").removeprefix("!")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # Whose machine it was is of no interest.
    printed = done.stdout.replace(str(folder), ".").replace(sys.prefix, ".venv")
    return re.sub(r" +$", "", printed, flags=re.MULTILINE)


def notebook(sources: list[tuple[str, str]], printed: list[str]) -> dict[str, Any]:
    """Returns it in Jupyter's format, version 4.5."""
    found: list[dict[str, Any]] = []
    for number, ((form, source), text) in enumerate(zip(sources, printed, strict=True)):
        cell = {"cell_type": form, "id": f"cell-{number}", "metadata": {}, "source": lines(source)}
        if form == "code":
            outputs = [{"name": "stdout", "output_type": "stream", "text": lines(text)}] if text else []
            cell |= {"execution_count": None, "outputs": outputs}
        found.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    sources = list(cells(PAGE.read_text()))
    with TemporaryDirectory() as folder:
        printed = [run(source, Path(folder).resolve()) if form == "code" else "" for form, source in sources]
    NOTEBOOK.write_text(json.dumps(notebook(sources, printed), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
