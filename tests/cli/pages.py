"""Pages to be rendered in tests, made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from megasched.cli.page.page import Page, build_page
from megasched.cli.show.modules import ModuleReport, ParameterReport
from megasched.cli.show.report import ShowReport, StageReport
from megasched.cli.show.step import MICROBATCHES_A_RANK, StepReport
from megasched.language.parallel_dims import ParallelDims
from megasched.planner.memory import RankMemory
from megasched.planner.pipeline import Chunk
from megasched.planner.predict import Prediction, StepFlags
from megasched.planner.step_time import StepTime
from megasched.trace.timeline import Span

HOSTILE = """</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">'"&amp;<b id=owned>"""


GIB = 1 << 30
# A step of one second at the first rank, of which all wait a quarter.
TIME = StepTime(0.5, 0.25, 0.25, 0.0, 0.0)


def predicted(chunks: list[list[Chunk]], total: StepTime = TIME) -> Prediction:
    """Two parts of memory on each rank, and nothing sent."""
    memory = tuple(RankMemory(GIB, 0, 0, 0, GIB // 2) for _ in chunks)
    kept = tuple(GIB // 8 for rank in chunks for _ in rank)
    return Prediction(memory, kept, (Counter(), Counter()), replace(total, chunks=chunks))


def report_of(pp: int, vpp: int, name: str = "proj", microbatches: int = 0, **step: Any) -> ShowReport:
    """One linear in each of as many layers as there are stages."""
    microbatches = microbatches or MICROBATCHES_A_RANK * pp
    count = pp * vpp
    parameter = ParameterReport("weight", (64, 32), (32, 32))
    everywhere = tuple(range(count))
    modules = [
        ModuleReport("", "Model", "Model", stages=everywhere),
        ModuleReport("layers", "ModuleList", "ModuleList", stages=everywhere),
    ]
    for layer in range(count):
        modules.append(ModuleReport(f"layers.{layer}", "Layer", "Layer", stages=(layer,)))
        path, becomes = f"layers.{layer}.{name}", "ColumnParallelLinear"
        modules.append(ModuleReport(path, "Linear", becomes, "column", (parameter,), stages=(layer,)))
    stages = [
        StageReport(
            *(number, number % pp, number // pp, number, number + 1, (), 1024, 1 / count),
            state_bytes=(GIB // 4, GIB // 2, 0),
        )
        for number in range(count)
    ]
    layout = ParallelDims(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
    )
    return ShowReport(
        "folder",
        "Model",
        "auto",
        2048 * count,
        2048 * count,
        128,
        layout,
        modules,
        stages,
        [],
        [],
        unchecked_options=[],
        check="",
        hidden_size=32,
        sent_width=32 if count > 1 else None,
        layers="layers",
        step=StepReport(
            **{"flags": StepFlags(), "hardware": None, "tokens": 1000.0, **step}, microbatches=microbatches
        ),
    )


def page_of(pp: int, vpp: int, microbatches: int, **options) -> Page:
    return build_page(report_of(pp, vpp, microbatches=microbatches, **options))


def hostile_page() -> Page:
    """Of names that someone has chosen to break the page."""
    name = HOSTILE.replace(".", "")
    report = replace(
        report_of(2, 1, name), hf_model=HOSTILE, schedule=HOSTILE, model=HOSTILE, unverified=[HOSTILE]
    )
    spans = [Span(rank, "forward", 0, 0, 0.0, 1.0, HOSTILE) for rank in (0, 1)]
    return replace(build_page(report), predicted=spans)
