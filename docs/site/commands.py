"""Makes the page of all commands from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from megasched.cli.main import app

PAGE = "commands.md"
HEAD = """# Commands

After this page you know what each command takes. A run of a training script has Megatron's flags and
[ours](run.md#flags).
`megasched pretrain_gpt.py --help` lists both.
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the page."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Returns the page: a section for each command, with its arguments and options."""
    sections = (one for name, command in _commands(typer.main.get_command(app)) for one in _section(name, command))
    return "\n".join([HEAD, *sections])


def _commands(group: Any, before: str = "megasched") -> Iterator[tuple[str, Any]]:
    """Yields the full name of each command and the command, those of groups in the place of the group."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}", command


def _section(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    yield f"## {name.removeprefix('megasched ')}\n\n{_paragraphs(command.help)}\n\n```text\n{usage}\n```\n"
    rows = [row for parameter in command.get_params(context) if (row := _row(parameter, context))]
    if rows:
        yield "| option | what it does |\n| --- | --- |\n" + "\n".join(rows) + "\n"


def _row(parameter: Any, context: Any) -> str:
    record = parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return ""
    names, told = (" ".join(one.split()).replace("|", "\\|") for one in record)
    return f"| `{names}` | {told} |"


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(one.split()) for one in (text or "").split("\n\n"))
