"""Defines objectives, one per file: which HF class a run trains, its forward's inputs, and its labels.

All other code gets an objective from ``objective_of(definition)``, and never by name.
"""

from __future__ import annotations

from typing import Any

from megasched.definition.objectives.causal_lm import CAUSAL_LM
from megasched.definition.objectives.image_classification import IMAGE_CLASSIFICATION
from megasched.definition.objectives.masked_lm import MASKED_LM
from megasched.definition.objectives.objective import Objective
from megasched.definition.objectives.seq2seq_lm import SEQ2SEQ_LM
from megasched.errors import ConfigError

__all__ = [
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "MASKED_LM",
    "OBJECTIVES",
    "SEQ2SEQ_LM",
    "Objective",
    "find_objective",
    "objective_of",
    "set_objective",
]

# Attribute of a definition that holds the name of its objective.
ATTRIBUTE = "megasched_objective"

OBJECTIVES = {one.name: one for one in (CAUSAL_LM, MASKED_LM, SEQ2SEQ_LM, IMAGE_CLASSIFICATION)}


def find_objective(name: str | None) -> Objective:
    """Returns the objective of this name, or that of causal language models if the name is None.

    Raises:
        ConfigError: there is none.
    """
    if name is None:
        return CAUSAL_LM
    if name not in OBJECTIVES:
        raise ConfigError(f"--objective {name}: it is one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


def set_objective(model: Any, objective: Objective) -> None:
    """Stores on a definition the objective that it was built for; copies of it keep it."""
    setattr(model, ATTRIBUTE, objective.name)


def objective_of(model: Any) -> Objective:
    """Returns the objective that a definition was built for, or else that of its class; else causal modelling.

    Classes of transformers are named as the auto class that finds them, e.g. ``BertForMaskedLM``, but for those of
    encoders and decoders.
    """
    if (name := getattr(model, ATTRIBUTE, None)) is not None:
        return OBJECTIVES[name]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return SEQ2SEQ_LM
    known = type(model).__name__
    named = (one for one in OBJECTIVES.values() if known.endswith(one.auto_class.removeprefix("AutoModel")))
    return next(named, CAUSAL_LM)
