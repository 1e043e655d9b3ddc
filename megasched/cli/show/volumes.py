"""Computes how much a step sends between ranks because of the layout, as far as a report's shapes tell."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Literal

import torch
from rich.table import Table

from megasched.cli.output import BYTES_16_BITS, format_bytes
from megasched.cli.show.communication import Transfer
from megasched.cli.show.modules import ModuleReport, ParameterReport
from megasched.cli.show.report import ShowReport
from megasched.planner.groups import CONTEXT, EXPERT, EXPERT_DATA, TENSOR
from megasched.planner.measure.parameter_counts import Count
from megasched.planner.replicas import gradient_transfers, parameter_transfers
from megasched.printing.tables import plain_table

# Names of torch's operations -> as `show` has them.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "reduce_scatter_base": "reduce_scatter",
    "allgather_base": "all_gather",
    "alltoall_base": "all_to_all",
}
LEGEND = (
    "In the whole model for one micro-batch (TP, CP, PP, EP) or one step (DP). Over EP with every expert as busy."
)
_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Volume:
    """Represents one kind of operation between ranks.

    Attributes:
        group: group of ranks that take part.
        what: modules to which it belongs, with ``*`` for indices of layers; or the tensor that is sent.
        op: e.g. ``all_reduce``.
        phase: ``forward``, ``backward`` or ``step``.
        times: number of operations in the whole model, for a micro-batch (for a step in the phase ``step``).
        values: number of values in the tensor of one operation; None where the shapes do not tell.
        value_bytes: bytes of a value.
    """

    group: Literal["TP", "CP", "PP", "EP", "DP"]
    what: str
    op: str
    phase: Literal["forward", "backward", "step"]
    times: int
    values: int | None
    value_bytes: int = BYTES_16_BITS

    @property
    def bytes(self) -> int | None:
        """Returns the bytes of all operations together; None where the shapes do not tell."""
        return None if self.values is None else self.times * self.values * self.value_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns the operations as plain data for JSON."""
        return {**asdict(self), "bytes": self.bytes}


def describe_volumes(report: ShowReport) -> list[Volume]:
    """Returns what is sent over the groups of TP, CP, PP, EP and DP."""
    of_tensors = [*_tensor_parallel(report), *_partial_gradients(report), *_sequence_parallel(report)]
    return [
        *of_tensors,
        *_computed_again(report, of_tensors),
        *_measured(report, CONTEXT, "CP", "other ranks' parts of sequences"),
        *_pipeline(report),
        *_measured(report, EXPERT, "EP", "pairs of token and expert"),
        *_data_parallel(report),
    ]


def volume_table(volumes: list[Volume]) -> Table:
    """Returns the table of what is sent, all modules together."""
    table = plain_table("over", "operation", "phase", "times", "together")
    for column in table.columns[3:]:
        column.justify = "right"
    found: dict[tuple[str, str, str], list[Volume]] = {}
    for volume in volumes:
        found.setdefault((volume.group, volume.op, volume.phase), []).append(volume)
    for key, alike in found.items():
        sizes = [volume.bytes for volume in alike if volume.bytes is not None]
        together = format_bytes(sum(sizes)) if len(sizes) == len(alike) else "not known"
        table.add_row(*key, str(sum(volume.times for volume in alike)), together)
    return table


def _tensor_parallel(report: ShowReport) -> list[Volume]:
    modules = {module.path: module for module in report.modules}
    counts: dict[tuple[str, Transfer, int | None], int] = {}
    frozen = _frozen_first(report)
    for module in report.modules:
        backward = module.path not in frozen
        for transfer in module.transfers:
            if transfer.op == "scatter" or not (backward or transfer.phase == "forward"):  # which sends nothing
                continue
            features = _features(modules, module, transfer)
            ranks = report.layout.cp if transfer.of_sequences else 1
            values = None if features is None else features * _tokens(report) * ranks
            key = (_INDEX.sub(".*", module.path), transfer, values)
            counts[key] = counts.get(key, 0) + module.calls
    return [
        Volume(
            "TP", f"{what}: {transfer.tensor}", transfer.op, transfer.phase, times, values, transfer.value_bytes
        )
        for (what, transfer, values), times in counts.items()
    ]


def _frozen_first(report: ShowReport) -> set[str]:
    """Returns the modules that no backward pass reaches: those of the first stage up to what is trained there."""
    first = (module for module in report.modules if module.stages[:1] in ((), (0,)))
    before = takewhile(lambda module: not any(one.trained for one in module.parameters), first)
    return {module.path for module in before}


def _partial_gradients(report: ShowReport) -> Iterator[Volume]:
    """Yields the sums of gradients of whole parameters, of which each rank computes a part.

    Under sequence parallelism Megatron sums them once in a step (``core/distributed/finalize_model_grads.py``).
    """
    counts: Counter[tuple[str, int]] = Counter()
    for module in () if report.layout.sp else report.modules:
        for parameter in module.parameters:
            if parameter.partial_gradient and parameter.tied_to is None:
                what = _INDEX.sub(".*", f"{module.path}.{parameter.name}")
                counts[what, math.prod(parameter.local_shape)] += 1
    for (what, values), times in counts.items():
        yield Volume("TP", f"{what}: gradient", "all_reduce", "backward", times, values)


def _tokens(report: ShowReport) -> int:
    """Returns the number of tokens in a micro-batch on one CP rank."""
    return report.sequence_length * report.layout.micro_batch_size // report.layout.cp


def _features(modules: dict[str, ModuleReport], module: ModuleReport, transfer: Transfer) -> int | None:
    """Returns the width of what is sent, mostly from the weight that reads or makes it; None without one."""
    if transfer.features is not None:
        return transfer.features
    path = f"{module.path}.{transfer.shared_by[0]}" if transfer.shared_by else module.path
    weight = next((p for p in modules[path].parameters if len(p.shape) == 2), None) if path in modules else None
    if weight is None:
        return None
    embedding = modules[path].kind in ("vocab", "features")
    return _sides(weight, embedding)[transfer.tensor == "output"]


def _sides(weight: ParameterReport, embedding: bool) -> tuple[int, int]:
    """Returns (in, out) of a weight, which HF keeps as [out, in], but ``Conv1D`` and embeddings as [in, out].

    Of a head that is padded, the padding is sent, too.
    """
    first, second = weight.shape
    return (first, second) if embedding or weight.transposed else (second, weight.padded or first)


def _sequence_parallel(report: ShowReport) -> Iterator[Volume]:
    """Yields what is sent where the hidden state is cut along the sequence, and where it becomes whole again."""
    if report.layout.sp:
        called = [module.calls for module in report.modules if module.path.rpartition(".")[0] == report.layers]
        values = report.hidden_size and _tokens(report) * report.hidden_size
        what = f"{report.layers}: hidden state"
        yield Volume("TP", f"{what}, whole again after the last", "all_gather", "forward", called[-1], values)
        layer = next(module.path for module in report.modules if module.path.rpartition(".")[0] == report.layers)
        if layer not in _frozen_first(report):
            yield Volume("TP", f"{what}, cut before the first", "all_gather", "backward", called[0], values)


def _pipeline(report: ShowReport) -> Iterator[Volume]:
    borders = len(report.stages) - 1
    values = report.sent_width and _tokens(report) * report.sent_width
    values = values // report.layout.tp if values and report.layout.sp else values
    if report.layout.pp > 1:
        yield Volume("PP", "hidden state to the next stage", "send", "forward", borders, values)
        yield Volume("PP", "its gradient to the stage before", "send", "backward", borders, values)


def _computed_again(report: ShowReport, told: Sequence[Volume]) -> Iterator[Volume]:
    """Yields what layers send once more as they are computed again: the rest of what the planner has measured.

    torch stops where nothing more is needed, so that the shapes do not tell which operations are repeated.
    """
    if report.step.prediction is None or not report.recomputes:
        return
    rest = Counter[tuple[str, int | None, int]]()
    for one, times in report.step.prediction.sent[1].items():
        if one.group == TENSOR:
            rest[_OPERATIONS[one.operation], one.values, one.itemsize] += times
    for volume in told:
        if volume.phase == "backward":
            rest[volume.op, volume.values, volume.value_bytes] -= volume.times
    for (op, values, size), times in (+rest).items():
        yield Volume(
            "TP", f"{report.layers}.*: once more, as it is computed again", op, "backward", times, values, size
        )


def missing_note(report: ShowReport) -> str:
    """Returns what the table lacks because it could not be measured, and why; empty where nothing is missing."""
    layout = report.layout
    missing = [f"over {name}" for name, ranks in (("CP", layout.cp), ("EP", layout.ep)) if ranks > 1]
    missing += ["as layers are computed again"] if report.recomputes and layout.tp > 1 else []
    if not report.step.why_not or not missing:
        return ""
    return f"not known is what is sent {' and '.join(missing)}: {report.step.why_not}"


def _measured(report: ShowReport, group: str, over: Literal["CP", "EP"], what: str) -> Iterator[Volume]:
    """Yields what the planner has measured that is sent in a group; of experts, with every one as busy."""
    prediction = report.step.prediction
    sent = prediction.sent if prediction else ()
    for phase, operations in zip(("forward", "backward"), sent, strict=False):
        for one, times in operations.items():
            if one.group == group:
                name, op = f"{report.layers}.*: {what}", _OPERATIONS[one.operation]
                yield Volume(over, name, op, phase, times, one.values, one.itemsize)


def _data_parallel(report: ShowReport) -> Iterator[Volume]:
    """Yields the gradients, and what a distributed optimizer gathers; those of experts are of fewer ranks."""
    layout, flags = report.layout, report.step.flags
    ranks = [[stage for stage in report.stages if stage.pp_rank == rank] for rank in range(layout.pp)]
    counts = [
        Count(sum(stage.gradients for stage in stages), sum(stage.expert_gradients for stage in stages))
        for stages in ranks
    ]
    count, sharded = max(counts, key=lambda count: count.trained), flags.use_distributed_optimizer
    for what, sent in (
        ("gradients", gradient_transfers(count, layout, flags.gradient_dtype, sharded=sharded)),
        ("parameters", parameter_transfers(count, layout, torch.bfloat16, sharded=sharded)),
    ):
        for one in sent:
            whose = f"{what} of experts" if one.group == EXPERT_DATA else what
            name, op = f"{whose} of the largest pipeline rank", _OPERATIONS[one.operation]
            yield Volume("DP", name, op, "step", 1, one.values, one.itemsize)
