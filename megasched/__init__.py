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

# Module, imported on first use -> the public names that it defines.
_MODULES = {
    "megasched.analysis.rules.op_rules": ["register_op_rule"],
    "megasched.definition.build": ["build_definition", "init_empty_weights", "load_config"],
    "megasched.dialects.clipping": ["clip_grad_norm_"],
    "megasched.dialects.initialize": ["build", "initialize"],
    "megasched.dialects.saving": ["full_state_dict", "save_pretrained"],
    "megasched.dialects.stages": ["build_stage"],
    "megasched.dialects.state_dicts": ["get_state_dict", "set_state_dict"],
    "megasched.errors": ["CheckpointError", "ConfigError", "MegaschedError", "Problem", "ScheduleError"],
    "megasched.graph.compilers": ["register_compiler"],
    "megasched.language.parallel_dims": ["Layout", "ParallelDims"],
    "megasched.language.records": ["Record", "load_records", "save_records"],
    "megasched.language.registry": ["Primitive", "list_primitives", "register_lowering", "register_primitive"],
    "megasched.language.schedule": ["Schedule", "ScheduleList", "replay"],
    "megasched.language.schedule_file": ["register_schedule"],
    "megasched.language.subgraph": ["Subgraph"],
    "megasched.layers.losses.cross_entropy": ["ParallelCrossEntropy"],
    "megasched.lowering.build": ["apply_schedule", "create_schedule"],
    "megasched.lowering.materialize": ["materialize"],
    "megasched.tuner.space": ["Space"],
    "megasched.tuner.tune": ["tune"],
    "megasched.verify.library.verify_module": ["verify"],
    "megasched.weights.hf.folder": ["HFFolder"],
    "megasched.weights.random_init": ["RandomInit"],
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_PUBLIC)

keep_old_names()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megasched' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
