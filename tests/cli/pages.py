"""Pages to be rendered in tests, made by hand."""

from __future__ import annotations

from megasched.cli.page.page import Page, build_page
from megasched.cli.show.modules import ModuleReport, ParameterReport
from megasched.cli.show.report import ShowReport, StageReport
from megasched.language.parallel_dims import ParallelDims
from megasched.trace.timeline import Span

HOSTILE = """</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">'"&amp;<b id=owned>"""


def report_of(pp: int, vpp: int, name: str = "proj") -> ShowReport:
    """One linear in each of as many layers as there are stages."""
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
        StageReport(number, number % pp, number // pp, number, number + 1, (), 1024, 1 / count)
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
        layers="layers",
    )


def page_of(pp: int, vpp: int, microbatches: int, **options) -> Page:
    return build_page(report_of(pp, vpp), global_batch_size=microbatches, **options)


def hostile_page() -> Page:
    """Of names that someone has chosen to break the page."""
    from dataclasses import replace

    name = HOSTILE.replace(".", "")
    report = replace(
        report_of(2, 1, name), hf_model=HOSTILE, schedule=HOSTILE, model=HOSTILE, unverified=[HOSTILE]
    )
    spans = [Span(rank, "forward", 0, 0, 0.0, 1.0, HOSTILE) for rank in (0, 1)]
    return build_page(report, predicted=spans, memory=[{HOSTILE: 5}, {HOSTILE: 7}])
