"""Runs Megatron's own trainer for a few steps in the rank pool, and puts together what the ranks saw.

``train`` runs on every rank of a case and returns what that rank saw: losses, gradients, logits, weights.
``gather`` puts the shards of all ranks together under HF names; ``reference.hf_step`` computes the same numbers
in plain torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from megasched.analysis.find_layer_stack import changed_by_evaluation
from megasched.analysis.recording.meta_call import example_inputs, meta_copy, run_on_meta
from megasched.attributes import Undo, undo_all, wrap_attribute
from megasched.definition.objectives import CAUSAL_LM
from megasched.definition.sequence_split import Zigzag
from megasched.errors import ScheduleError
from megasched.trainer import entry
from megasched.trainer.current_session import get_session
from megasched.trainer.flags.rehearsal import rehearsal_flags
from megasched.verify.lora import telling_adapters
from megasched.verify.plain.draws import MeanDraws
from megasched.verify.plain.watching import Watch, silence
from megasched.verify.ranks.pool import cache_folder
from megasched.verify.recording import (
    Look,
    PlanFacts,
    RankReport,
    Serving,
    components_of,
    record_batches,
    record_logits,
)

VOCABULARY = 99  # divides by no TP: the embedding is padded
SEQUENCE = 16

RUN_FLAGS = (
    f"--seq-length {SEQUENCE} --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 "
    f"--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --mock-data "
    "--split 100,0,0 --eval-iters 0 --log-interval 1 --num-dataset-builder-threads 1 "
    "--no-mmap-bin-files --make-vocab-size-divisible-by 4 "
    # Some gradients are zero but for rounding (a key's bias); a larger epsilon keeps Adam from blowing that up.
    "--adam-eps 1e-5"
).split()

# Without --eval-interval a validation is made after the last step alone.
VALIDATION_FLAGS = ["--split", "90,10,0", "--eval-iters", "1"]

_chunks: list[Any] = []


def train(
    hf_model: str,
    flags: list[str],
    *,
    iterations: int,
    schedule: str = "auto",
    random_init: bool = True,
    tokens: tuple[int, int] | None = None,
    script: str = CAUSAL_LM.script,
    mock_data: bool = True,
    mask: bool = False,
    as_it_is: bool = False,
    look: Look | None = None,
    rehearse: bool = True,
    mean_draws: bool = False,
) -> RankReport:
    """Runs Megatron's trainer on this rank and returns what it saw; see ``run_trainer``.

    Args:
        tokens: half-open range of token ids for the batches; None for those of Megatron's mock data.
        mask: of ``pretrain_gpt``: count only some labels, not as many in each micro-batch and part of a sequence.
        as_it_is: count the label of the last position, too, which HF does not look at; launched runs do.
        look: watch what every module takes and gives; adapters are those that ``telling_adapters`` makes.
        rehearse: with flags for a CPU; otherwise this rank has a GPU.
        mean_draws: as ``MeanDraws``; so does a look that is silent.
    """
    from megasched.launch import pretrain_gpt, pretraining

    entry.apply_patches()  # first: they look at the functions that are recorded
    report = RankReport()
    serving = None if look is None else Serving(look, report, lambda chunk: _watch(_chunks[chunk]))
    undos = [
        _record_steps(report, serving, mean_draws),
        *([] if look is None else _record_validation(report)),
        _record_finalized_gradients(report, 0 if look is None else look.step),
        *record_logits(report, look is not None),
    ]
    if serving is None:
        undos.append(record_batches(pretrain_gpt, report, tokens, mask, as_it_is))
    else:
        undos += serving.install(pretrain_gpt if script == CAUSAL_LM.script else pretraining)
    try:
        with telling_adapters() if look is not None else nullcontext():
            options: dict[str, Any] = {"schedule": schedule, "random_init": random_init, "script": script}
            options["rehearse"] = rehearse
            run_trainer(hf_model, flags, iterations=iterations, mock_data=mock_data, **options)
    finally:
        undo_all(undos)
    report.note_ranks()
    report.weights = _shards(_chunks, _value)
    report.weight_copies = _copies(_chunks, _value)
    report.buffers = _buffers(_chunks) if look is not None else {}
    _chunks.clear()
    return report


def run_trainer(
    hf_model: str,
    flags: list[str],
    *,
    iterations: int,
    schedule: str = "auto",
    random_init: bool = True,
    script: str = CAUSAL_LM.script,
    mock_data: bool = True,
    rehearse: bool = True,
) -> None:
    """Runs Megatron's trainer on this rank as ``python -m megasched`` would.

    Args:
        random_init: initialise the weights instead of reading them from ``hf_model``.
        script: bundled entry script, without ``.py``.
        mock_data: whether batches are Megatron's mock data, or of the ``--data-path`` in ``flags``.
        rehearse: with flags for a CPU; otherwise this rank has a GPU.
    """
    entry.apply_patches()
    entry.set_builder()
    given = RUN_FLAGS if mock_data else [flag for flag in RUN_FLAGS if flag != "--mock-data"]
    argv = [*given, "--model-schedule", schedule, "--hf-model", hf_model, "--train-iters", str(iterations)]
    argv += ["--data-cache-path", str(cache_folder()), *flags]
    argv += ["--allow-unverified", *(["--hf-random-init"] if random_init else [])]  # it is what verifies
    module = importlib.import_module(f"megasched.launch.{script}")
    sys.argv = [f"{script}.py", *(rehearsal_flags(argv).argv if rehearse else argv)]
    module.main()


def _record_steps(report: RankReport, serving: Serving | None, mean_draws: bool) -> Undo:
    silent = serving is not None and serving.look.silent
    drawing: AbstractContextManager[Any] = nullcontext()

    def train_step(real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        nonlocal drawing
        if not _chunks:
            from megatron.core.utils import unwrap_model

            _chunks.extend(unwrap_model(kwargs["model"] if "model" in kwargs else args[2]))
            for chunk in _chunks if silent else ():
                silence(chunk.definition)
            if (mean_draws or silent) and _draws(get_session().definition):
                drawing = MeanDraws()
        if serving is not None and report.iterations == serving.look.step:
            report.before = _shards(_chunks, _value)
        with drawing:
            result = real(*args, **kwargs)
        if serving is not None:
            serving.close()
            report.facts = _facts(_chunks[0])
        report.iterations += 1
        loss, norm = result[0].get("lm loss"), result[5]
        if loss is not None:
            report.losses.append(float(loss))
        report.grad_norms.append(float(norm))
        return result

    return wrap_attribute("megatron.training.training:train_step", train_step)


def _draws(definition: Any) -> bool:
    """Returns whether a definition draws random numbers while it trains, with its dropouts off."""
    copied = meta_copy(definition)
    silence(copied)
    inputs = example_inputs(copied)
    if inputs is None:
        return False
    with MeanDraws() as mode:
        run_on_meta(copied, inputs)
    return mode.drawn


def _record_validation(report: RankReport) -> list[Undo]:
    """Notes the loss of a validation; none is made that would change the model, or of which that is not known."""
    made = []  # a test set follows, whose batches would be others

    def evaluate(real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        loss = result[0].get("lm loss")
        report.validation = None if loss is None else float(loss)
        return result

    def evaluate_and_print_results(real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        session, changes = get_session(), True
        if made:
            return
        made.append(args)
        with suppress(ScheduleError):
            structure = session.plan.structure
            changes = structure is None or any(changed_by_evaluation(session.replaced, structure))
        if not changes:
            real(*args, **kwargs)

    training = "megatron.training.training"
    return [
        wrap_attribute(f"{training}:evaluate", evaluate),
        wrap_attribute(f"{training}:evaluate_and_print_results", evaluate_and_print_results),
    ]


def _watch(chunk: Any) -> Watch:
    structure, stage = chunk.plan.structure, chunk.stage
    paths = [path for path, _ in chunk.definition.named_modules() if path and stage.holds(structure, path)]
    return Watch(chunk.definition, paths)


def _facts(chunk: Any) -> PlanFacts:
    plan, structure = chunk.plan, chunk.plan.structure
    return PlanFacts(
        layers=tuple(structure.layer_path(index) for index in structure.called or range(structure.count)),
        cuts=dict(plan.cuts),
        components=components_of(plan),
        dropouts=tuple(path for path, m in chunk.definition.named_modules() if isinstance(m, torch.nn.Dropout)),
        records=tuple((record.path, str(record), record.source) for record in plan.records),
        adapters=tuple(plan.records_where(lambda primitive: primitive.chooses_trained)),
    )


def _record_finalized_gradients(report: RankReport, step: int) -> Undo:
    def finalize(real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if report.iterations == step:
            report.gradients = _shards(_chunks, _gradient)
            report.copies = _copies(_chunks, _gradient)
        return result

    return wrap_attribute("megatron.training.training:finalize_model_grads", finalize)


def _gradient(parameter: Any) -> torch.Tensor:
    """Returns the gradient that Megatron has summed for a parameter; zeros for one that is not trained."""
    return parameter.main_grad.detach().clone() if parameter.requires_grad else torch.zeros_like(parameter)


def _value(parameter: Any) -> torch.Tensor:
    value: torch.Tensor = parameter.detach().clone()
    return value


def _shards(chunks: list[Any], take: Callable[[Any], torch.Tensor]) -> dict[str, tuple[torch.Tensor, Any]]:
    """Maps names of placements to (this rank's shard, placement), without the second copy of a tie."""
    found: dict[str, tuple[list[torch.Tensor], Any]] = {}
    for chunk in chunks:
        placements = {placement.name: placement for placement in chunk.plan.placements.values()}
        for parameter, assembly in chunk.local_parameters().values():
            if getattr(parameter, "shared", False):
                continue
            pieces = assembly.split(take(parameter), chunk.shard_owner(assembly, 0).size)
            for part, piece in zip(assembly.parts, pieces, strict=True):
                found.setdefault(part.name, ([], placements[part.name]))[0].append(piece)
    # Entries of one tensor come one by one, in their order.
    return {
        name: (pieces[0] if len(pieces) == 1 else torch.cat(pieces), placement)
        for name, (pieces, placement) in found.items()
    }


def _copies(chunks: list[Any], take: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Maps names of placements to the second copy of a tie, or to another parameter that stages share."""
    return {
        assembly.parts[0].name: take(parameter)
        for chunk in chunks
        for parameter, assembly in chunk.local_parameters().values()
        if getattr(parameter, "shared", False)
    }


def _buffers(chunks: list[Any]) -> dict[str, tuple[torch.Tensor, Any]]:
    """Returns the floating-point buffers of the modules that live on this rank, with their placements."""
    return {
        chunk.plan.renamed.get(name, name): (buffer.detach().clone(), chunk.plan.placements.get(name))
        for chunk in chunks
        for name, buffer in chunk.definition.named_buffers()
        if buffer.is_floating_point() and chunk.stage.holds(chunk.plan.structure, name.rpartition(".")[0])
    }


def gather(reports: list[RankReport], what: str, tp: int) -> dict[str, torch.Tensor]:
    """Returns whole tensors by HF name, from the shards of DP rank 0; for experts, of expert DP rank 0."""
    found: dict[str, list[torch.Tensor | None]] = {}
    placements = {}
    ep = 1 + max(report.ep_rank for report in reports)
    for report in reports:
        for name, (shard, placement) in getattr(report, what).items():
            expert = placement.group == "ep"
            if report.expert_dp_rank if expert else report.dp_rank:
                continue
            rank, size = (report.ep_rank, ep) if expert else (report.tp_rank, tp)
            found.setdefault(name, [None] * size)[rank] = shard
            placements[name] = placement
    return {name: placements[name].unshard(shards) for name, shards in found.items()}


def losses(reports: list[RankReport]) -> list[float]:
    """Returns the mean loss of each iteration, which every last stage reports alike."""
    return next(report.losses for report in reversed(reports) if report.losses)


def batches_of(reports: list[RankReport], iteration: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns (tokens, labels) of each micro-batch of an iteration, over all DP ranks, as whole sequences."""

    def seen(own: list[RankReport], field: int) -> list[torch.Tensor]:
        columns = [
            (r.cp_rank, [b[field] for b in r.batches if b[0] == iteration and b[field] is not None]) for r in own
        ]
        return _joined([column for column in columns if column[1]])

    found = []
    for rank in sorted({report.dp_rank for report in reports}):
        own = [report for report in reports if report.dp_rank == rank and report.tp_rank == 0]
        found += list(zip(seen(own, 1), seen(own, 2), strict=True))
    return found


def logits_of(reports: list[RankReport], iteration: int = 0) -> list[torch.Tensor]:
    """Returns the logits [b, s, v] of each micro-batch of an iteration, over all DP ranks, as whole sequences."""
    found = []
    for rank in sorted({report.dp_rank for report in reports}):
        own = [report for report in reports if report.dp_rank == rank and report.tp_rank == 0]
        found += _joined([(r.cp_rank, r.logits[iteration]) for r in own if iteration in r.logits])
    return found


def _joined(parts: list[tuple[int, list[Any]]]) -> list[torch.Tensor]:
    """Joins each CP rank's parts [b, s / cp, ...] to whole sequences, from the first list of every rank."""
    by_rank: dict[int, list[torch.Tensor]] = {}
    for rank, tensors in parts:
        by_rank.setdefault(rank, tensors)
    zigzag = Zigzag(len(by_rank), 0)
    columns = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
    return [
        zigzag.in_order(torch.cat([part.transpose(0, 1) for part in column])).transpose(0, 1) for column in columns
    ]
