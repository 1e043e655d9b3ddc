"""Prints the compatibility matrix of ``megasched archs``, as tables for a terminal and for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from rich.console import Console
from rich.text import Text

from megasched.cli.output import LIST_WIDTH, report_console
from megasched.definition.small_models.small_models import causal_lm_types
from megasched.errors import ConfigError, did_you_mean
from megasched.json_output import print_json
from megasched.printing.shell_command import shell_command
from megasched.printing.tables import plain_table
from megasched.trainer.evidence.matrix import LAYOUT_NAMES, load_matrix

MARKS = {"equal": "yes", "wrong": "WRONG", "refused": "refused", "failed": "fails", "not applicable": "–"}
COLOURS = {"equal": "green", "wrong": "bold red", "refused": "yellow", "failed": "red", "not applicable": "dim"}
FINE = ("equal", "not applicable")
FACTS = ("tied", "fused", "cut", "class")
VERSION = "transformers"  # of the packages that the results depend on, the one that brings the architectures
ROUNDING = (
    "Where float32 itself is not good to 1e-5 (decays of long products, say), a step counts as equal if it is at",
    "most four times as far from float64 as the unscheduled model in float32 is, and at most 1e-3:",
)
COMMAND = "megasched archs --markdown > docs/architectures.md"


def print_all(*, as_json: bool, as_markdown: bool) -> None:
    """Prints the whole matrix: as JSON, as the page of the documentation, or as a list."""
    if as_json:
        print_json(load_matrix())
    elif as_markdown:
        print(markdown(load_matrix()), end="")
    else:
        print_list(load_matrix())


def print_found(name: str, *, as_json: bool) -> bool:
    """Prints what the matrix holds of the architectures that a name finds: all of one, or a list of several.

    Returns:
        Whether the one is right at all layouts; True for several.

    Raises:
        ConfigError: the name finds none.
    """
    matrix = load_matrix()
    found = find_types(name, matrix["types"])
    if len(found) == 1:
        return print_one(found[0], matrix["types"][found[0]], as_json=as_json)
    chosen = {key: {one: matrix[key][one] for one in found if one in matrix[key]} for key in ("types", "older")}
    if as_json:
        print_json({**matrix, **chosen})
    else:
        print_list({**matrix, **chosen})
    return True


def print_one(model_type: str, results: dict[str, Any], *, as_json: bool) -> bool:
    """Prints all results of one architecture, and returns whether it is right at all layouts."""
    if as_json:
        print_json(results)
    else:
        print_architecture(model_type, results, report_console())
    return all(outcome["verdict"] in FINE for kind, outcome in results.items() if kind != "facts")


def print_list(matrix: dict[str, Any]) -> None:
    """Prints a line for each architecture, with a column for each layout; a name is never cut.

    On a terminal that is too narrow the last columns are cut, in a file or a pipe none.
    """
    table = plain_table()
    for heading in ("architecture", *LAYOUT_NAMES, VERSION):
        table.add_column(heading, no_wrap=True)
    for heading in FACTS:
        table.add_column(heading)
    for model_type, results in matrix["types"].items():
        facts = (Text(fact, no_wrap=True, overflow="ellipsis") for fact in _facts(results))
        cells = (_cell(results, name) for name in LAYOUT_NAMES)
        table.add_row(model_type, *cells, _version(matrix, model_type), *facts)
    console = report_console(LIST_WIDTH)
    console.print(table)
    console.print(Text("\n".join([summary(matrix), *older(matrix)]), "dim"), soft_wrap=True)


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


def find_types(name: str, types: Mapping[str, dict[str, Any]]) -> list[str]:
    """Returns the model types whose name, or whose class's, is this one; where none is, those that contain it.

    Upper and lower case are the same.

    Raises:
        ConfigError: there is none.
    """
    asked = name.lower()
    names = {model_type: (model_type.lower(), _class(results).lower()) for model_type, results in types.items()}
    found = [model_type for model_type, known in names.items() if asked in known]
    found = found or [model_type for model_type, known in names.items() if any(asked in one for one in known)]
    if not found:
        known_names = {one.lower(): one for pair in ((key, _class(types[key])) for key in types) for one in pair}
        close = [known_names[one] for one in get_close_matches(asked, known_names)]
        raise ConfigError(f"no recorded check of {name!r}{did_you_mean(close)}\n{_remedy(name)}")
    return found


def _remedy(name: str) -> str:
    """Returns what to do about a name of which no check is recorded."""
    check = shell_command("verify", "--hf-model", "DIR", "--certificate", "FILE")
    told = f"`{check}` checks your model on this machine; a run takes that as --require-certificate FILE"
    if name in causal_lm_types():
        told += f". `{shell_command('archs', name, '--run')}` checks a small model of this type at every layout"
    return told


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
    """Returns a line for each set of older versions: how many architectures were checked with them only."""
    found = Counter(_told(versions) for versions in matrix["older"].values())
    return [f"{count} of them were checked with {told}." for told, count in found.items()]


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
        "themselves ([schedules.md](schedules.md#level)). What code draws at random while it trains (a router's",
        "noise) is the mean of its distribution on both sides. *cut*: what decided how linears are sharded: HF's",
        "plan, what megasched inferred, or an adapter. *transformers*: the version it was checked with.",
        "",
        "`megasched archs` prints this table, one line an architecture; `megasched archs NAME` finds a model type",
        "or a class, e.g. `LlamaForCausalLM`, by its name or a part of it. `megasched archs NAME --run` does the",
        "checks again on your machine; `megasched archs --json` prints all of this page for programs.",
        "",
        summary(matrix),
        *(line for told in older(matrix) for line in ("", told)),
        "",
        f"| architecture | {' | '.join((*LAYOUT_NAMES, VERSION, *FACTS))} |",
        f"| --- |{' --- |' * len((*LAYOUT_NAMES, VERSION, *FACTS))}",
    ]
    for model_type, results in matrix["types"].items():
        cells = (_cell(results, name).plain for name in LAYOUT_NAMES)
        row = (*cells, _version(matrix, model_type), *_facts(results))
        lines.append(f"| `{model_type}` | {' | '.join(row)} |")
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
    return "yes" if facts["tied"] else "", ", ".join(facts["fused"]), _decided(facts), _class(results)


def _class(results: dict[str, Any]) -> str:
    """Returns the name of the class that was checked; empty where no model could be made."""
    found: str = results.get("facts", {}).get("class", "")
    return found


def _version(matrix: dict[str, Any], model_type: str) -> str:
    versions: dict[str, str] = matrix["older"].get(model_type, matrix["versions"])
    return versions[VERSION]


def _decided(facts: dict[str, Any]) -> str:
    if facts["adapter"]:
        return "adapter"
    kinds = ["plan"] if facts["plan"] else []
    return " and ".join([*kinds, *(["inferred"] if facts["inferred"] else [])]) or "whole"


def _numbers(outcome: dict[str, Any]) -> str:
    return ", ".join(f"{what} {error:.0e}" for what, error in outcome["errors"].items())
