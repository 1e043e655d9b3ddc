"""Fenced blocks of the pages, and whether an excerpt of one is what a command prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```([a-z]*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, what else stands on the fence, its text, and how it came to stand there."""

    language: str
    info: str
    text: str
    follows: bool  # nothing but space between it and the block before

    @property
    def name(self) -> str:
        """The file it is, by ``title="name"`` on the fence or a first line ``# name.py``; empty without."""
        found = re.search(r'title="([\w./-]+)"', self.info) or re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else ""

    @property
    def command(self) -> str:
        """Of ``console``: what follows the prompt, over lines that end with a backslash."""
        return re.match(r"\$ ((?:.*\\\n)*.*)\n", self.text)[1]

    @property
    def shown(self) -> str:
        """Of ``console``: what is below the command."""
        return self.text.removeprefix(f"$ {self.command}\n")


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text(), [], -1
    for match in FENCE.finditer(text):
        follows = end >= 0 and not text[end : match.start()].strip()
        found.append(Block(match[1], match[2].strip(), match[3], follows))
        end = match.end()
    return found


def shows(shown: str, printed: str) -> bool:
    """Whether a page's excerpt is what was printed; ``...`` stands for anything."""
    # As a line of its own it stands for any number of lines, elsewhere for the rest of its line.
    lines = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(re.escape("..."), ".*") + r"\n"
        for line in shown.rstrip().splitlines()
    ]
    return re.fullmatch("".join(lines), printed + "\n") is not None
