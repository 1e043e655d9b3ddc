"""One case on the ranks: the definition planned and lowered as the trainer does it, beside plain Hugging Face."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from megasched import patches
from megasched.definition.sequence_split import Zigzag
from megasched.errors import MegaschedError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.replacements import ReplacedNames
from megasched.language.tensor_types import ShardDim
from megasched.plan.placement import Placement
from megasched.verify.parity import MOST_ROUNDING
from megasched.verify.ranks.pool import init_megatron
from tests.parity.operators.cases import Case, cases_of
from tests.parity.operators.definition import BLOCK, Model, make_model

TOLERANCE = 1e-5
FLOOR = 1e-2  # of the largest gradient: one that is zero in exact arithmetic is noise
LAYOUTS = {
    "tp2": ParallelDims(tensor_model_parallel_size=2, micro_batch_size=2),
    "tp2-sp": ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True, micro_batch_size=2),
    "cp2": ParallelDims(context_parallel_size=2, micro_batch_size=2),
}

Kind = Literal["equal", "refused", "wrong", "crash", "no case"]
Numbers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """What became of a case; ``cut`` tells whether the columns stayed cut."""

    case: str
    kind: Kind
    why: str = ""
    cut: bool = False


class NoCase(Exception):
    """Plain Hugging Face has no numbers to compare with."""


def check(case: Case, layout: ParallelDims) -> Verdict:
    """In a rank of the layout: one step, its loss and every gradient."""
    try:
        model, want = _expected(case)
        if model.in_16_bits and layout.cp > 1:
            raise NoCase("a rank's share of a gradient is rounded otherwise in 16 bits")
    except NoCase as none:
        return Verdict(str(case), "no case", str(none))
    cut = False
    try:
        scheduled = _scheduled(model, layout)
        cut = layout.tp > 1 and not scheduled.plan.tp_facts.gather
        why = _differences(_step(scheduled, model, layout), want)
        if why:  # it may be rounding, of which there is little in float64
            exact = _scheduled(model, layout, torch.float64)
            why = _differences(_step(exact, model, layout), plain_step(model, torch.float64)) and why
    except MegaschedError as error:
        return Verdict(str(case), "refused", " ".join(str(error).split()))
    except Exception:  # whatever it is, nobody was told why
        return Verdict(str(case), "crash", traceback.format_exc(), cut)
    return Verdict(str(case), "wrong" if why else "equal", why, cut)


# --- plain Hugging Face


def _expected(case: Case) -> tuple[Model, Numbers]:
    try:
        model = make_model(case.call, case.tensors)
        for batch, length in ((2, 5), (3, 7), (1, 16)):  # a definition runs at any size
            model.plain()(input_ids=torch.zeros(batch, length, dtype=torch.long))
        want = plain_step(model)
        again, exact = plain_step(model), plain_step(model, torch.float64)
    except Exception as error:
        raise NoCase(f"{type(error).__name__}: {error}") from error
    if not all(value.isfinite().all() for value in want.values()):
        raise NoCase("not finite")
    if not want[f"{BLOCK}.ups.0.weight"].abs().max() > 0:
        raise NoCase("no gradient reaches the column")
    if any(not torch.equal(value, again[name]) for name, value in want.items()):
        raise NoCase("not the same twice")
    if max(_gaps(exact, want).values()) > MOST_ROUNDING:
        raise NoCase("what it gives hangs on rounding")
    return model, want


def plain_step(model: Model, dtype: torch.dtype = torch.float32) -> Numbers:
    """Loss and every gradient of the definition as it is."""
    definition = model.plain(dtype)
    torch.manual_seed(1)
    logits = definition(input_ids=model.ids).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), model.labels.flatten())
    loss.backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in definition.named_parameters()}
    return {**found, "loss": loss.detach()}


# --- scheduled


class _Values:
    """A source of weights (``megasched/weights/source.py``) of a model that is at hand."""

    def __init__(self, state: Numbers, dtype: torch.dtype) -> None:
        self._state = {name: v.to(dtype) if v.is_floating_point() else v for name, v in state.items()}

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        return placement.shard(self._state[placement.name], rank, size).clone()

    def buffer(self, name: str) -> torch.Tensor:
        return self._state[name]

    def check(self, names: Iterable[str]) -> None:
        pass


def _pairs(sch: Any, layout: ParallelDims) -> None:
    """The columns, and those rows that can be cut."""
    if layout.tp == 1:
        return
    for path, module in sch.root.mod.named_modules():
        if ".ups." in path:
            sch[path].shard("weight", axis=0)
        if ".downs." in path and module.in_features % layout.tp == 0:
            sch[path].shard("weight", axis=1)


def _scheduled(model: Model, layout: ParallelDims, dtype: torch.dtype = torch.float32) -> Any:
    """A ``ScheduledModel``, by way of the trainer's session."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megasched.analysis.find_layer_stack import layer_stack_of
    from megasched.layers import attention
    from megasched.lowering.prepare import ScheduledDefinition
    from megasched.trainer.scheduled_model import ScheduledModel
    from megasched.trainer.session import Session
    from megasched.trainer.stages.stage import Stage

    definition = model.on_meta(dtype)
    attention.enable(definition)
    structure = layer_stack_of(definition)
    known = ScheduledDefinition(definition, structure, "by hand", _pairs)
    session = Session(definition, known.apply(layout), definition, ReplacedNames(), layout.tp, known, structure)
    plan = session.plan
    config = TransformerConfig(
        num_layers=1,
        hidden_size=model.config.hidden_size,
        num_attention_heads=2,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        context_parallel_size=layout.cp,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    return ScheduledModel(
        config,
        session.copy_of_definition(),
        session.schedule,
        plan,
        Stage(0, 1, True, True),
        _Values(model.state, dtype),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).train()


def _step(scheduled: Any, model: Model, layout: ParallelDims) -> Numbers:
    """The same numbers as ``plain_step``."""
    from megatron.core import parallel_state

    torch.manual_seed(1)
    ids, labels = model.ids, model.labels
    if layout.cp > 1:
        zigzag = Zigzag(layout.cp, parallel_state.get_context_parallel_rank())
        ids, labels = (zigzag.local_sequence(whole, ShardDim(1)).contiguous() for whole in (ids, labels))
    loss = scheduled(ids, labels=labels).mean()
    loss.backward()
    found = {**_gradients(scheduled, layout), "loss": loss.detach()}
    if layout.cp > 1:
        for value in found.values():
            torch.distributed.all_reduce(value, group=parallel_state.get_context_parallel_group())
            value /= layout.cp
    return found


def _gradients(scheduled: Any, layout: ParallelDims) -> Numbers:
    """HF name -> gradient of the whole tensor; what Megatron sums over TP at the end is summed here."""
    found = {}
    for parameter, assembly in scheduled.local_parameters().values():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if layout.tp > 1 and getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient)
        for part, piece in zip(assembly.parts, assembly.split(gradient, layout.tp), strict=True):
            every = [torch.empty_like(piece) for _ in range(layout.tp)]
            if layout.tp > 1:
                torch.distributed.all_gather(every, piece.contiguous())
            else:
                every = [piece]
            found[part.name] = part.unshard(every)
    return found


# --- beside one another


def _differences(got: Numbers, want: Numbers) -> str:
    """What differs by more than the tolerance; empty where nothing does."""
    return ", ".join(f"{name} {gap:.1e}" for name, gap in _gaps(got, want).items() if not gap <= TOLERANCE)


def _gaps(got: Numbers, want: Numbers) -> dict[str, float]:
    """Largest difference of each, relative to its largest value."""
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    least = FLOOR * max(float(value.abs().max()) for name, value in want.items() if name != "loss")
    return {
        name: float((got[name] - value).abs().max()) / max(float(value.abs().max()), least)
        for name, value in want.items()
    }


# --- many


def check_all(layout_name: str, names: list[str], samples: int, every: int = 1) -> list[Verdict]:
    """In a rank: the cases of some operators, or each ``every``-th of them.

    Args:
        samples: as for ``cases_of``.
    """
    from megasched.trainer import entry

    entry.apply_patches()
    layout = LAYOUTS[layout_name]
    if layout.cp > 1:
        patches.apply("zigzag_positions")
    init_megatron(tp=layout.tp, cp=layout.cp)
    cases = [case for name in names for case in cases_of(name, samples)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [check(case, layout) for case in cases[::every]]
