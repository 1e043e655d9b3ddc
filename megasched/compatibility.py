"""What is known of each architecture: the results of ``make matrix``, and whether they speak for a run.

Numbers that come out wrong look like any others, so a run that no check has covered is refused until the user
says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.layout import Layout
from megasched.objectives import CAUSAL_LM, objective_of
from megasched.reading.files import Expected, is_regular
from megasched.reading.json_file import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DATA = Path(__file__).with_name("compatibility.json")
MATRIX = Expected("the results of `make matrix`")

# The matrix is of causal language models. Others are checked by tests/families: objective -> model types.
OTHER_OBJECTIVES = {
    "masked_lm": ("albert", "bert", "roberta"),
    "seq2seq_lm": ("t5",),
    "image_classification": ("vit",),
}

# Verdict of a check -> what a run that it speaks for is told; other verdicts are fine.
DOUBTS = {
    "wrong": "computed wrong numbers",
    "failed": "failed",
    "refused": "was refused",
}


def load_matrix(path: Path = DATA) -> dict[str, Any]:
    """The results; empty where there is no such file.

    Returns:
        ``types``: model type -> layout -> outcome, with ``facts`` beside; ``versions`` that they were made with;
        ``older``: model type -> versions, of those that have not been checked with these.
    """
    empty: dict[str, Any] = {"versions": {}, "types": {}, "older": {}}
    return empty | (read_json(path, MATRIX, {f"{key}?": {} for key in empty}) if is_regular(path) else {})


def checks_for(layout: Layout) -> list[str]:
    """The layouts of the matrix that speak for a run's; none for a run without model parallelism."""
    checks = []
    if layout.tp > 1:
        checks.append("tp2-sp" if layout.sp else "tp2")
    if layout.pp > 1:
        checks.append("pp2-vpp2" if layout.vpp > 1 else "pp2")
    if layout.ep > 1:
        checks.append("ep2")
    if layout.cp > 1:
        checks.append("cp2")
    return checks


def products_for(layout: Layout) -> list[str]:
    """The layouts of the matrix that are products of such: need not have been checked, but must not be wrong."""
    pairs = {"tp2-pp2": layout.pp > 1, "cp2-tp2": layout.cp > 1}
    return [name for name, other in pairs.items() if other and layout.tp > 1]


def unverified(model: PreTrainedModel, layout: Layout, results: dict[str, Any]) -> list[str]:
    """Why nobody knows that a run computes what the definition does; empty where a check says that it does.

    Args:
        model: the definition.
        layout: the run's.
        results: ``types`` of the matrix.
    """
    model_type = model.config.model_type
    checks = checks_for(layout)
    objective = objective_of(model)
    if not checks or model_type in OTHER_OBJECTIVES.get(objective.name, ()):
        return []
    if objective is not CAUSAL_LM:
        return [f"{model_type} has not been checked as a {objective.model}"]
    if not type(model).__module__.startswith("transformers."):
        return [f"{type(model).__name__} is not one of transformers' classes, which are all that was checked"]
    known = results.get(model_type)
    if known is None or "model" in known:
        return [f"model type {model_type!r} has not been checked"]
    doubts = [f"{model_type} has not been checked at {check}" for check in checks if check not in known]
    for check in (*checks, *products_for(layout)):
        outcome = known.get(check)
        if outcome is not None and outcome["verdict"] in DOUBTS:
            doubts.append(f"{model_type} {DOUBTS[outcome['verdict']]} when checked at {check}: {outcome['why']}")
    return doubts


def refuse_unverified(model: PreTrainedModel, layout: Layout) -> None:
    """Ends a run that no check has covered.

    Raises:
        ConfigError: with what is known of the architecture, and what can be done.
    """
    doubts = unverified(model, layout, load_matrix()["types"])
    if doubts:
        lines = "\n  - ".join(["not known to be right:", *doubts])
        model_type = model.config.model_type
        raise ConfigError(
            f"{lines}\n`megasched archs {model_type}` shows what is known, with --run it checks this machine's "
            "copy; --allow-unverified runs it as it is"
        )
