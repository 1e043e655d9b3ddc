"""Makes one pipeline stage of a scheduled model a plain module, for pipelines that are not Megatron's.

What goes in and out is tensors alone, so ``torch.distributed.pipelining`` can send them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from megasched.analysis.analysis_cache import AnalysisCache, usual_length
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.definition.build import keep_no_cache
from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.errors import Problem, ScheduleError
from megasched.language.schedule import Schedule
from megasched.layers.wrap import Forward, wrap_forward
from megasched.lowering.build import lower_model, plan_model
from megasched.lowering.groups import refuse_unscheduled
from megasched.lowering.lower import lower_sequence_boundaries
from megasched.lowering.whole_sequences import SplitSequences, one_sequence_rows
from megasched.plan.pipeline import balance, cuts_asked_for, layer_costs
from megasched.plan.plan import Plan
from megasched.trainer.stages.refused_stages import refuse_stages
from megasched.trainer.stages.shared_parameters import shared_parameters, stages_of
from megasched.trainer.stages.stage import Stage, StageEnd, capture_stage_inputs, hollow_out_stage, set_entry
from megasched.trainer.stages.stage_transfer import StageBuffers
from megasched.trainer.stages.stage_trial import why_not_stages

type Loss = Callable[[torch.Tensor, Any], torch.Tensor]


class StageModule(nn.Module):
    """Runs the definition's own forward for the layers of one stage; the others are hollow.

    The first stage takes token ids [b, s]; a later one the hidden state [b, s, h] ([b, s / tp, h] under sequence
    parallelism, and s / cp under context parallelism), and what else crosses the cut, in the order in which the
    stage before returned it. The last one returns logits [b, s, v], whole on each rank.

    Attributes:
        definition: the model; its parameters on this stage have HF's names.
        plan: the plan of the whole model.
        stage: the layers that live here.
        index: number of the stage.
        sequences: what has a rank run its part of them; None without context parallelism.
    """

    def __init__(self, definition: nn.Module, plan: Plan, stages: Sequence[Stage], index: int) -> None:
        super().__init__()
        self.definition, self.plan, self.stage = definition, plan, stages[index]
        self.structure: LayerStack = plan.stack
        self.index, self.buffers_between = index, StageBuffers()
        self.sequences: SplitSequences | None = None
        self._owners = shared_parameters(plan, stages)

    @cached_property
    def shared(self) -> dict[str, int]:
        """Maps the names of this stage's parameters that others hold, too, to the first stage that does."""
        own = (name for name, _ in self.definition.named_parameters())
        names = {f"definition.{name}": self.plan.canonical.get(name) for name in own}
        return {name: self._owners[of] for name, of in names.items() if of in self._owners}

    @property
    def copies(self) -> frozenset[str]:
        """Returns the names of parameters that an earlier stage holds as well, such as a tied head."""
        return frozenset(name for name, owner in self.shared.items() if owner != self.index)

    def forward(self, *given: Any) -> Any:
        """Runs one micro-batch of tensors, or of a tuple of them; see the class.

        Raises:
            ValueError: the first stage is given more than token ids.
        """
        received: Sequence[torch.Tensor] = given[0] if isinstance(given[0], tuple) else given
        if self.stage.first and len(received) > 1:
            raise ValueError(
                f"the first stage takes token ids [b, s] alone, and was given {len(received)} tensors"
            )
        sequences = self.sequences
        if sequences is not None and self.stage.first:
            received = (sequences.ids(received[0]),)
        between, first = self.buffers_between, received[0]
        between.open, between.device = True, first.device
        split = self.plan.layout.sp and not self.stage.first
        between.batch, between.length = first.shape[0], first.shape[1] * (self.plan.layout.tp if split else 1)
        between.dtype = self._computes_in(first)
        try:
            given = {"input_ids": self._take(received), "use_cache": False}
            # torch 2.11 refuses logits with gaps between them, as those of a padded vocabulary have.
            if sequences is None:
                return self.definition(**given).logits.contiguous()
            with sequences.running(between.batch):
                given |= sequences.positions(between.batch, between.length, first.device)
                return sequences.logits(self.definition(**given).logits).contiguous()
        except StageEnd as end:
            crossing = self.structure.stage_inputs_at(self.stage.stop)
            sent = tuple(one.contiguous() for one in (end.hidden, *(between.values[one] for one in crossing)))
            return sent if crossing else sent[0]
        finally:
            between.clear()

    def _computes_in(self, first: torch.Tensor) -> torch.dtype:
        """Returns the dtype of parameters as they compute: trainers cast what was built, or cast as it runs."""
        cast = first.is_floating_point() and not self.structure.hidden.fixed
        return first.dtype if cast else next(self.parameters()).dtype

    def _take(self, received: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts what the stage before sent in its places, and returns the token ids, or zeros of their shape."""
        if self.stage.first:
            return received[0]
        for tensor in received:
            if tensor.requires_grad:
                tensor.register_hook(torch.Tensor.contiguous)  # it is sent back
        between, start = self.buffers_between, self.stage.start
        between.received = received[0]
        between.values.update(zip(self.structure.stage_inputs_at(start), received[1:], strict=True))
        between.values.update((one, received[0]) for one in self.structure.stage_inputs_in_hidden(start))
        dummy = torch.zeros((between.batch, between.length), dtype=torch.long, device=between.device)
        read = self.structure.token_ids
        return dummy if read is None else between.values.setdefault(read, dummy)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the definition's own forward, which shifts the labels [b, s] itself."""
        model: Any = self.definition
        size = model.config.get_text_config().vocab_size
        loss: torch.Tensor = model.loss_function(logits=logits, labels=labels, vocab_size=size)
        return loss

    def sum_shared_gradients(self) -> None:
        """Sums the gradients of parameters that the first and the last stage hold, such as tied embeddings.

        Each rank calls it after the backward passes of a step, where any stage shares parameters. Frozen ones have
        no gradient.
        """
        from megatron.core import parallel_state

        for name in self.shared:
            parameter = self.get_parameter(name)
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            assert gradient is not None, f"{name} has no gradient: no backward pass has run"
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            torch.distributed.all_reduce(local, group=parallel_state.get_embedding_group())


def build_stage(schedule: Schedule, index: int | None = None, count: int | None = None) -> StageModule:
    """Carries out a schedule on one pipeline stage of its model, in place, and returns that as a module.

    Stages end where the schedule's ``cut_pipeline_stage`` says, or so that the forward's FLOPs are balanced.

    Args:
        schedule: of an HF causal language model; ``materialize`` fills weights that are deferred.
        index: number of the stage; by default that of Megatron's pipeline group.
        count: number of all stages; by default the size of that group.

    Raises:
        ScheduleError: with every problem found, such as layers that can't be cut into stages.
    """
    from megatron.core import parallel_state

    refuse_unscheduled(schedule)
    index = parallel_state.get_pipeline_model_parallel_rank() if index is None else index
    count = parallel_state.get_pipeline_model_parallel_world_size() if count is None else count
    model: Any = schedule.mod
    if not hasattr(model, "config") or objective_of(model) is not CAUSAL_LM:
        what = f"stages are made of HF's causal language models, and this is a {type(model).__name__}"
        raise ScheduleError(Problem(what, remedy="train it without pipeline stages"))
    keep_no_cache(model)  # by the cache layers would tell each other where they are, beside their arguments
    with one_sequence_rows(schedule.layout):
        plan, runs = plan_model(schedule, staged=True)
        _refuse(model, plan, runs)
        stages = _stages(schedule, plan, runs, count)
    structure = plan.stack
    _refuse_other_ties(plan, stages)
    _refuse_other_ranks(model, plan, stages, index)
    found = StageModule(model, plan, stages, index)
    dtype = next(model.parameters()).dtype
    stage, between = found.stage, found.buffers_between
    hollow_out_stage(model, structure, stage, between, dtype)
    held = partial(stage.holds, structure)
    context = lower_model(schedule, plan, found, held)
    if context.context_parallel is not None:
        found.sequences = SplitSequences(plan, context.context_parallel)
    set_entry(model, structure, stage, between)
    lower_sequence_boundaries(model, context, held, first=stage.first, last=stage.last)
    capture_stage_inputs(model, structure, stage, between)
    _leave_at_the_next(model, structure, stage)
    return found


def _refuse(model: Any, plan: Plan, runs: AnalysisCache) -> None:
    """Raises ScheduleError where the layers can't be cut into stages."""
    refuse_stages(plan, model.config)
    if plan.stack.recorded:
        what = "its loss takes more than the logits, which are all that a stage returns: what HF's hooks record"
        path = plan.stack.recorded[0].path
        raise ScheduleError(
            Problem(what, path, remedy="config.output_router_logits = False, or no pipeline stages")
        )
    trial = model, plan.stack.trial_inputs(), plan.stack
    why_not = why_not_stages(model, plan.stack, lambda: runs.tape_of(*trial), lambda: runs.ways(*trial))
    if not why_not and plan.stack.hidden.dims[:2] != ("b", "s"):
        why_not = f"the hidden state is {list(plan.stack.hidden.dims)}, and [b, s, ...] is sent"
    if why_not:
        what = f"the layers can't be cut into pipeline stages: {why_not}"
        raise ScheduleError(Problem(what, plan.stack.layers, remedy="train it without pipeline stages"))


def _stages(schedule: Schedule, plan: Plan, runs: AnalysisCache, count: int) -> list[Stage]:
    structure, model = plan.stack, schedule.mod
    if count > structure.count:
        what = f"{count} stages for {structure.count} layers"
        raise ScheduleError(Problem(what, structure.layers, remedy=f"at most {structure.count} stages"))
    layers = cuts_asked_for(schedule, structure, count)
    if layers is None:
        length = usual_length(model)
        inputs = objective_of(model).trial_inputs(model.config, 1, length)
        layers = balance(*layer_costs(runs.forward_flops(model, inputs, structure), length), count)
    bounds = pairwise(accumulate(layers, initial=0))
    return [Stage(start, stop, start == 0, stop == structure.count) for start, stop in bounds]


def _refuse_other_ties(plan: Plan, stages: Sequence[Stage]) -> None:
    """Raises ScheduleError where other stages than the first and the last hold one parameter."""
    ends = {0, len(stages) - 1}
    for canonical, at in stages_of(plan, stages).items():
        if len(at) > 1 and at != ends:
            what = f"stages {sorted(at)} hold it, and gradients are summed over the first and the last stage alone"
            raise ScheduleError(Problem(what, canonical, remedy="train it without pipeline stages"))


def _refuse_other_ranks(model: nn.Module, plan: Plan, stages: Sequence[Stage], index: int) -> None:
    """Raises ScheduleError where a stage with trained ties is on another rank than those that sum their gradients.

    Schedules that go through the ranks and back (torch's ``ScheduleZBVZeroBubble``) have the first and the last
    stage on one rank: that would wait for others, or sum nothing.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_pipeline_model_parallel_rank()
    size, last = parallel_state.get_pipeline_model_parallel_world_size(), len(stages) - 1
    ties = [name for name in shared_parameters(plan, stages) if model.get_parameter(name).requires_grad]
    if not ties or (size > 1 and {0: 0, last: size - 1}.get(index, rank) == rank):
        return
    what = (
        f"stages 0 and {last} hold it, and its gradients are summed over the first and the last of the pipeline's "
    )
    what += f"ranks; here stage {index} is on rank {rank} of {size}"
    remedy = (
        "stage i on rank i % ranks (Schedule1F1B, ScheduleInterleaved1F1B), or untie them (tie_word_embeddings)"
    )
    raise ScheduleError(Problem(what, ties[0], remedy=remedy))


def _leave_at_the_next(model: nn.Module, structure: LayerStack, stage: Stage) -> None:
    """Makes the forward end at the call of the hollow layer after the stage, with what the last layer returned.

    Hooks after the last layer, such as those of FSDP2, have run then.
    """
    if stage.last:
        return
    held: list[torch.Tensor] = []

    def kept(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        held[:] = [structure.slot.result(output)]
        return output

    def left(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(held.pop())

    last, following = structure.last_before(stage.stop), structure.called or range(structure.count)
    assert last is not None
    wrap_forward(model.get_submodule(structure.layer_path(last)), kept)
    after = next(layer for layer in following if layer >= stage.stop)
    wrap_forward(model.get_submodule(structure.layer_path(after)), left)
