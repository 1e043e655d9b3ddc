"""Prints the compatibility matrix of ``megasched archs``, as tables for a terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from megasched.cli.output import report_console
from megasched.errors import ConfigError
from megasched.json_output import print_json
from megasched.printing.tables import plain_table
from megasched.trainer.evidence.compatibility import load_matrix
from megasched.verify.matrix import LAYOUT_NAMES

MARKS = {"equal": "yes", "wrong": "WRONG", "refused": "refused", "failed": "fails", "not applicable": "–"}
COLOURS = {"equal": "green", "wrong": "bold red", "refused": "yellow", "failed": "red", "not applicable": "dim"}
FINE = ("equal", "not applicable")
FACTS = ("tied", "fused", "cut")
ROUNDING = (
    "Where float32 itself is not good to 1e-5 (decays of long products, say), a step counts as equal if it is at",
    "most four times as far from float64 as the unscheduled model in float32 is, and at most 1e-3:",
)
COMMAND = "megasched archs --markdown > docs/architectures.md"


def print_all(*, as_json: bool, as_markdown: bool) -> None:
    """Prints the whole matrix: as JSON, as the page of the documentation, or as a table."""
    if as_json:
        print_json(load_matrix())
    elif as_markdown:
        print(markdown(load_matrix()), end="")
    else:
        print_matrix(report_console())


def print_matrix(console: Console) -> None:
    """Prints a table with a row for each architecture and a column for each layout."""
    matrix = load_matrix()
    table = plain_table("architecture", *LAYOUT_NAMES, *FACTS)
    for model_type, results in matrix["types"].items():
        table.add_row(model_type, *(_cell(results, name) for name in LAYOUT_NAMES), *_facts(results))
    console.print(table)
    console.print(Text("\n".join([summary(matrix), *older(matrix)]), "dim"))


def print_architecture(model_type: str, results: dict[str, Any], console: Console) -> None:
    """Prints all results of one architecture."""
    facts = (f"{name} {value}" for name, value in zip(FACTS, _facts(results), strict=True) if value)
    console.print(Text(model_type, "bold"), Text(", ".join(facts), "dim"))
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
    """Returns the results of an architecture in the matrix.

    Raises:
        ConfigError: the matrix has none.
    """
    types = load_matrix()["types"]
    if model_type not in types:
        raise ConfigError(
            f"the matrix holds nothing of {model_type!r}; `megasched archs {model_type} --run` checks it here"
        )
    return types[model_type]


def summary(matrix: dict[str, Any]) -> str:
    """Returns how many architectures pass at each layout, and with which versions, in one line."""
    types = matrix["types"].values()
    counts = []
    for name in LAYOUT_NAMES:
        checked = [results[name]["verdict"] for results in types if name in results]
        checked = [verdict for verdict in checked if verdict != "not applicable"]
        if checked:
            counts.append(f"{name} {checked.count('equal')} of {len(checked)}")
    equal = ", ".join(counts) or "none checked"
    return f"{len(types)} architectures; equal to HF within 1e-5: {equal}. {_told(matrix['versions'])}."


def older(matrix: dict[str, Any]) -> list[str]:
    """Returns a line for each set of older versions, with the architectures that were checked with them only."""
    found: dict[str, list[str]] = {}
    for model_type, versions in matrix["older"].items():
        found.setdefault(_told(versions), []).append(model_type)
    return [f"With {told}: {', '.join(names)}." for told, names in found.items()]


def _told(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def markdown(matrix: dict[str, Any]) -> str:
    """Returns the page ``docs/architectures.md``."""
    lines = [
        "# Architectures",
        "",
        f"Made by `{COMMAND}`",
        "from `megasched/trainer/evidence/compatibility.json`, which `make matrix` fills.",
        "",
        "Each architecture is built small (4 layers, hidden size 64, noise on every weight, multipliers away from",
        "1, windows that bite) and trained for one step by Megatron's own trainer, rehearsed on CPUs, in float32.",
        "*yes*: loss, logits, every gradient and the gradient norm equal those of the unscheduled HF model in one",
        "process within 1e-5 (what is beyond that by rounding is listed [below](#rounding)). *tied*: the copy",
        "that was checked ties its embeddings. *fused*: *joint* where projections of one activation are one",
        "matrix product, *block* where Megatron's own transformer layer can stand for the definition's, elsewhere",
        "*attention*, *mixture* and *mlp* where its attention, its mixture of experts and its MLP can by",
        "themselves ([schedules.md](schedules.md#level)). *cut*: what decided how linears are sharded: HF's plan,",
        "what megasched inferred, or an adapter. `megasched archs NAME --run` does it again on your machine;",
        "`megasched archs --json` prints all of this page for programs.",
        "",
        summary(matrix),
        *(line for told in older(matrix) for line in ("", told)),
        "",
        f"| architecture | {' | '.join((*LAYOUT_NAMES, *FACTS))} |",
        f"| --- |{' --- |' * len((*LAYOUT_NAMES, *FACTS))}",
    ]
    for model_type, results in matrix["types"].items():
        cells = (_cell(results, name).plain for name in LAYOUT_NAMES)
        lines.append(f"| `{model_type}` | {' | '.join((*cells, *_facts(results)))} |")
    lines += ["", "## Why not", "", *_reasons(matrix, lambda verdict: verdict not in FINE)]
    lines += ["", "## Rounding", "", *ROUNDING, "", *_reasons(matrix, lambda verdict: verdict == "equal")]
    return "\n".join(lines) + "\n"


def _reasons(matrix: dict[str, Any], meant: Callable[[str], bool]) -> Iterator[str]:
    """Yields a line for each architecture and reason, of the outcomes whose verdicts ``meant`` accepts."""
    for model_type, results in matrix["types"].items():
        reasons: dict[str, list[str]] = {}
        for name, outcome in results.items():
            if name != "facts" and outcome["why"] and meant(outcome["verdict"]):
                reasons.setdefault(_plain(outcome["why"]), []).append(name)
        for why, names in reasons.items():
            yield f"- `{model_type}`, {', '.join(names)}: {why}"


def _plain(why: str) -> str:
    """Returns a reason with the characters replaced that Markdown would interpret."""
    return why.replace("|", "/").replace("<", "(").replace(">", ")")


def _cell(results: dict[str, Any], name: str) -> Text:
    if "model" in results:
        return Text("no model", "dim")
    if name not in results:
        return Text("")
    verdict = results[name]["verdict"]
    return Text(MARKS[verdict], COLOURS[verdict])


def _facts(results: dict[str, Any]) -> tuple[str, ...]:
    """Returns a text for each of ``FACTS``, all empty where they are missing."""
    facts = results.get("facts")
    if not facts or "why" in facts:
        return ("",) * len(FACTS)
    return "yes" if facts["tied"] else "", ", ".join(facts["fused"]), _decided(facts)


def _decided(facts: dict[str, Any]) -> str:
    if facts["adapter"]:
        return "adapter"
    kinds = ["plan"] if facts["plan"] else []
    return " and ".join([*kinds, *(["inferred"] if facts["inferred"] else [])]) or "whole"


def _numbers(outcome: dict[str, Any]) -> str:
    return ", ".join(f"{what} {error:.0e}" for what, error in outcome["errors"].items())
