"""How much a step sends between ranks because of the layout, as far as the shapes in a report tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megasched.cli.output import BYTES_16_BITS
from megasched.cli.show.communication import Transfer
from megasched.cli.show.modules import ModuleReport, ParameterReport
from megasched.cli.show.report import ShowReport

_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Volume:
    """One kind of operation between ranks.

    Attributes:
        group: of ranks that take part.
        what: modules it belongs to, indices of layers as ``*``; or what is sent.
        op: e.g. ``all_reduce``.
        phase: ``forward``, ``backward`` or ``step``.
        times: in the whole model, a micro-batch (a step for the phase ``step``).
        values: numbers in the tensor of one operation; None where the shapes do not tell.
    """

    group: Literal["TP", "PP", "DP"]
    what: str
    op: str
    phase: Literal["forward", "backward", "step"]
    times: int
    values: int | None

    @property
    def bytes(self) -> int | None:
        """Of all times together, at 16 bits a value."""
        return None if self.values is None else self.times * self.values * BYTES_16_BITS


def describe_volumes(report: ShowReport) -> list[Volume]:
    """What is sent over the groups of TP, PP and DP; what experts and context parallelism send is not counted."""
    return [*_tensor_parallel(report), *_pipeline(report), *_data_parallel(report)]


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
    """Of a micro-batch on one CP rank."""
    return report.sequence_length * report.layout.micro_batch_size // report.layout.cp


def _features(modules: dict[str, ModuleReport], module: ModuleReport, transfer: Transfer) -> int | None:
    """Width of the tensor that is sent, from the weight that reads or makes it."""
    path = f"{module.path}.{transfer.shared_by[0]}" if transfer.shared_by else module.path
    weight = next((p for p in modules[path].parameters if len(p.shape) == 2), None) if path in modules else None
    if weight is None:
        return None
    embedding = modules[path].kind in ("vocab", "features")
    return _sides(weight, embedding)[transfer.tensor == "output"]


def _sides(weight: ParameterReport, embedding: bool) -> tuple[int, int]:
    """(in, out) of a weight, which HF keeps as [out, in], ``Conv1D`` and embeddings as [in, out]."""
    first, second = weight.shape
    return (first, second) if embedding or weight.transposed else (second, first)


def _pipeline(report: ShowReport) -> Iterator[Volume]:
    borders = len(report.stages) - 1
    values = report.hidden_size and _tokens(report) * report.hidden_size
    values = values // report.layout.tp if values and report.layout.sp else values
    if report.layout.pp > 1:
        yield Volume("PP", "hidden state to the next stage", "send", "forward", borders, values)
        yield Volume("PP", "its gradient to the stage before", "send", "backward", borders, values)


def _data_parallel(report: ShowReport) -> Iterator[Volume]:
    if report.layout.data_parallel_size > 1:
        largest = max(
            sum(stage.parameters for stage in report.stages if stage.pp_rank == rank)
            for rank in range(report.layout.pp)
        )
        yield Volume("DP", "gradients of the largest pipeline rank", "reduce", "step", 1, largest)
