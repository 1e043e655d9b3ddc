"""Writes llms.txt beside the site's pages: every page with what it is for, as https://llmstxt.org has it."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

_FIRST: dict[str, tuple[str, str]] = {}  # address of a page -> its title and first paragraph


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Notes the first paragraph of a page."""
    found = re.search(r"<p>(.*?)</p>", html, re.DOTALL)
    text = unescape(re.sub(r"<[^>]+>", "", found[1])) if found else ""
    first = re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]
    _FIRST[page.url] = str(page.title), first
    return html


def on_post_build(config: Any) -> None:
    """Writes the file, in the order of the navigation."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for entry in config.nav:
        ((heading, pages),) = entry.items()
        lines += [f"## {heading}", ""]
        for one in pages if isinstance(pages, list) else [{heading: pages}]:
            ((name, source),) = one.items()
            address = source.removesuffix(".md") + ".html"
            lines.append(f"- [{name}]({address}): {_FIRST[address][1]}")
        lines.append("")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines))
