"""``megasched archs``: the compatibility matrix, as tables for a terminal and for the documentation."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasched.compatibility import load_matrix
from megasched.errors import ConfigError
from megasched.verify.matrix import LAYOUT_NAMES

MARKS = {"equal": "yes", "wrong": "WRONG", "refused": "refused", "failed": "fails", "not applicable": "–"}
COLOURS = {"equal": "green", "wrong": "bold red", "refused": "yellow", "failed": "red", "not applicable": "dim"}
FINE = ("equal", "not applicable")
COMMAND = "megasched archs --markdown > docs/architectures.md"


def print_matrix(console: Console) -> None:
    """A row for each architecture, a column for each layout."""
    matrix = load_matrix()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("architecture", *LAYOUT_NAMES, "cut"):
        table.add_column(name)
    for model_type, results in matrix["types"].items():
        table.add_row(model_type, *(_cell(results, name) for name in LAYOUT_NAMES), _decided(results))
    console.print(table)
    console.print(Text(summary(matrix), "dim"))


def print_architecture(model_type: str, results: dict[str, Any], console: Console) -> None:
    """Everything that is known of one."""
    console.print(Text(model_type, "bold"), _decided(results))
    if "model" in results:
        console.print(f"  no small model of it can be made: {results['model']['why']}")
    for name in (name for name in LAYOUT_NAMES if name in results):
        outcome = results[name]
        console.print(Text.assemble(f"  {name:<10}", _cell(results, name), f"  {_numbers(outcome)}"))
        if outcome["why"]:
            console.print(f"    {outcome['why']}", style="dim")
    for parameter, reason in results.get("facts", {}).get("whole", {}).items():
        console.print(f"  whole: {parameter}: {reason}")


def known_results(model_type: str) -> dict[str, Any]:
    """What the matrix holds of an architecture.

    Raises:
        ConfigError: nothing.
    """
    types = load_matrix()["types"]
    if model_type not in types:
        raise ConfigError(
            f"the matrix holds nothing of {model_type!r}; `megasched archs {model_type} --run` checks it here"
        )
    return types[model_type]


def summary(matrix: dict[str, Any]) -> str:
    """How many architectures pass, by layout."""
    types = matrix["types"].values()
    counts = []
    for name in LAYOUT_NAMES:
        checked = [results[name]["verdict"] for results in types if name in results]
        checked = [verdict for verdict in checked if verdict != "not applicable"]
        if checked:
            counts.append(f"{name} {checked.count('equal')} of {len(checked)}")
    versions = ", ".join(f"{name} {version}" for name, version in matrix["versions"].items())
    return (
        f"{len(types)} architectures; equal to HF within 1e-5: {', '.join(counts) or 'none checked'}. {versions}."
    )


def markdown(matrix: dict[str, Any]) -> str:
    """The page ``docs/architectures.md``."""
    lines = [
        "# Architectures",
        "",
        f"Made by `{COMMAND}`",
        "from `megasched/compatibility.json`, which `make matrix` fills.",
        "",
        "Each architecture is built small (4 layers, hidden size 64, noise on every weight, multipliers away from",
        "1, windows that bite) and trained for one step by Megatron's own trainer, rehearsed on CPUs, in float32.",
        "*yes*: loss, logits, every gradient and the gradient norm equal those of the unscheduled HF model in one",
        "process within 1e-5. *cut* says what decided how its linears are sharded: HF's plan, what megasched",
        "inferred, or an adapter. `megasched archs NAME --run` does it again on your machine.",
        "",
        summary(matrix),
        "",
        f"| architecture | {' | '.join(LAYOUT_NAMES)} | cut |",
        f"| --- |{' --- |' * len(LAYOUT_NAMES)} --- |",
    ]
    for model_type, results in matrix["types"].items():
        cells = (_cell(results, name).plain for name in LAYOUT_NAMES)
        lines.append(f"| `{model_type}` | {' | '.join(cells)} | {_decided(results)} |")
    lines += ["", "## Why not", ""]
    for model_type, results in matrix["types"].items():
        reasons: dict[str, list[str]] = {}
        for name, outcome in results.items():
            if name != "facts" and outcome["verdict"] not in FINE:
                reasons.setdefault(_plain(outcome["why"]), []).append(name)
        for why, names in reasons.items():
            lines.append(f"- `{model_type}`, {', '.join(names)}: {why}")
    return "\n".join(lines) + "\n"


def _plain(why: str) -> str:
    """A reason without what Markdown would take for its own."""
    return why.replace("|", "/").replace("<", "(").replace(">", ")")


def _cell(results: dict[str, Any], name: str) -> Text:
    if "model" in results:
        return Text("no model", "dim")
    if name not in results:
        return Text("")
    verdict = results[name]["verdict"]
    return Text(MARKS[verdict], COLOURS[verdict])


def _decided(results: dict[str, Any]) -> str:
    facts = results.get("facts")
    if not facts or "why" in facts:
        return ""
    if facts["adapter"]:
        return "adapter"
    kinds = ["plan"] if facts["plan"] else []
    return " and ".join([*kinds, *(["inferred"] if facts["inferred"] else [])]) or "whole"


def _numbers(outcome: dict[str, Any]) -> str:
    return ", ".join(f"{what} {error:.0e}" for what, error in outcome["errors"].items())
