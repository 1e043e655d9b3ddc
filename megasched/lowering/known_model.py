"""A definition and its schedule before any layout: what sessions of several layouts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megasched.analysis.known_runs import KnownRuns
from megasched.analysis.layer_stack import LayerStack
from megasched.analysis.structure import layer_stack_of
from megasched.definition.objectives import find_objective
from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language.schedule import Schedule
from megasched.layers import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megasched.language.parallel_dims import Layout
    from megasched.language.schedule_file import ScheduleFunction


@dataclass(frozen=True)
class KnownModel:
    """What follows from the model alone.

    Attributes:
        definition: pristine, parameters on meta; nobody changes it.
        structure: how it runs, where that can be told.
        schedule: what ``--model-schedule`` says.
        function: the schedule of that name.
        runs: of the definition on meta, for plans.
    """

    definition: PreTrainedModel
    structure: LayerStack | None
    schedule: str
    function: ScheduleFunction
    runs: KnownRuns = field(default_factory=KnownRuns)

    @cached_property
    def why_not_stages(self) -> str:
        """Why its layers can't be on several pipeline stages; empty where they can."""
        from megasched.trainer.stages.stage_trial import why_not_alone

        return "" if self.structure is None else why_not_alone(self.definition, self.structure)

    def apply(self, layout: Layout) -> Schedule:
        """The schedule's records for a layout.

        Raises:
            ConfigError, ScheduleError: the schedule can't be used with this model.
        """
        from megasched.language.schedule import create_schedule
        from megasched.language.schedule_file import apply_schedule

        root = create_schedule(self.definition, layout, self._roles(layout))
        apply_schedule(root, self.function)
        _refuse_computed_weights(root)
        return root

    def _roles(self, layout: Layout) -> Any:
        """The adapter's roles, and what can be inferred besides; a schedule of the user's own can do without."""
        from megasched.analysis.infer import infer_roles
        from megasched.language.roles import Roles
        from megasched.model_adapters.registry import has_roles, roles_of

        definition = self.definition
        try:
            roles = roles_of(definition)
        except ConfigError:
            if self.schedule == "auto":
                raise
            return Roles()
        if has_roles(definition.config.model_type):
            return roles
        tp = max(layout.tp, 2)
        return infer_roles(definition, roles, self.structure, tp=tp, sequence_parallel=layout.sp)


def know_model(
    schedule: str, hf_model: str, overrides: Sequence[str], *, trust_remote_code: bool, objective: str | None
) -> KnownModel:
    """Config, definition and schedule; the arguments are those of ``open_session``.

    Raises:
        ConfigError, ScheduleError: whatever can't be used as given.
    """
    from megasched.definition.build import build_definition, load_config
    from megasched.definition.module_copy import holds_tensor
    from megasched.language.schedule_file import find_schedule

    function = find_schedule(schedule)
    config = load_config(hf_model, overrides, trust_remote_code=trust_remote_code)
    definition = build_definition(config, find_objective(objective), trust_remote_code=trust_remote_code)
    if (path := holds_tensor(definition)) is not None:
        what = "a function on it (its forward, or a hook) holds a parameter or a buffer, and a run has others"
        remedy = "have the function hold the module, and read the tensor off that when it runs"
        raise ScheduleError(Problem(what, path, remedy=remedy))
    attention.enable(definition)
    return KnownModel(definition, layer_stack_of(definition), schedule, function)


def _refuse_computed_weights(schedule: Schedule) -> None:
    """In a run every value comes by its HF name, from the folder or a checkpoint; a function has no name there."""
    problems = []
    for record in schedule.records:
        weights = record.arguments.get("weights", {}) if record.primitive in ("replace", "replace_all") else {}
        computed = [name for name, source in weights.items() if callable(source)]
        if computed:
            what = (
                f"the weights of {', '.join(computed)} are computed by a function, which a training run can't do"
            )
            remedy = "give each the name of one old parameter, or make the replacement with megasched.build"
            problems.append(Problem(what, record.path, record.source, remedy))
    if problems:
        raise ScheduleError(problems)
