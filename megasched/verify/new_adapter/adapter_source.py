"""Writes a proposed adapter as the text of a Python module, formatted as ruff formats it."""

from __future__ import annotations

from collections.abc import Mapping

from megasched.verify.new_adapter.proposal import Proposal

WIDTH = 88  # ruff's own default; the file goes into somebody else's package
_INDENT = "    "


def write_source(proposal: Proposal, *, transformers: str) -> str:
    """Writes the module: a docstring, an import and ``ADAPTER``, as files of ``model_adapters/families`` are.

    Args:
        proposal: the adapter as data.
        transformers: version that it was found with.
    """
    title = f'"""{proposal.model_type}: proposed by megasched new-adapter (transformers {transformers})."""'
    imports = "from megasched.model_adapters.registry import Adapter"
    return "\n".join([title, "", imports, "", adapter_expression(proposal), ""])


def adapter_expression(proposal: Proposal) -> str:
    """Writes ``ADAPTER = Adapter(...)``."""
    fields = [f"{_INDENT}model_types=({_text(proposal.model_type)},),"]
    fields += _mapping("roles", {glob: _text(role) for glob, role in proposal.roles.items()}, one_a_line=True)
    fields += _mapping("packed", {role: f"lambda config: {parts}" for role, parts in proposal.packed.items()})
    fields += _mapping(
        "local_attributes", {glob: _tuple(names) for glob, names in proposal.local_attributes.items()}
    )
    return "\n".join(["ADAPTER = Adapter(", *fields, ")"])


def _mapping(name: str, items: Mapping[str, str], *, one_a_line: bool = False) -> list[str]:
    """Writes a field that is a dict, on one line where it fits; nothing for an empty one."""
    if not items:
        return []
    entries = [f"{_text(key)}: {value}" for key, value in items.items()]
    line = f"{_INDENT}{name}={{{', '.join(entries)}}},"
    if len(line) <= WIDTH and not one_a_line:
        return [line]
    lines = [f"{_INDENT}{name}={{"]
    for entry in entries:
        lines += [f"{_INDENT * 2}{entry},"]
    return [*lines, f"{_INDENT}}},"]


def _tuple(names: tuple[str, ...]) -> str:
    return f"({', '.join(map(_text, names))}{',' if len(names) == 1 else ''})"


def _text(value: str) -> str:
    return f'"{value}"'
