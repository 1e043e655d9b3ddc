"""Makes the index of errors from the code that raises them: each message, by what it is about, with its page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGE = "errors.md"
# Raised for users, or kept until all are known.
RAISED = {
    "ConfigError",
    "CheckpointError",
    "ScheduleError",
    "SaveError",
    "MegaschedError",
    "Problem",
    "Indivisible",
}
# What the folders of the code are about, and the page on it.
SUBJECTS = {
    "megasched/imports.py": ("Installation", "get-started.md"),
    "megasched/versions.py": ("Installation", "get-started.md"),
    "megasched/files.py": ("Files", "checkpoints.md#when-something-breaks"),
    "megasched/errors.py": ("What a schedule says", "schedules.md"),
    "megasched/reading": ("Files", "checkpoints.md#when-something-breaks"),
    "megasched/data": ("Data", "run.md#data"),
    "megasched/weights": ("Weights and checkpoints", "checkpoints.md"),
    "megasched/definition": ("The model and its config", "run.md#what-comes-from-the-hf-config"),
    "megasched/language": ("What a schedule says", "schedules.md"),
    "megasched/plan": ("What a schedule leads to", "schedules.md"),
    "megasched/analysis": ("What a schedule leads to", "schedules.md"),
    "megasched/graph": ("Operations in a graph", "graphs.md"),
    "megasched/lowering": ("Building the model", "schedules.md"),
    "megasched/layers": ("Building the model", "schedules.md"),
    "megasched/trainer": ("A run", "run.md"),
    "megasched/dialects": ("Other trainers", "deepspeed.md"),
    "megasched/verify": ("Verification", "verify.md"),
    "megasched/planner": ("The planner", "plan.md"),
    "megasched/tuner": ("Tuning", "tune.md"),
    "megasched/trace": ("Timelines", "timeline.md"),
    "megasched/cli": ("Commands", "commands.md"),
    "launch": ("Starting jobs", "launch.md"),
    "model_adapters": ("Adapters", "adapters.md"),
    "patches": ("Patches of Megatron", "internals.md#patches"),
}
HEAD = """# Errors

After this page you know what a message means and which page helps. Search it for words of yours: `…` stands for a
name, a number or a file. What megasched raises on purpose ends with status 2 and prints one block, the last of the
output: what is wrong, where, and what would be right.
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the page."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Returns the page: a section for each subject."""
    sections: dict[tuple[str, str], set[str]] = {}
    for folder, subject in SUBJECTS.items():
        for file in [ROOT / folder, *sorted((ROOT / folder).rglob("*.py"))]:
            if file.suffix != ".py":
                continue
            sections.setdefault(subject, set()).update(messages(file.read_text()))
    text = HEAD
    for (title, about), found in sections.items():
        rows = "\n".join(f"- {one}" for one in sorted(found, key=str.casefold))
        text += f"\n## {title}\n\nMore on [{about.partition('.')[0]}]({about}).\n\n{rows}\n"
    return text


def messages(source: str) -> Iterator[str]:
    """Yields each message that the code raises, and the remedy beside it."""
    for scope in ast.walk(ast.parse(source)):
        if isinstance(scope, (ast.FunctionDef, ast.Module)):
            named = {
                target.id: node.value
                for node in _own(scope)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in _own(scope):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED:
                    yield from _message(node, named)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function or a module that are in no function inside."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from _own(node)


def _message(call: ast.Call, named: dict[str, ast.AST]) -> Iterator[str]:
    what = _text(call.args[0], named) if call.args else ""
    remedy = next((_text(word.value, named) for word in call.keywords if word.arg == "remedy"), "")
    # Of a few words around values nothing could be found.
    if len(re.findall(r"[a-z]{3,}", what)) > 2:
        yield what + (f" *Remedy:* {remedy}" if remedy.strip("… ") else "")


def _text(node: ast.AST, named: dict[str, ast.AST]) -> str:
    """Returns a string as a page shows it, with an ellipsis for each value; empty for what is no string."""
    if isinstance(node, ast.Name):
        node = named.get(node.id, node)
    if isinstance(node, ast.JoinedStr):
        found = "".join(one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
    else:
        found = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return re.sub(r"([<>*_\[\]|\\])", r"\\\1", " ".join(found.split()))
