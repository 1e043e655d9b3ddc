"""Defines the session of a run: the definition, its schedule, and the plan; made once in each process.

It is made while arguments are parsed, before any process group exists, so that a schedule that can't be built ends
every rank at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.find_layer_stack import changed_by_evaluation
from megasched.analysis.flops import ForwardFlops
from megasched.analysis.recording.meta_call import meta_copy
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.trials.reach import Reach, find_reach
from megasched.collector import collector_paused
from megasched.definition.module_copy import copy_module
from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.replacements import ReplacedNames
from megasched.language.schedule import Schedule
from megasched.layers.megatron.trials import Trials
from megasched.lowering.prepare import ScheduledDefinition, open_definition, prepare
from megasched.patches import registry
from megasched.plan.make import make_plan
from megasched.plan.pipeline import balance, cuts_asked_for, layer_costs, layout_string
from megasched.plan.plan import Plan
from megasched.trainer.losses.definition_loss import refuse_loss
from megasched.trainer.stages.refused_stages import WITHOUT_STAGES, refuse_stages
from megasched.trainer.stages.stage_transfer import BoundaryCodec
from megasched.trainer.stages.stage_trial import why_not_stages
from megasched.trainer.unreached import freeze_unreached
from megasched.weights.source import WeightSource

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass
class Session:
    """Holds the model of one run.

    Attributes:
        definition: pristine, parameters on meta; nobody changes it, except that unreached parameters are frozen.
        schedule: the user's records on it.
        replaced: the definition after replacements; the same object where there are none.
        names: what the replacements have made of the definition's names.
        vocab_multiple: vocabularies are padded to a multiple of this.
        known: what sessions of other layouts share with this one.
        structure: layer stack of ``replaced``, where that is known.
        source: provides the weights.
        batch_shape: [b, s] of a micro-batch.
        eval_micro_batch_size: b in validation, where it differs.
        recomputes_up_projections: whether latent attention of Megatron's recomputes them.
        hf_model: where the config came from.
        reach: parameters that training reaches, once ``freeze_unreached`` was called.
    """

    definition: PreTrainedModel
    schedule: Schedule
    replaced: Any
    names: ReplacedNames
    vocab_multiple: int
    known: ScheduledDefinition
    structure: LayerStack | None = None
    source: WeightSource | None = None
    batch_shape: tuple[int, int] = (1, 1)
    eval_micro_batch_size: int | None = None
    recomputes_up_projections: bool = False
    hf_model: Path = Path()
    reach: Reach = field(default_factory=Reach)
    _balanced: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False)
    _sides: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def plan(self) -> Plan:
        """Returns the validated plan; vocabularies are padded as Megatron pads its tokenizer's.

        Raises:
            ScheduleError: with every problem found.
        """
        plan = make_plan(
            self.schedule,
            model=self.replaced,
            causal_lm=True,
            vocab_multiple=self.vocab_multiple,
            structure=self.structure,
            runs=self.runs,
            trials=Trials,
            replaced=self.names,
        )
        refuse_loss(plan)
        _refuse_changed_state(plan)
        if plan.layout.pp > 1:
            refuse_stages(plan, self.definition.config)
            self._refuse_state_between_stages(plan)
        objective = objective_of(self.definition)
        if plan.layout.cp > 1 and objective is not CAUSAL_LM:
            what = f"context parallelism is for causal language models, and this is a {objective.model}"
            raise ScheduleError(Problem(what, remedy="run it without --context-parallel-size"))
        return plan

    def freeze_unreached(self, batch: int, length: int) -> None:
        """Freezes parameters that micro-batches of this size never reach; to be called before there is a plan.

        Args:
            batch, length: size of a micro-batch; code may use some modules on long sequences alone.
        """
        if self.structure is None:
            return
        objective = objective_of(self.replaced)
        inputs = objective.trial(self.replaced.config, batch, length)
        takes_labels, own = self.structure.takes_labels, self.structure.loss_labels
        labels = inputs.pop("labels")
        if takes_labels:
            inputs |= {"labels": labels} if own is None else own.arguments(labels)
        inputs |= objective.constants
        self.reach = find_reach(meta_copy(self.replaced), inputs, with_loss=takes_labels)
        self.runs.length, self.runs.code_facts_at_length = length, self.reach.code_facts
        freeze_unreached(self.replaced, self.reach)

    @cached_property
    def runs(self) -> AnalysisCache:
        return self.known.runs if self.replaced is self.definition else AnalysisCache()

    def _refuse_state_between_stages(self, plan: Plan) -> None:
        """Raises ScheduleError where the layers, replaced modules included, can't be cut into pipeline stages."""
        structure, model = plan.structure, self.replaced
        if structure is None:
            return
        trial = model, structure.trial_inputs(), structure
        why_not = why_not_stages(
            model, structure, lambda: self.runs.tape_of(*trial), lambda: self.runs.ways(*trial)
        )
        if why_not:
            what = f"the layers can't be cut into pipeline stages: {why_not}"
            raise ScheduleError(Problem(what, remedy=WITHOUT_STAGES))

    def forward_flops(self, sequence_length: int) -> ForwardFlops:
        """Returns the FLOPs of the forward of one sequence.

        Raises:
            ScheduleError: the definition does not run on meta at this length.
        """
        inputs = objective_of(self.definition).trial_inputs(self.definition.config, 1, sequence_length)
        try:
            return self.runs.forward_flops(self.replaced, inputs, self.structure)
        except ScheduleError as error:
            problem = error.problems[0]
            what = f"its FLOPs can't be counted at {sequence_length} tokens, and stages are cut by them: "
            remedy = "give no more tokens than the model has positions for (--seq-length)"
            raise ScheduleError(replace(problem, what=what + problem.what, remedy=remedy)) from error

    @property
    def training_flops(self) -> float:
        """Returns the FLOPs to train a causal language model on one sequence: three times those of the forward.

        The backward takes twice as many as the forward. Recomputation is not counted again, as in Megatron.

        Raises:
            ScheduleError: the definition does not run on meta at this length.
        """
        return 3.0 * self.forward_flops(self.batch_shape[1]).total

    def pipeline_layout(self, sequence_length: int) -> str | None:
        """Returns Megatron's layout string of ``stage_layers``; None without a pipeline.

        Raises:
            ScheduleError: more stages than layers, or cuts that do not fit.
        """
        layers = self.stage_layers(sequence_length)
        return None if layers is None else layout_string(layers)

    def stage_layers(self, sequence_length: int, layout: ParallelDims | None = None) -> list[int] | None:
        """Returns the layers of each stage by this schedule's cuts, or balanced by cost; None without a pipeline.

        Args:
            layout: another than the schedule's, of which PP and VPP count.

        Raises:
            ScheduleError: more stages than layers, or cuts that do not fit.
        """
        layout = layout or self.schedule.layout
        stages = layout.pp * layout.vpp
        if stages == 1:
            return None
        structure = self.plan.stack
        if stages > structure.count:
            what = f"PP x VPP = {stages} stages for {structure.count} layers"
            remedy = f"at most {structure.count} stages, or a --pipeline-model-parallel-layout with empty ones"
            raise ScheduleError(Problem(what, structure.layers, remedy=remedy))
        asked = cuts_asked_for(self.schedule, structure, stages)
        if asked is None:
            if (sequence_length, stages) not in self._balanced:
                self._balanced[sequence_length, stages] = balance(*self.layer_costs(sequence_length), stages)
            asked = self._balanced[sequence_length, stages]
        return asked

    def layer_costs(self, sequence_length: int) -> tuple[list[float], float, float]:
        """Returns the costs of the layers, and of what comes before and after them, for balancing stages.

        Raises:
            ScheduleError: the definition does not run on meta at this length.
        """
        return layer_costs(self.forward_flops(sequence_length), sequence_length)

    def packing(
        self, boundaries: list[int], dtype: torch.dtype, batch_shape: tuple[int, int]
    ) -> BoundaryCodec | None:
        """Returns the codec of these stage boundaries; None where only the hidden state crosses them, as it is.

        Args:
            boundaries: indices of the layers that begin a stage.
            dtype: dtype of parameters.
            batch_shape: rows of a micro-batch, and tokens in each.
        """
        structure, layout = self.plan.stack, self.plan.layout
        parts = layout.tp if layout.sp else 1
        packing = BoundaryCodec(
            self.replaced,
            structure,
            dtype,
            parts,
            self.plan.tp_facts.stage_inputs,
            layout.tp,
            measured=self._sides,
        )
        if not packing.needed(boundaries):
            return None
        if layout.cp > 1 and not packing.sends_local_sequences(boundaries):
            what = "more than the hidden state goes from stage to stage, and how context parallelism splits it is "
            what += "not known"
            raise ScheduleError(Problem(what, structure.layers, remedy="run it without --context-parallel-size"))
        if self.plan.blocks:  # its layers read the config's hidden_size, which is what is sent then
            what = "more than the hidden state goes from stage to stage, and Megatron's layers know no more"
            remedy = "use another level than block, or no pipeline stages"
            raise ScheduleError(Problem(what, min(self.plan.blocks), remedy=remedy))
        batch, length = batch_shape
        for rows in (batch, self.eval_micro_batch_size or batch):
            packing.fit(boundaries, rows, length // layout.cp)
        return packing

    def sent_width(self, packing: BoundaryCodec | None) -> int:
        """Returns the width w of the tensors that stages send, [s, b, w].

        Args:
            packing: as ``packing`` returns it. Without it the width is that of the hidden state, which may be
                wider than the config's: there are architectures with several residual streams.
        """
        structure = self.plan.stack
        width = structure.hidden.dims[2] if packing is None else packing.width
        assert isinstance(width, int)
        return width

    def with_layout(self, layout: ParallelDims) -> Session:
        """Returns a session of this model in another layout, sharing all that does not depend on the layout.

        Args:
            layout: with CP like this one's, or without like this one's: under CP definitions make other masks.

        Raises:
            ConfigError, ScheduleError: the schedule can't be used with this layout.
            ValueError: one of the layouts has CP, and the other has not.
        """
        own = self.schedule.layout
        if (own.cp > 1) != (layout.cp > 1):
            raise ValueError(f"a session of {own} is none for {layout}: one of them splits sequences")
        return _open(self.known, layout, self.vocab_multiple // own.tp)

    def copy_of_definition(self) -> Any:
        """Returns a copy of the definition (replacements made) for one stage to take apart."""
        return copy_module(self.replaced)


@collector_paused()
def open_session(
    schedule: str,
    hf_model: str,
    layout: ParallelDims,
    *,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    objective: str | None = None,
    adapter: str | None = None,
    make_vocab_size_divisible_by: int = 128,
) -> Session:
    """Loads the config, definition, adapter and schedule of a run.

    Args:
        schedule: the value of ``--model-schedule``.
        hf_model: the value of ``--hf-model``; only its config is read.
        layout: the layout of the flags.
        overrides: ``key=value`` for the HF config.
        trust_remote_code: run Python code that comes with the model.
        objective: the value of ``--objective``.
        adapter: the value of ``--adapter``.
        make_vocab_size_divisible_by: Megatron's flag; vocabularies are padded to a multiple of it times TP.

    Raises:
        ConfigError, ScheduleError: whatever can't be used as given.
    """
    if layout.cp > 1:
        registry.apply("zigzag_positions")
    known = open_definition(
        schedule,
        hf_model,
        overrides,
        trust_remote_code=trust_remote_code,
        objective=objective,
        adapter=adapter,
    )
    return _open(known, layout, make_vocab_size_divisible_by)


def _open(known: ScheduledDefinition, layout: ParallelDims, make_vocab_size_divisible_by: int) -> Session:
    root = known.apply(layout)
    made = prepare(root, known.definition, structure=known.structure)
    vocab_multiple = make_vocab_size_divisible_by * layout.tp
    return Session(known.definition, root, made.model, made.replaced, vocab_multiple, known, made.structure)


def _refuse_changed_state(plan: Plan) -> None:
    """Raises ScheduleError where a forward changes parameters or buffers, which would differ by replica then."""
    structure = plan.structure
    if structure is not None:
        _refuse_by_replica(plan, "a forward", structure.changed_parameters, structure.changed_buffers)


def _refuse_by_replica(plan: Plan, run: str, parameters: Mapping[str, bool], buffers: Sequence[str]) -> None:
    if max(plan.layout.data_parallel_size, plan.layout.cp) == 1:
        return
    by_inputs = [name for name, given in parameters.items() if given]
    for kind, names in (("parameters", by_inputs), ("buffers", buffers)):
        if names:
            what = f"{run} changes {kind} ({_first(names)}), and each replica would come to others of its own"
            raise ScheduleError(Problem(what, names[0].rpartition(".")[0], remedy="run it without DP and CP"))


def refuse_changes_of_evaluation(session: Session, *, saves: bool) -> None:
    """Refuses evaluations amid training that change what training leaves alone: by replica, or in a checkpoint.

    RWKV, for one, divides weights when it evaluates, and multiplies them again at its next training forward: a
    checkpoint made between the two would hold the divided ones. Of a model that can't be evaluated on meta nothing
    is known, and it has to be whole on each rank.

    Args:
        saves: whether the run writes checkpoints.

    Raises:
        ConfigError: a checkpoint would hold changed parameters.
        ScheduleError: each replica would come to parameters or buffers of its own, or nothing is known of a model
            that is split over ranks.
    """
    plan = session.plan
    if plan.structure is None:
        return
    try:
        parameters, buffers = changed_by_evaluation(session.replaced, plan.structure)
    except ScheduleError as error:
        dims = plan.layout
        if max(dims.tp, dims.pp, dims.cp, dims.ep) == 1:
            return
        problem = error.problems[0]
        what = f"what it computes when it evaluates is not known: {problem.what}"
        remedy = "run it without --eval-interval, or without TP, PP, CP and EP"
        raise ScheduleError(replace(problem, what=what, remedy=remedy)) from error
    _refuse_by_replica(plan, "an evaluation", parameters, buffers)
    if saves and parameters:
        raise ConfigError(
            f"--save beside --eval-interval: an evaluation changes parameters ({_first(sorted(parameters))}) "
            "until the next training step, and a checkpoint between the two would hold them so; run it without "
            "--eval-interval, or have the model's config leave them alone (RWKV: --hf-override rescale_every=0)"
        )


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
