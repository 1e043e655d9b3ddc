"""What is to be seen of the house in its source: who imports whom, how long things are, and what they are called.

Files are read, not run, so that imports inside of functions and behind ``TYPE_CHECKING`` count, too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.house.floors import (
    ALLOWED,
    FOLDERS,
    FORBIDDEN,
    HEART,
    LATE,
    MOST,
    NO_SENTENCE,
    SHELVES,
    WITHOUT_MEGATRON,
    floor_of,
)

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Arrow:
    """One import.

    Attributes:
        path: of the file that imports.
        target: the module, e.g. ``megasched.errors``.
        to: path of that module's file; empty for what is not ours.
        late: it stands inside of a function.
    """

    path: str
    target: str
    to: str
    late: bool


@cache
def sources() -> dict[str, ast.Module]:
    """Path from the top of the repository -> source of each file of the product."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def arrows() -> tuple[Arrow, ...]:
    """All imports of the product."""
    return tuple(arrow for path, tree in sources().items() for arrow in _arrows_of(path, tree))


def _arrows_of(path: str, tree: ast.AST, *, late: bool = False) -> Iterator[Arrow]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Arrow(path, name.name, _file_of(name.name), late)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                target = inner if _file_of(inner) else node.module
                yield Arrow(path, target, _file_of(target), late)
        inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _arrows_of(path, node, late=inside)


def _file_of(module: str) -> str:
    stem = module.replace(".", "/")
    for folder in FOLDERS[1:]:  # which stands beside the package, and is imported as a part of it
        stem = stem.removeprefix("megasched/") if f"{stem}/".startswith(f"megasched/{folder}/") else stem
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in _paths()), "")


@cache
def _paths() -> frozenset[str]:
    return frozenset(sources())


def upward() -> list[str]:
    """Imports of a file on a floor that its own may not import."""
    found = set()
    for arrow in arrows():
        if not arrow.to or arrow.to.endswith("__init__.py"):
            continue
        own, other = floor_of(arrow.path), floor_of(arrow.to)
        if other != own and other not in ALLOWED[own].split():
            found.add(f"{arrow.path} ({own}) -> {arrow.to} ({other})")
    return sorted(found)


def circles() -> list[str]:
    """Files that import each other, by whatever way."""
    graph: dict[str, set[str]] = {path: set() for path in sources()}
    for arrow in arrows():
        if arrow.to:
            graph[arrow.path].add(arrow.to)
    return sorted(path for group in _strongly_connected(graph) if len(group) > 1 for path in group)


def _strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups in which each node is reached from each other (Kosaraju)."""
    order: list[str] = []
    _walk(graph, graph, order, set())
    back: dict[str, set[str]] = {node: set() for node in graph}
    for node, others in graph.items():
        for other in others:
            back[other].add(node)
    groups, seen = [], set[str]()
    for node in reversed(order):
        if node not in seen:
            group: list[str] = []
            _walk(back, [node], group, seen)
            groups.append(group)
    return groups


def _walk(graph: dict[str, set[str]], starts: object, order: list[str], seen: set[str]) -> None:
    """Appends nodes in the order in which a search in depth leaves them."""
    for start in starts:  # type: ignore[attr-defined]
        stack = [(start, iter(sorted(graph[start])))] if start not in seen else []
        seen.add(start)
        while stack:
            node, others = stack[-1]
            following = next((other for other in others if other not in seen), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(graph[following]))))


def megatron() -> list[str]:
    """Files that import Megatron on a floor that does without."""
    names = ("megatron", "transformer_engine")
    return sorted(
        {
            f"{arrow.path} ({floor_of(arrow.path)}) imports {arrow.target.partition('.')[0]}"
            for arrow in arrows()
            if arrow.target.partition(".")[0] in names and floor_of(arrow.path) in WITHOUT_MEGATRON
        }
    )


def late() -> list[str]:
    """Imports of our own inside of functions for which the table of floors has no reason."""
    return sorted(imported_late() - LATE.keys())


def imported_late() -> set[str]:
    """``path: target`` of each import of our own inside of a function."""
    return {f"{arrow.path}: {arrow.to}" for arrow in arrows() if arrow.late and arrow.to}


def long_files() -> list[str]:
    """Files of too many lines."""
    most = MOST["lines of a file"]
    return [path for path in sources() if len((ROOT / path).read_text().splitlines()) > most]


def long_functions() -> list[str]:
    """Functions of too many lines."""
    found = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found += [f"{path}: {node.name}"] if lines > MOST["lines of a function"] else []
    return sorted(found)


def full_folders() -> list[str]:
    """Folders of too many files; an ``__init__.py`` without code is none."""
    files = Counter(str(Path(path).parent) for path, tree in sources().items() if _has_code(path, tree))
    most = MOST["files of a folder"]
    return sorted(folder for folder, count in files.items() if count > most and folder not in SHELVES)


def _has_code(path: str, tree: ast.Module) -> bool:
    return not path.endswith("__init__.py") or len(tree.body) > 1


def shared_names() -> list[str]:
    """Class names of the heart that stand for several classes."""
    homes = defaultdict(list)
    for path, tree in _heart():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    return sorted(f"{name}: {', '.join(paths)}" for name, paths in homes.items() if len(paths) > 1)


def forbidden_words() -> list[str]:
    """Names of the heart's files, classes and public functions that have a word which says nothing."""
    found = set()
    for path, tree in _heart():
        names = {Path(path).stem}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                names.add(node.name)
        found |= {f"{path}: {name}" for name in names if not FORBIDDEN.isdisjoint(_words(name))}
    return sorted(found)


def fragments() -> list[str]:
    """Docstrings whose first line is no sentence that begins with a verb."""
    found = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and text.split()[0] in NO_SENTENCE:
                    found.append(f"{path}: {getattr(node, 'name', '(module)')}: {text.splitlines()[0]}")
    return sorted(found)


def _words(name: str) -> set[str]:
    """Its words, each without the ending of a plural."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    return {form for word in words for form in (word, word.removesuffix("s"))}


def _heart() -> Iterator[tuple[str, ast.Module]]:
    for path, tree in sources().items():
        if floor_of(path) in HEART:
            yield path, tree


def lines() -> int:
    """Of the whole product."""
    return sum(len((ROOT / path).read_text().splitlines()) for path in sources())


SURVEYS = {
    "upward": upward,
    "circles": circles,
    "megatron": megatron,
    "late": late,
    "long_files": long_files,
    "long_functions": long_functions,
    "full_folders": full_folders,
    "shared_names": shared_names,
    "forbidden_words": forbidden_words,
    "fragments": fragments,
}
