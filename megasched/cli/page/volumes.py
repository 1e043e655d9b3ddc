"""Computes how much a step sends between ranks because of the layout, as far as a report's shapes tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megasched.cli.output import BYTES_16_BITS, BYTES_32_BITS
from megasched.cli.show.communication import Transfer
from megasched.cli.show.modules import ModuleReport, ParameterReport
from megasched.cli.show.report import ShowReport

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

    group: Literal["TP", "PP", "DP"]
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


def describe_volumes(report: ShowReport) -> list[Volume]:
    """Returns what is sent over the groups of TP, PP and DP, without that of experts and context parallelism."""
    return [*_tensor_parallel(report), *_sequence_parallel(report), *_pipeline(report), *_data_parallel(report)]


def _tensor_parallel(report: ShowReport) -> list[Volume]:
    modules = {module.path: module for module in report.modules}
    counts: dict[tuple[str, Transfer, int | None], int] = {}
    for module in report.modules:
        for transfer in module.transfers:
            features = _features(modules, module, transfer)
            values = None if features is None else features * _tokens(report)
            key = (_INDEX.sub(".*", module.path), transfer, values)
            counts[key] = counts.get(key, 0) + module.calls
    return [
        Volume("TP", f"{what}: {transfer.tensor}", transfer.op, transfer.phase, times, values)
        for (what, transfer, values), times in counts.items()
    ]


def _tokens(report: ShowReport) -> int:
    """Returns the number of tokens in a micro-batch on one CP rank."""
    return report.sequence_length * report.layout.micro_batch_size // report.layout.cp


def _features(modules: dict[str, ModuleReport], module: ModuleReport, transfer: Transfer) -> int | None:
    """Returns the width of the tensor that is sent, from the weight that reads or makes it; None without one."""
    path = f"{module.path}.{transfer.shared_by[0]}" if transfer.shared_by else module.path
    weight = next((p for p in modules[path].parameters if len(p.shape) == 2), None) if path in modules else None
    if weight is None:
        return None
    embedding = modules[path].kind in ("vocab", "features")
    return _sides(weight, embedding)[transfer.tensor == "output"]


def _sides(weight: ParameterReport, embedding: bool) -> tuple[int, int]:
    """Returns (in, out) of a weight, which HF keeps as [out, in], but ``Conv1D`` and embeddings as [in, out]."""
    first, second = weight.shape
    return (first, second) if embedding or weight.transposed else (second, first)


def _sequence_parallel(report: ShowReport) -> Iterator[Volume]:
    """Yields what is sent where the hidden state is cut along the sequence, and where it becomes whole again."""
    if report.layout.sp:
        called = [module.calls for module in report.modules if module.path.rpartition(".")[0] == report.layers]
        values = report.hidden_size and _tokens(report) * report.hidden_size
        what = f"{report.layers}: hidden state"
        yield Volume("TP", f"{what}, whole again after the last", "all_gather", "forward", called[-1], values)
        yield Volume("TP", f"{what}, cut before the first", "all_gather", "backward", called[0], values)


def _pipeline(report: ShowReport) -> Iterator[Volume]:
    borders = len(report.stages) - 1
    values = report.hidden_size and _tokens(report) * report.hidden_size
    values = values // report.layout.tp if values and report.layout.sp else values
    if report.layout.pp > 1:
        yield Volume("PP", "hidden state to the next stage", "send", "forward", borders, values)
        yield Volume("PP", "its gradient to the stage before", "send", "backward", borders, values)


def _data_parallel(report: ShowReport) -> Iterator[Volume]:
    """Yields the gradients, which Megatron sums in float32 over DP and CP, those of experts over fewer ranks."""
    layout = report.layout
    ranks = [[stage for stage in report.stages if stage.pp_rank == rank] for rank in range(layout.pp)]
    largest = max(ranks, key=lambda stages: sum(stage.gradients + stage.expert_gradients for stage in stages))
    dense, experts = (sum(getattr(s, name) for s in largest) for name in ("gradients", "expert_gradients"))
    for what, values, replicas in (
        ("gradients", dense, layout.data_parallel_size * layout.cp),
        ("gradients of experts", experts, layout.expert_data_parallel_size),
    ):
        if values and replicas > 1:
            yield Volume("DP", f"{what} of the largest pipeline rank", "reduce", "step", 1, values, BYTES_32_BITS)
