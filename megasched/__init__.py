"""megasched: schedules unmodified Hugging Face models into Megatron-LM's layers and trainer.

As a library, on any ``nn.Module``::

    sch = megasched.create_schedule(model)
    sch["model.layers.*.mlp.up_proj"].shard("weight", axis=0)
    sch["model.layers.*.mlp.down_proj"].shard("weight", axis=1)
    model = megasched.build(sch)

Importing the package is light: torch, transformers and Megatron are imported by what is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasched.definition import build_definition, init_empty_weights, load_config
    from megasched.errors import CheckpointError, ConfigError, MegaschedError, Problem, ScheduleError
    from megasched.graph.compilers import register_compiler
    from megasched.graph.subgraph import Subgraph
    from megasched.layout import Layout
    from megasched.library import apply_schedule, create_schedule
    from megasched.lowering.build import build
    from megasched.lowering.record_lowerings import register_lowering
    from megasched.records import Record, load_records, save_records
    from megasched.registry import Primitive, list_primitives, register_primitive
    from megasched.schedule import Schedule, ScheduleList, replay
    from megasched.schedule_file import register_schedule
    from megasched.trial.op_rules import register_op_rule
    from megasched.weights.materialize import materialize

__version__ = "0.1.0"

# Public name -> module that defines it, imported on first use.
_PUBLIC = {
    "CheckpointError": "megasched.errors",
    "ConfigError": "megasched.errors",
    "Layout": "megasched.layout",
    "MegaschedError": "megasched.errors",
    "Primitive": "megasched.registry",
    "Problem": "megasched.errors",
    "Record": "megasched.records",
    "Schedule": "megasched.schedule",
    "ScheduleError": "megasched.errors",
    "ScheduleList": "megasched.schedule",
    "Subgraph": "megasched.graph.subgraph",
    "apply_schedule": "megasched.library",
    "build": "megasched.lowering.build",
    "build_definition": "megasched.definition",
    "create_schedule": "megasched.library",
    "init_empty_weights": "megasched.definition",
    "list_primitives": "megasched.registry",
    "load_config": "megasched.definition",
    "load_records": "megasched.records",
    "materialize": "megasched.weights.materialize",
    "register_compiler": "megasched.graph.compilers",
    "register_lowering": "megasched.lowering.record_lowerings",
    "register_op_rule": "megasched.trial.op_rules",
    "register_primitive": "megasched.registry",
    "register_schedule": "megasched.schedule_file",
    "replay": "megasched.schedule",
    "save_records": "megasched.records",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megasched' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
