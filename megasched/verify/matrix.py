"""Runs the compatibility matrix: every architecture at every layout of the checks, kept as a JSON file.

``python -m megasched.verify.matrix`` runs the checks that the file lacks (hours for all); it can be stopped at any
time and goes on where it was.
"""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megasched.definition.small_models.small_models import causal_lm_types, write_small_model
from megasched.errors import ConfigError, did_you_mean
from megasched.files import write_whole
from megasched.trainer.evidence.matrix import DATA, LAYOUT_NAMES, load_matrix
from megasched.verify.facts import facts
from megasched.verify.parity import check_layout, failure
from megasched.verify.ranks.pool import RankError, RankPool


def save_matrix(matrix: dict[str, Any], path: Path = DATA) -> None:
    """Writes the results so that a reader finds either the old file or the new one."""
    matrix = {**matrix, **{name: dict(sorted(matrix[name].items())) for name in ("types", "older")}}
    write_whole(path, [json.dumps(matrix, indent=1), "\n"])


def versions() -> dict[str, str]:
    """Returns the versions of the packages that the results depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("transformers", "megatron-core", "torch")}


def check_type(
    ranks: RankPool, model_type: str, folder: str, layouts: Iterable[str] = LAYOUT_NAMES
) -> dict[str, dict[str, Any]]:
    """Checks one architecture; returns the outcome by layout, and under ``facts`` what decided on its linears.

    A model that can't be made has one outcome, ``model``.
    """
    try:
        ranks.run(1, write_small_model, model_type, folder)
    except RankError as error:
        return {"model": failure(str(error)).as_dict()}
    found: dict[str, dict[str, Any]] = {}
    try:
        (found["facts"],) = ranks.run(1, facts, folder)
    except RankError as error:
        found["facts"] = {"why": failure(str(error)).why}
    for name in layouts:
        found[name] = check_layout(ranks, folder, name).as_dict()
    return found


def check_known(model_type: str) -> None:
    """Refuses a model type that names no architecture.

    Raises:
        ConfigError: the installed transformers has no such causal language model.
    """
    if model_type not in causal_lm_types():
        close = get_close_matches(model_type, causal_lm_types())
        raise ConfigError(
            f"the installed transformers has no causal language model {model_type!r}{did_you_mean(close)}"
        )


def check_here(model_type: str) -> dict[str, dict[str, Any]]:
    """Runs ``check_type`` on this machine, in a rank pool of its own.

    Raises:
        ConfigError: the installed transformers has no such causal language model.
    """
    check_known(model_type)
    with RankPool() as ranks, tempfile.TemporaryDirectory() as folder:
        return check_type(ranks, model_type, folder)


def _current(matrix: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Maps layouts to an architecture's outcomes; empty where only other versions have results."""
    return {} if model_type in matrix["older"] else matrix["types"].get(model_type, {})


def missing(matrix: dict[str, Any], types: Sequence[str], layouts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns each model type whose results lack layouts, with these layouts."""
    found = []
    for model_type in types:
        have = _current(matrix, model_type)
        lacking = [name for name in layouts if name not in have]
        if lacking and "model" not in have:
            found.append((model_type, lacking))
    return found


def run_matrix(path: Path, types: Sequence[str], layouts: Sequence[str], *, again: Sequence[str] = ()) -> None:
    """Runs the checks that the file lacks, and writes it after each architecture.

    Args:
        types: model types; the command takes all that the installed transformers has by default.
        layouts: names of layouts.
        again: verdicts that are checked anew, e.g. ``("failed", "wrong")``.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    matrix = load_matrix(path)
    if matrix["versions"] != versions():  # results of other versions stay until there are new ones
        matrix["older"] = dict.fromkeys(matrix["types"], matrix["versions"]) | matrix["older"]
        matrix["versions"] = versions()
    for name in types:
        results = _current(matrix, name)
        for layout in [layout for layout, found in results.items() if found.get("verdict") in again]:
            del results[layout]
    todo = missing(matrix, types, layouts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RankPool() as ranks, Progress(*columns) as progress:
        task = progress.add_task("architectures", total=len(todo))
        for model_type, lacking in todo:
            progress.update(task, description=model_type)
            with tempfile.TemporaryDirectory() as folder:
                found = check_type(ranks, model_type, folder, lacking)
            if matrix["older"].pop(model_type, None):
                del matrix["types"][model_type]
            matrix["types"].setdefault(model_type, {}).update(found)
            save_matrix(matrix, path)
            progress.advance(task)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; see the module."""
    parser = ArgumentParser(description="Check every architecture at every layout; hours, can be stopped.")
    parser.add_argument("--types", nargs="+", default=None, help="model types; all by default")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUT_NAMES), choices=LAYOUT_NAMES)
    parser.add_argument("--again", nargs="*", default=[], metavar="VERDICT", help="check these verdicts anew")
    parser.add_argument("--output", type=Path, default=DATA)
    options = parser.parse_args(argv)
    for model_type in options.types or ():
        try:
            check_known(model_type)
        except ConfigError as error:
            parser.error(str(error))
    run_matrix(options.output, options.types or causal_lm_types(), options.layouts, again=options.again)


if __name__ == "__main__":
    main()
