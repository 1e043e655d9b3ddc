"""What examples/families/make.py makes, and its text as a corpus."""

from __future__ import annotations

import runpy
from contextlib import nullcontext
from pathlib import Path

from megasched.data.tokens import write_tokens

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "families" / "make.py"
MAKE = runpy.run_path(str(SCRIPT))


def write_corpus(folder: Path) -> str:
    """Of the tokenizer in the folder; returns the prefix for ``--data-path``."""
    MAKE["write_text"](folder)
    quiet = nullcontext(lambda size: None)
    made = write_tokens(
        [folder / "text.jsonl"], folder / "corpus", str(folder), key="sentences", progress=lambda size: quiet
    )
    return made.prefix
