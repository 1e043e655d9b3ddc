"""Keeps the batches and logits of a run on a rank, and can replace its batches by those of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from megasched.attributes import Undo, wrap_attribute
from megasched.language.records import Record
from megasched.plan.plan import Plan
from megasched.verify.plain.watching import Sightings, Watch
from megasched.verify.reference import IGNORED


@dataclass
class RankReport:
    """Holds what one rank saw of a run.

    Attributes:
        losses: mean loss of each iteration (last stage only).
        grad_norms: gradient norm of each iteration.
        validation: loss of a validation after the last iteration, of a run that was looked at (last stage only);
            None where none was made.
        gradients: HF name -> (shard of the first iteration's gradient, its placement); no copies of ties.
        weights: HF name -> (shard after the last iteration, placement).
        before: as ``weights``, before the iteration that was looked at; ``gradients`` are of that iteration then.
        buffers: floating-point buffers after the last iteration, of a run that was looked at: HF name -> (what
            this rank holds, its placement, or None where a plan places none, as it is whole).
        logits: iteration -> [b, s, v] of each micro-batch (last stage only); of the first iteration alone in a run
            that was not looked at.
        cp_rank: rank among those that share a sequence; tokens, labels and logits are of its part.
        ep_rank, expert_dp_rank: rank among those that shard experts, and among those that hold the same ones.
        batches: (iteration, tokens, labels) of each micro-batch, where this rank has them; masked labels are
            ``IGNORED``.
        sightings: inputs and outputs of this rank's modules in the micro-batch in which they were watched.
        copies, weight_copies: HF name -> gradient and weight of a further copy of a tied tensor.
        facts: facts of the plan, where modules were watched.
    """

    tp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    validation: float | None = None
    gradients: dict[str, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    weights: dict[str, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    before: dict[str, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    buffers: dict[str, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    batches: list[tuple[int, torch.Tensor | None, torch.Tensor | None]] = field(default_factory=list)
    iterations: int = 0
    cp_rank: int = 0
    ep_rank: int = 0
    expert_dp_rank: int = 0
    sightings: Sightings = field(default_factory=Sightings)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    weight_copies: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: PlanFacts | None = None

    def note_ranks(self) -> None:
        """Notes this rank's place in Megatron's groups."""
        from megatron.core import parallel_state

        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.cp_rank = parallel_state.get_context_parallel_rank()
        self.ep_rank = parallel_state.get_expert_model_parallel_rank()
        self.expert_dp_rank = parallel_state.get_expert_data_parallel_rank()


@dataclass(frozen=True)
class PlanFacts:
    """Holds the facts of a plan that tell where something has gone wrong.

    Attributes:
        layers: paths of the layers, as the model calls them.
        cuts: path of a module that is cut -> how.
        components: path of a module that is cut -> sizes of the projections packed into its output.
        dropouts: paths of ``nn.Dropout`` in the first chunk of a rank, in the order of the modules.
        records: path, what was asked for, and the ``file:line`` that asked, of each call of the schedule.
        adapters: the schedule's calls of ``adapt`` and ``unfreeze``.
    """

    layers: tuple[str, ...]
    cuts: dict[str, str]
    components: dict[str, tuple[int, ...]]
    dropouts: tuple[str, ...]
    records: tuple[tuple[str, str, str], ...]
    adapters: tuple[Record, ...]


def components_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Maps the path of each module that is cut to the sizes of the projections packed into its output."""
    packed = {
        path: plan.placement(path, "weight").components for path, cut in plan.cuts.items() if cut == "column"
    }
    return {path: sizes for path, sizes in packed.items() if sizes}


@dataclass
class Look:
    """Describes what a verified run trains on, and where its modules are watched.

    Attributes:
        batches: file as ``plain.runs.Batches`` writes it; micro-batches of DP rank 0 first.
        step, micro_batch: the one that is watched, counted over all DP ranks; gradients are of that step.
        silent: switch dropouts off, also those that no config field sets.
    """

    batches: str
    step: int = 0
    micro_batch: int = 0
    silent: bool = True


def record_batches(
    script: ModuleType, report: RankReport, tokens: tuple[int, int] | None, mask: bool, as_it_is: bool
) -> Undo:
    """Adds a script's batches to the report and returns the undo; see ``trainer_run.train`` for the arguments."""

    def get_batch(real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        for name in ("tokens", "labels") if tokens else ():
            if batch[name] is not None:
                batch[name] = _within(batch[name], *tokens)
        labels = batch["labels"]
        if labels is not None:
            counted = batch["loss_mask"] if as_it_is else _without_last(batch)
            batch["loss_mask"] = counted * ((labels % 7 < 2) if mask else 1)
            labels = labels.masked_fill(batch["loss_mask"] == 0, IGNORED)
        report.batches.append((report.iterations, batch["tokens"], labels))
        return batch

    return wrap_attribute(f"{script.__name__}:get_batch", get_batch)


def _without_last(batch: Any) -> torch.Tensor:
    """Returns the loss mask with nothing counted at the last position, where HF's classes do not look."""
    from megatron.core import mpu

    mask = batch["loss_mask"].clone()
    if mpu.get_context_parallel_rank() == 0 and batch.get("cu_seqlens") is None:
        mask[:, -1] = 0
    return mask


def _within(ids: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Maps ids into a range, in shuffled order, because mock data counts up."""
    order = torch.randperm(high - low, generator=torch.Generator().manual_seed(0))
    return low + order.to(ids.device)[ids % (high - low)]


def record_logits(report: RankReport, every_step: bool) -> list[Undo]:
    def recorded(
        real: Callable[..., torch.Tensor], self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if every_step or not report.iterations:
            report.logits.setdefault(report.iterations, []).append(self.whole(logits.detach().clone()))
        return real(self, logits, *args, **kwargs)

    losses = "megasched.trainer.losses"
    targets = (f"{losses}.loss:VocabParallelLoss.__call__", f"{losses}.definition_loss:DefinitionLoss.each")
    return [wrap_attribute(target, recorded) for target in targets]


# What the batch of pretrain_gpt.py and HF's forward call differently.
_OF_FORWARD = {"tokens": "input_ids"}


@dataclass
class Serving:
    """Serves the micro-batches of a file to a script, and has one of them watched.

    Attributes:
        watch: makes the watch of a model chunk, by its number on this rank.
    """

    look: Look
    report: RankReport
    watch: Callable[[int], Watch]

    def __post_init__(self) -> None:
        from safetensors.torch import load_file

        self._inputs = load_file(self.look.batches)
        self._labels = self._inputs.pop("labels")
        self._chunk = 0  # whose forward runs
        self._counts: dict[int, int] = {}  # of micro-batches that a chunk has had
        self._open: dict[int, Watch] = {}

    def install(self, script: ModuleType) -> list[Undo]:
        """Makes ``script.get_batch`` return the file's micro-batches, and returns the undos."""

        def forward_step(real: Callable[..., Any], iterator: Any, model: Any, **more: Any) -> Any:
            from megatron.core.utils import get_attr_wrapped_model

            self._chunk = get_attr_wrapped_model(model, "vp_stage") or 0
            return real(iterator, model, **more)

        return [
            wrap_attribute(f"{script.__name__}:forward_step", forward_step),
            wrap_attribute(f"{script.__name__}:get_batch", lambda real, *args: self._serve(real(*args))),
        ]

    def close(self) -> None:
        """Ends the watches after the last micro-batch of a step."""
        for chunk in list(self._open):
            self.report.sightings.merge(self._open.pop(chunk).close())

    def _serve(self, batch: Any) -> Any:
        from megatron.core import mpu
        from megatron.core.utils import get_batch_on_this_cp_rank

        chunk = self._chunk
        number = self._counts.get(chunk, 0)
        self._counts[chunk] = number + 1
        replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        each = self._labels.shape[1] // replicas
        step, place = number // each, replica * each + number % each
        served = step % len(self._labels)  # a validation gets the batches of the first step
        if chunk in self._open:
            self.report.sightings.merge(self._open.pop(chunk).close())
        if (step, place) == (self.look.step, self.look.micro_batch):
            self._open[chunk] = self.watch(chunk)
        labels = self._labels[served, place]
        own = {name: values[served, place] for name, values in self._inputs.items()}
        own |= {"labels": labels.clamp_min(0), "loss_mask": labels != IGNORED}
        cut = get_batch_on_this_cp_rank(own, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
        found = dict(batch)
        for name, held in batch.items():
            given = cut.get(_OF_FORWARD.get(name, name))
            if given is not None and held is not None:
                found[name] = given.to(held.dtype)
        return found
