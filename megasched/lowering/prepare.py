"""Prepares what is planned from an HF folder: definition, schedule, replacements and adapters.

A session of Megatron's trainer and the library's ``build`` prepare a model in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.find_layer_stack import layer_stack_of
from megasched.analysis.roles.infer import infer_roles
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.definition.build import build_definition, load_config
from megasched.definition.module_copy import copy_module, holds_tensor
from megasched.definition.objectives import find_objective
from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.registry import records_where
from megasched.language.replacements import ReplacedNames
from megasched.language.roles import Roles
from megasched.language.schedule import Schedule, create_schedule
from megasched.language.schedule_file import ScheduleFunction, apply_schedule, find_schedule
from megasched.layers import attention
from megasched.lowering.lora import adapt_modules
from megasched.lowering.replace import replace_modules
from megasched.model_adapters.registry import Adapter, has_roles, load_adapter, roles_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ScheduledDefinition:
    """Holds a definition and its schedule before any layout, which sessions of several layouts share.

    Attributes:
        definition: pristine HF model, parameters on meta; nobody changes it.
        structure: its layer stack, where that can be found.
        schedule: the value of ``--model-schedule``.
        function: the schedule of that name.
        adapter: that stands before any installed one; None without a file of one.
        runs: cached runs of the definition on meta, for plans.
    """

    definition: PreTrainedModel
    structure: LayerStack | None
    schedule: str
    function: ScheduleFunction
    adapter: Adapter | None = None
    runs: AnalysisCache = field(default_factory=AnalysisCache)

    def apply(self, layout: ParallelDims) -> Schedule:
        """Returns the schedule with its records for a layout.

        Raises:
            ConfigError, ScheduleError: the schedule can't be used with this model.
        """
        root = create_schedule(self.definition, layout, self._roles(layout))
        apply_schedule(root, self.function)
        _refuse_computed_weights(root)
        return root

    def _roles(self, layout: ParallelDims) -> Roles:
        """Returns the roles of the definition; where none are known, empty ones, which ``auto`` can't use."""
        try:
            return find_roles(self.definition, self.structure, layout, self.adapter)
        except ConfigError:
            if self.schedule == "auto" or self.adapter is not None:
                raise
            return Roles()


def find_roles(
    model: Any, structure: LayerStack | None, layout: ParallelDims, adapter: Adapter | None = None
) -> Roles:
    """Returns the roles of an HF model's adapter, or else those of HF's plan and those that can be inferred.

    Args:
        structure: its layer stack, where that can be found.
        adapter: that stands before any installed one.

    Raises:
        ConfigError: the adapter does not fit the model, or HF's plan has an unknown style.
    """
    roles = roles_of(model, adapter)
    if has_roles(model.config.model_type, adapter):
        return roles
    return infer_roles(model, roles, structure, tp=max(layout.tp, 2), sequence_parallel=layout.sp)


def open_definition(
    schedule: str,
    hf_model: str,
    overrides: Sequence[str],
    *,
    trust_remote_code: bool,
    objective: str | None,
    adapter: str | None,
) -> ScheduledDefinition:
    """Loads config, definition, schedule and adapter; the arguments are those of ``open_session``.

    Raises:
        ConfigError, ScheduleError: whatever can't be used as given.
    """
    function = find_schedule(schedule)
    config = load_config(hf_model, overrides, trust_remote_code=trust_remote_code)
    loaded = None if adapter is None else load_adapter(adapter, config.model_type)
    definition = build_definition(config, find_objective(objective), trust_remote_code=trust_remote_code)
    if (path := holds_tensor(definition)) is not None:
        what = "a function on it (its forward, or a hook) holds a parameter or a buffer, and a run has others"
        remedy = "have the function hold the module, and read the tensor off that when it runs"
        raise ScheduleError(Problem(what, path, remedy=remedy))
    attention.enable(definition)
    return ScheduledDefinition(definition, layer_stack_of(definition), schedule, function, loaded)


def _refuse_computed_weights(schedule: Schedule) -> None:
    """Raises ScheduleError where a function computes the weights of a replacement.

    In a run every value comes by its HF name, from the folder or a checkpoint; a function has no name there.
    """
    problems = []
    for record in records_where(schedule.records, lambda primitive: primitive.replaces_modules):
        weights = record.arguments.get("weights", {})
        computed = [name for name, source in weights.items() if callable(source)]
        if computed:
            what = (
                f"the weights of {', '.join(computed)} are computed by a function, which a training run can't do"
            )
            remedy = "give each the name of one old parameter, or make the replacement with megasched.build"
            problems.append(Problem(what, record.path, record.source, remedy))
    if problems:
        raise ScheduleError(problems)


@dataclass(frozen=True)
class Prepared:
    """Holds the model that a plan is made for.

    Attributes:
        model: the definition with its replacements and adapters.
        replaced: what the replacements have made of the names.
        structure: the model's layer stack, where that can be found; None for the library's model, in which it is
            not looked for.
    """

    model: Any
    replaced: ReplacedNames
    structure: LayerStack | None = None


def prepare(
    schedule: Schedule,
    model: nn.Module,
    *,
    structure: LayerStack | None = None,
    inputs: Mapping[str, Any] | None = None,
    undo: ExitStack | None = None,
) -> Prepared:
    """Makes the replacements and puts in the adapters that a schedule asks for.

    Args:
        schedule: provides the records.
        model: the definition, of which a copy is changed; or, with ``undo``, a model that is changed in place.
        structure: layer stack of the definition, where that is known.
        inputs: example arguments of the model's forward; by default token ids for a model that takes them.
        undo: receives the callbacks that take back all changes in place.

    Raises:
        ScheduleError: with everything that can't be made; the model is unchanged then.
    """
    edited = bool(records_where(schedule.records, lambda primitive: primitive.phase == "edit"))
    if undo is None and edited:
        model = copy_module(model)
    replaced = replace_modules(schedule, model, inputs=inputs, undo=undo)
    adapt_modules(schedule, model, undo)
    if undo is None and edited:
        structure = layer_stack_of(model)  # of what runs now
    return Prepared(model, replaced, structure)
