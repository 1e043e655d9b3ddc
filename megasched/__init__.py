"""Schedules unmodified Hugging Face models into Megatron-LM's layers and trainer.

As a library, on any ``nn.Module``::

    sch = megasched.create_schedule(model)
    sch["model.layers.*.mlp.up_proj"].shard("weight", axis=0)
    sch["model.layers.*.mlp.down_proj"].shard("weight", axis=1)
    model = megasched.build(sch)

Importing the package is light: torch, transformers and Megatron are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megasched._moved import keep_old_names

if TYPE_CHECKING:
    from megasched.analysis.rules.op_rules import register_op_rule
    from megasched.definition.build import build_definition, init_empty_weights, load_config
    from megasched.dialects.clipping import clip_grad_norm_
    from megasched.dialects.initialize import build, initialize
    from megasched.dialects.saving import full_state_dict, save_pretrained
    from megasched.dialects.stages import build_stage
    from megasched.dialects.state_dicts import get_state_dict, set_state_dict
    from megasched.errors import CheckpointError, ConfigError, MegaschedError, Problem, ScheduleError
    from megasched.graph.compilers import register_compiler
    from megasched.language.parallel_dims import Layout, ParallelDims
    from megasched.language.records import Record, load_records, save_records
    from megasched.language.registry import Primitive, list_primitives, register_lowering, register_primitive
    from megasched.language.schedule import Schedule, ScheduleList, replay
    from megasched.language.schedule_file import register_schedule
    from megasched.language.subgraph import Subgraph
    from megasched.layers.losses.cross_entropy import ParallelCrossEntropy
    from megasched.lowering.build import apply_schedule, create_schedule
    from megasched.lowering.materialize import materialize
    from megasched.tuner.space import Space
    from megasched.tuner.tune import tune
    from megasched.verify.library.verify_module import verify
    from megasched.weights.hf.folder import HFFolder
    from megasched.weights.random_init import RandomInit

__version__ = "0.1.0"

# Public name -> module that defines it, imported on first use.
_PUBLIC = {
    "CheckpointError": "megasched.errors",
    "ConfigError": "megasched.errors",
    "HFFolder": "megasched.weights.hf.folder",
    "Layout": "megasched.language.parallel_dims",
    "MegaschedError": "megasched.errors",
    "ParallelCrossEntropy": "megasched.layers.losses.cross_entropy",
    "ParallelDims": "megasched.language.parallel_dims",
    "Primitive": "megasched.language.registry",
    "Problem": "megasched.errors",
    "RandomInit": "megasched.weights.random_init",
    "Record": "megasched.language.records",
    "Schedule": "megasched.language.schedule",
    "ScheduleError": "megasched.errors",
    "ScheduleList": "megasched.language.schedule",
    "Space": "megasched.tuner.space",
    "Subgraph": "megasched.language.subgraph",
    "apply_schedule": "megasched.lowering.build",
    "build": "megasched.dialects.initialize",
    "build_definition": "megasched.definition.build",
    "build_stage": "megasched.dialects.stages",
    "clip_grad_norm_": "megasched.dialects.clipping",
    "create_schedule": "megasched.lowering.build",
    "full_state_dict": "megasched.dialects.saving",
    "get_state_dict": "megasched.dialects.state_dicts",
    "init_empty_weights": "megasched.definition.build",
    "initialize": "megasched.dialects.initialize",
    "list_primitives": "megasched.language.registry",
    "load_config": "megasched.definition.build",
    "load_records": "megasched.language.records",
    "materialize": "megasched.lowering.materialize",
    "register_compiler": "megasched.graph.compilers",
    "register_lowering": "megasched.language.registry",
    "register_op_rule": "megasched.analysis.rules.op_rules",
    "register_primitive": "megasched.language.registry",
    "register_schedule": "megasched.language.schedule_file",
    "replay": "megasched.language.schedule",
    "save_pretrained": "megasched.dialects.saving",
    "save_records": "megasched.language.records",
    "set_state_dict": "megasched.dialects.state_dicts",
    "tune": "megasched.tuner.tune",
    "verify": "megasched.verify.library.verify_module",
}

__all__ = sorted(_PUBLIC)

keep_old_names()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megasched' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
