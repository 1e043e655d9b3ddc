"""Tells by the results of ``make matrix`` whether a run of an architecture is known to be right.

Numbers that come out wrong look like any others, so a run that no check has covered is refused until the user
says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.definition.small_models.small_models import small_config
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.printing.shell_command import shell_command
from megasched.trainer.evidence.certificate import custom_classes
from megasched.trainer.evidence.matrix import load_matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def checks_for(layout: ParallelDims) -> list[str]:
    """Returns the layouts of the matrix that cover a run's; none for a run without model parallelism."""
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


def products_for(layout: ParallelDims) -> list[str]:
    """Returns the combined layouts of the matrix that must not be wrong, but need not have been checked."""
    pairs = {"tp2-pp2": layout.pp > 1, "cp2-tp2": layout.cp > 1}
    return [name for name, other in pairs.items() if other and layout.tp > 1]


def unverified(model: PreTrainedModel, layout: ParallelDims, results: dict[str, Any]) -> list[str]:
    """Returns why a run may not compute what the definition does; empty where a check says that it does.

    Args:
        model: the definition.
        layout: layout of the run.
        results: ``types`` of the matrix.
    """
    model_type = model.config.model_type
    objective = objective_of(model)
    own = custom_classes(model)
    if own:
        return [f"{own[0].__name__} is not one of transformers' classes, which are all that was checked"]
    if model_type in OTHER_OBJECTIVES.get(objective.name, ()):
        return []
    if objective is not CAUSAL_LM:
        return [f"{model_type} has not been checked as a {objective.model}"]
    known = results.get(model_type)
    if known is None or "model" in known:
        return [f"model type {model_type!r} has not been checked"]
    checks = checks_for(layout)
    if not checks and not any(outcome.get("verdict") == "equal" for outcome in known.values()):
        return [f"{model_type} was equal in no check"]  # the code of one rank is what all of them ran
    doubts = [f"{model_type} has not been checked at {check}" for check in checks if check not in known]
    for check in (*checks, *products_for(layout)):
        outcome = known.get(check)
        if outcome is not None and outcome["verdict"] in DOUBTS:
            doubts.append(f"{model_type} {DOUBTS[outcome['verdict']]} when checked at {check}: {outcome['why']}")
    return doubts


def unchecked_options(model: PreTrainedModel) -> list[str]:
    """Returns config fields by which a class may run other code than when it was checked, as ``name=value``.

    They are switches, words, kinds of layers, and whether a field is set. Sizes and other numbers are left out.

    Args:
        model: the definition, a stock class.
    """
    from transformers import PretrainedConfig

    config = model.config.get_text_config(decoder=True)
    try:
        checked = small_config(model.config.model_type).get_text_config(decoder=True)
    except Exception:  # each class validates in its own way; what is known of it then is what the matrix says
        return []
    if type(checked) is not type(config):
        return []
    fields = set(vars(checked)) - set(vars(PretrainedConfig())) | {"tie_word_embeddings", _PER_LAYER}
    if not objective_of(model).predicts_next:
        fields.discard("is_decoder")  # the matrix has decoders
    values, others = ({**vars(one), _PER_LAYER: one.to_dict().get(_PER_LAYER)} for one in (config, checked))
    found = []
    for name in sorted(fields):
        value = values.get(name)
        choice, before = _choice(value), _choice(others.get(name))
        if not name.startswith("_") and not name.endswith(_NO_OPTIONS) and choice != before:
            found.append(f"{name}={choice if isinstance(value, dict) else value!r}")
    return found


# Fields that are others in some layers: transformers refuses to read such a field off the config itself.
_PER_LAYER = "per_layer_config"
# Ends of names of fields that say nothing of a model's numbers, or of what is drawn at random.
_NO_OPTIONS = ("token_id", "token_index", "dropout", "pdrop", "tp", "use_cache", "dtype")


def _choice(value: Any) -> Any:
    """Returns the part of a field's value that code may decide by; all numbers are alike."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, dict):
        return {
            key: _choice(own) for key, own in sorted(value.items(), key=str) if isinstance(own, bool | str | dict)
        }
    if isinstance(value, list | tuple) and any(isinstance(one, str) for one in value):
        return sorted({str(one) for one in value})
    return "a number"


def of_unchecked_options(options: list[str], command: str) -> str:
    """Returns the warning about ``unchecked_options``.

    Args:
        command: as ``verify_command`` returns it.
    """
    return f"its class was not checked with these options: {', '.join(options)}; this checks it: `{command}`"


def verify_command(
    schedule: str,
    hf_model: str,
    layout: ParallelDims,
    *,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    objective: str | None = None,
    adapter: str | None = None,
) -> str:
    """Returns the command that checks a run's model at its kinds of parallelism: groups of 2 stand for any.

    Args:
        objective: what ``--objective`` says; None for a causal language model.
        adapter: what ``--adapter`` says.
    """
    sizes = {name: value for name, value in vars(layout).items() if name.endswith("_parallel_size") and value}
    small = {name: min(value, 2) for name, value in sizes.items()}
    words = ["verify", "--model-schedule", schedule, "--hf-model", hf_model]
    words += replace(layout, **small).flags()
    words += [] if objective is None else ["--objective", objective]
    return shell_command(*words, *model_words(overrides, trust_remote_code, adapter))


def model_words(overrides: Sequence[str], trust_remote_code: bool, adapter: str | None) -> list[str]:
    """Returns the flags of a command that say of a model more than its folder."""
    words = [word for override in overrides for word in ("--hf-override", override)]
    words += [] if adapter is None else ["--adapter", adapter]
    return words + (["--trust-remote-code"] if trust_remote_code else [])


def refuse_unverified(model: PreTrainedModel, layout: ParallelDims) -> None:
    """Refuses a run that no check has covered.

    Raises:
        ConfigError: with what is known of the architecture, and what can be done.
    """
    results = load_matrix()["types"]
    doubts = unverified(model, layout, results)
    if not doubts:
        return
    objective = objective_of(model)
    asked = "" if objective is CAUSAL_LM else f" --objective {objective.name}"
    check = f"`megasched verify{asked} --certificate FILE`"
    remedies = [f"{check} checks it, and --require-certificate FILE runs it then"]
    if objective is CAUSAL_LM and not custom_classes(model) and model.config.model_type in results:
        remedies.insert(0, f"`{shell_command('archs', model.config.model_type)}` shows what is known")
    lines = "\n  - ".join(["not known to be right:", *doubts])
    raise ConfigError(f"{lines}\n{'; '.join(remedies)}; --allow-unverified runs it as it is")
