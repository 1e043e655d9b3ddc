"""Writes a `Page` for ``megasched show --html``, as one file of HTML that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from megasched.cli.output import format_bytes, format_count
from megasched.cli.page.compare import StepComparison
from megasched.cli.page.figures import figures
from megasched.cli.page.page import Page, timeline_data
from megasched.cli.page.sources import Link, links_of, source_files
from megasched.cli.show.fold import Node, fold
from megasched.cli.show.module_view import classes, lines, places
from megasched.cli.show.report import AUTO, ShowReport
from megasched.cli.show.volumes import LEGEND, missing_note
from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.planner.memory import FILLED
from megasched.planner.pipeline import in_flight
from megasched.reading.files import printable
from megasched.trace.timeline import Span

TEMPLATE = "page.html.jinja"
PARTS = ("parameters", "gradients", "optimizer", "held", "activations")


@dataclass(frozen=True)
class Bar:
    """Represents a stacked bar.

    Attributes:
        total: sum of the parts, formatted.
        parts: name, formatted value, and share of the longest bar in percent.
    """

    name: str
    total: str
    parts: list[tuple[str, str, float]]


@dataclass(frozen=True)
class Busy:
    """Sums up one lane of the timeline in words, for those who do not see it."""

    rank: int
    source: str
    forwards: int
    backwards: int
    busy: str
    alive: int | None


def write_page(page: Page, path: Path, compared: StepComparison | None = None) -> None:
    """Writes the page whole or not at all.

    Args:
        compared: its step beside that of another layout or schedule, if the page is to have both.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        write_whole(path, [printable(render(page, compared))])
    except OSError as error:
        raise ConfigError(f"--html {path}: it can't be written: {error.strerror}") from error


def render(page: Page, compared: StepComparison | None = None) -> str:
    """Returns the page as HTML; everything that comes from a model or a file is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megasched.cli.page", "template"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["count"] = format_count
    environment.filters["bytes"] = format_bytes
    tree = module_tree(page.report)
    files = source_files(_changed(page.report, tree))
    return environment.get_template(TEMPLATE).render(
        page=page,
        report=page.report,
        tree=tree,
        files=files,
        line_links=links_of(files),
        grid=_grid(page),
        figures=figures(page),
        bars=list(_memory_bars(page, _longest(page))),
        compared=compared,
        bars_of_both=_bars_of_both(compared) if compared else [],
        parts=PARTS,
        limit=_limit_share(page, _longest(page)),
        limit_of_both=_limit_share(page, _longest(*compared.pages)) if compared else None,
        stage_bars=_stage_bars(page),
        busy=list(_busy(page)),
        places=places,
        legend=LEGEND,
        missing=missing_note(page.report),
        # Jinja's own tojson sorts and escapes for HTML; a script element ends at "</", and at nothing else.
        timeline=_script_safe(timeline_data(page.predicted, page.measured, page.unit)),
    )


def _script_safe(data: Any) -> Any:
    import markupsafe

    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return markupsafe.Markup(text)


def _grid(page: Page) -> list[list[Any]]:
    """Returns the stages as [PP][VPP]."""
    layout = page.report.layout
    found = {(stage.pp_rank, stage.vp_stage): stage for stage in page.report.stages}
    return [[found[rank, chunk] for chunk in range(layout.vpp)] for rank in range(layout.pp)]


def _of_ranks(page: Page) -> list[dict[str, int]]:
    """Returns for each pipeline rank its bytes by part; without a prediction those that only the state takes."""
    step = page.report.step
    if step.prediction is not None:
        return [asdict(memory) for memory in step.prediction.memory]
    ranks = [[stage.state_bytes for stage in stages] for stages in _grid(page)]
    return [dict(zip(PARTS, map(sum, zip(*stages, strict=True)), strict=False)) for stages in ranks]


def _longest(*pages: Page) -> float:
    """Returns the bytes that a bar of full length stands for: a GPU's memory, where that is known."""
    hardware = pages[0].report.step.hardware
    ranks = [sum(one.values()) for page in pages for one in _of_ranks(page)]
    return max([hardware.usable_bytes if hardware else 1.0, *ranks])


def _limit_share(page: Page, longest: float) -> float | None:
    """Returns where on the bars a GPU's memory for tensors ends, in percent; None where no hardware is named."""
    hardware = page.report.step.hardware
    return 100 * hardware.usable_bytes / longest if hardware else None


def _memory_bars(page: Page, longest: float) -> Iterator[Bar]:
    for rank, parts in enumerate(_of_ranks(page)):
        yield _bar(f"pp {rank}", parts, longest)


def _bars_of_both(compared: StepComparison) -> list[tuple[str, list[Bar]]]:
    """Returns the memory of the ranks of both, with their titles, on one scale."""
    longest = _longest(*compared.pages)
    both = zip(compared.titles, compared.pages, strict=True)
    return [(title, list(_memory_bars(page, longest))) for title, page in both]


def _stage_bars(page: Page) -> dict[int, Bar]:
    """Returns for each stage its bytes: its state, and activations of all micro-batches that are alive at once."""
    report = page.report
    prediction, layout = report.step.prediction, report.layout
    parts: dict[int, dict[str, int]] = {}
    for stage in report.stages:
        parts[stage.stage] = dict(zip(PARTS, stage.state_bytes, strict=False))
        if prediction is not None:
            alive = in_flight(stage.pp_rank, layout.pp, layout.vpp, _played(report))
            most = max(count[stage.vp_stage] for count in alive)
            parts[stage.stage]["activations"] = most * prediction.kept[stage.stage]
    longest = max(sum(values.values()) for values in parts.values()) or 1
    return {number: _bar(f"stage {number}", values, longest) for number, values in parts.items()}


def _played(report: ShowReport) -> int:
    """Returns so many micro-batches as a pipeline is full with, or those of the step if they are fewer."""
    return min(report.step.microbatches, FILLED * report.layout.pp)


def _bar(name: str, parts: Mapping[str, int], longest: float) -> Bar:
    shares = [(part, format_bytes(value), 100 * value / longest) for part, value in parts.items() if value]
    return Bar(name, format_bytes(sum(parts.values())), shares)


def _busy(page: Page) -> Iterator[Busy]:
    layout = page.report.layout
    for source, spans in (("predicted", page.predicted), ("measured", page.measured)):
        end = max((span.end for span in spans), default=0.0) or 1.0
        for rank in range(layout.pp) if spans else ():
            own = [span for span in spans if span.rank == rank and span.kind in ("forward", "backward")]
            alive = max(map(sum, in_flight(rank, layout.pp, layout.vpp, page.report.step.microbatches)))
            yield Busy(
                rank,
                source,
                _number(own, "forward"),
                _number(own, "backward"),
                f"{100 * sum(span.seconds for span in own) / end:.1f} %",
                alive if source == "predicted" else None,
            )


def _number(spans: Sequence[Span], kind: str) -> int:
    return sum(span.kind == kind for span in spans)


@dataclass
class TreeLine:
    """Represents a line of the module tree: one module, or several that are treated alike.

    Attributes:
        id: what a link to it names.
        path: its path; of several layers, with their indices; empty for the model itself.
        name: name in the tree; empty for the model itself.
        members: number of layers that the line stands for; 0 for one module.
        kind: how its weight is placed on the TP ranks.
        classes: class in the definition, and what becomes of it.
        sources: ``file:line`` of the calls of the schedule that ask for something of it.
        facts: other facts, a line for each.
        children: the lines below it.
    """

    id: str
    path: str
    name: str
    members: int
    kind: str
    classes: str
    sources: list[str]
    facts: list[str]
    children: list[TreeLine] = field(default_factory=list)

    def walk(self) -> Iterator[TreeLine]:
        """Yields the line and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def module_tree(report: ShowReport) -> TreeLine:
    """Returns the module tree of a report, at its full depth."""
    return _line(fold(report.modules), "", "", count(), show_sources=report.schedule != AUTO)


def _line(node: Node, beside: str, around: str, numbers: Iterator[int], *, show_sources: bool) -> TreeLine:
    """Returns the line of a node, with the lines below it.

    Args:
        beside: name of the list that contains the node, for a fold of its members.
        around: path of the module that contains it.
        numbers: yields a number for each line.
    """
    first = node.reports[0]
    listed = bool(node.children) and all(child.members for child in node.children)
    name = f"{beside}.{node.name}" if node.members else node.name
    path = f"{around}.{node.name}" if around else node.name
    known = f"module-{next(numbers)}", path, name
    if node.like and node.children:
        sources = list(dict.fromkeys(_sources_inside(node))) if show_sources else []
        return TreeLine(*known, 0, first.kind, f"as in {beside}.{node.like}", sources, [])
    below = node.name if listed else beside
    return TreeLine(
        *known,
        node.members if node.members > 1 else 0,
        first.kind,
        classes(first),
        node.sources if show_sources else [],
        lines(first),
        [_line(child, below, path, numbers, show_sources=show_sources) for child in node.children],
    )


def _sources_inside(node: Node) -> Iterator[str]:
    yield from node.sources
    for child in node.children:
        yield from _sources_inside(child)


def _changed(report: ShowReport, tree: TreeLine) -> dict[str, list[Link]]:
    """Returns the lines of the tree and the stages that each call changed, by its ``file:line``."""
    found: dict[str, list[Link]] = {}
    for line in tree.walk():
        for source in line.sources:
            found.setdefault(source, []).append(Link(line.id, line.path or report.model))
    for stage in report.stages:
        if stage.cut_at and report.schedule != AUTO:
            found.setdefault(stage.cut_at, []).append(Link(f"stage-{stage.stage}", f"stage {stage.stage}"))
    return found
