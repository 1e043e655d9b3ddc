"""Brings files from outside of docs/ into the site: README as its home, other pages, and what pages refer to.

A link to a file or a folder of the checkout leads to a copy of it in the site, so that nothing depends on a host.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Pages outside of docs/ -> where they stand in the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\(|srcset=\"|src=\")(?!https?:|#|mailto:)([^)#\"\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, and each file that a page links to."""
    pages = {uri: ROOT / name for name, uri in PAGES.items()}
    for file in files.documentation_pages():
        pages[file.src_uri] = Path(str(file.abs_src_path))
    for uri, path in pages.items():
        text = path.read_text()
        if path.parent == ROOT:
            files.append(File.generated(config, uri, content=_moved(text, path, uri)))
        for _, target in LINK.findall(text):
            own = _in_checkout(path, target)
            if _is_outside(own) and (ROOT / own).exists() and files.get_file_from_path(_copy_of(own)) is None:
                files.append(File.generated(config, _copy_of(own), content=_content(ROOT / own)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links out of docs/ to the copies."""
    if page.file.src_uri in PAGES.values():  # made by ``on_files``
        return markdown
    return _moved(markdown, ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def _moved(text: str, path: Path, uri: str) -> str:
    """Returns a page with its links as they lead from its place in the site."""

    def moved(match: re.Match[str]) -> str:
        own = _in_checkout(path, match[2])
        if own in PAGES:
            target = PAGES[own]
        elif own.startswith("docs/"):
            target = own.removeprefix("docs/")
        else:
            target = _copy_of(own)
        return f"{match[1]}{relpath(target, str(PurePosixPath(uri).parent))}"

    return LINK.sub(moved, text)


def _in_checkout(page: Path, target: str) -> str:
    """Returns the path of a link's target from the root of the checkout."""
    folder = page.parent.relative_to(ROOT).as_posix()
    return normpath(f"{folder}/{target}")


def _is_outside(own: str) -> bool:
    return own not in PAGES and not own.startswith("docs/")


def _copy_of(own: str) -> str:
    """Returns where a file of the checkout stands in the site; a folder is the list of what is in it."""
    return f"checkout/{own}.txt"


def _content(path: Path) -> bytes | str:
    """Returns what is in a file, or the list of what is in a folder."""
    if path.is_file():
        return path.read_bytes()
    names = sorted(one.name for one in path.iterdir() if not one.name.startswith(("_", ".")))
    return "\n".join([f"{path.relative_to(ROOT).as_posix()}/", *(f"  {name}" for name in names), ""])
