"""Prints the report of ``megasched show``: a head line, then the module tree, by stage if there are several."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from megasched.cli.output import BYTES_16_BITS, format_bytes, format_count, print_found, report_console
from megasched.cli.page.compare import StepComparison, print_comparison
from megasched.cli.page.html import write_page
from megasched.cli.page.page import build_page
from megasched.cli.page.predicted_trace import write_trace
from megasched.cli.page.recorded import recorded_step
from megasched.cli.show.diff import compare_reports, print_diff
from megasched.cli.show.fold import Node, fold
from megasched.cli.show.layout_flags import LayoutFlags
from megasched.cli.show.module_view import ModuleLines, lines, places
from megasched.cli.show.report import AUTO, ShowReport, StageReport, inspect_schedule
from megasched.cli.show.step import sequences_of, step_line, step_options
from megasched.cli.show.volumes import describe_volumes, missing_note, volume_table
from megasched.errors import ConfigError
from megasched.json_output import json_only, print_json
from megasched.language.records import save_records
from megasched.planner.predict import StepFlags
from megasched.printing.tables import plain_table
from megasched.trainer.evidence.compatibility import of_unchecked_options


def show_schedule(
    schedule: str,
    hf_model: str,
    given: LayoutFlags,
    *,
    as_json: bool,
    against: tuple[str, LayoutFlags] | None,
    predicts: bool,
    records: Path | None,
    html: Path | None,
    gpu: str | None,
    global_batch_size: int | None,
    trace: Path | None,
    predicted_trace: Path | None,
    **options: Any,
) -> None:
    """Carries out ``megasched show``: plans one schedule or two, and prints or writes what was asked for.

    Args:
        given: flags of the layout, and those of the run that decide what a step costs.
        against: another schedule, or the same at another layout, to compare with.
        predicts: whether a step is to be predicted.
        records: file to which the schedule's calls are saved.
        html: file to which a page is written.
        gpu: a known type, or a TOML file, on which it is predicted.
        global_batch_size: sequences in a step; by default those of the trace, or a few for each pipeline rank.
        trace: file of ``--megasched-trace``, of a run at this layout.
        predicted_trace: file to which the predicted step is written, in the form of ``--megasched-trace``.
        options: keyword arguments of ``inspect_schedule``.

    Raises:
        ConfigError, ScheduleError: anything that a run would refuse about model, schedule and layout.
    """
    both = [(schedule, given), *([] if against is None else [against])]
    with json_only(as_json):
        recorded = None if trace is None else recorded_step(trace, given.layout)
        if against is not None:  # a step of both is of the same sequences
            global_batch_size = global_batch_size or sequences_of([flags.layout for _, flags in both])
        reports = []
        for name, flags in both:
            step = step_options(flags.layout, _step_flags(flags), gpu, global_batch_size, recorded)
            step = replace(step, wanted=predicts)
            reports.append(inspect_schedule(name, hf_model, flags.layout, step=step, **options))
    if records is not None:
        save_records(reports[0].records, records)
    if predicted_trace is not None:
        write_trace(reports[0], predicted_trace)
        print(f"wrote {predicted_trace}", file=sys.stderr if as_json else sys.stdout)
    compared = _compare(both, reports, global_batch_size) if predicts and global_batch_size else None
    if html is not None:
        page = build_page(reports[0], recorded) if compared is None else compared.pages[0]
        write_page(page, html, compared)
        print(f"wrote {html}")
    elif compared is not None and both[0][1] != both[1][1]:
        print_found(compared, print_comparison, as_json=as_json)
    elif against is not None:
        print_found(replace(compare_reports(*reports), steps=compared), print_diff, as_json=as_json)
    else:
        _print_one(reports[0], as_json=as_json)


def _print_one(report: ShowReport, *, as_json: bool) -> None:
    if as_json:
        sent = [volume.to_dict() for volume in describe_volumes(report)]
        print_json({**report.to_dict(), "communication": sent})
    else:
        print_report(report, report_console())


def _step_flags(flags: LayoutFlags) -> StepFlags:
    """Returns what the flags say of a step beside its layout.

    Raises:
        ConfigError: Megatron refuses the flags of recompute together.
    """
    method, number = flags.recompute_method, flags.recompute_num_layers
    if (method or number) and flags.recompute_granularity != "full":
        raise ConfigError("--recompute-method and --recompute-num-layers are for --recompute-granularity full")
    if (method == "block" and number is None) or (method is None and number is not None):
        raise ConfigError("--recompute-method block and --recompute-num-layers belong together: how many, which")
    count = flags.recompute_num_layers if flags.recompute_method == "block" else None
    sharded, in_bf16 = flags.use_distributed_optimizer, flags.grad_reduce_in_bf16
    return StepFlags(flags.recompute_granularity, count, sharded, in_bf16)


def _compare(
    both: Sequence[tuple[str, LayoutFlags]], reports: Sequence[ShowReport], sequences: int
) -> StepComparison | None:
    """Returns the steps of two layouts, or of two schedules, side by side; None of a single one."""
    if len(both) == 1:
        return None
    (schedule, flags), (other_schedule, other) = both
    titles = (schedule, other_schedule) if flags == other else (flags.title(other), other.title(flags))
    return StepComparison(titles, (build_page(reports[0]), build_page(reports[1])), sequences)


def print_report(report: ShowReport, console: Console) -> None:
    """Prints a report, laid out for 100 columns."""
    lines = ModuleLines(show_sources=report.schedule != AUTO)
    console.print(_head(report))
    if len(report.stages) > 1:
        console.print(stage_tree(report, lines))
        console.print()
        if report.layout.vpp > 1:
            console.print(stage_table(report))
        console.print(stage_legend(report))
    else:
        console.print(_tree(report, lines))
        console.print()
        console.print(_on_one_rank(report))
    volumes = describe_volumes(report)
    if volumes:
        console.print()
        console.print(volume_table(volumes))
        console.print(
            Text("sent for one micro-batch, over DP for one step; --html and --json have it by module", "dim")
        )
    if note := missing_note(report):
        console.print(Text(note, "yellow"))
    if line := step_line(report.step):
        console.print()
        console.print(Text(line))
    for doubt in report.unverified:
        console.print(Text(f"not known to be right, a run would need --allow-unverified: {doubt}", "yellow"))
    if report.unchecked_options:
        console.print(Text(of_unchecked_options(report.unchecked_options, report.check), "yellow"))


def _head(report: ShowReport) -> Text:
    text = Text(report.model, "bold")
    trained = f" ({format_count(report.trained)} trained)" if report.trained < report.parameters else ""
    text.append(f"  {format_count(report.parameters)} parameters{trained}  on {report.layout}", "default not bold")
    text.append(f"\nmodel {report.hf_model}, schedule {report.schedule}\n", "dim not bold")
    return text


def _tree(report: ShowReport, lines: ModuleLines) -> Tree:
    root = fold(report.modules)
    tree = Tree(lines.label(root, "", 0), guide_style="dim")
    lines.add_children(tree, root, 1)
    return tree


def _on_one_rank(report: ShowReport) -> Text:
    (stage,) = report.stages
    amount = f"{format_count(stage.parameters)} parameters, {format_bytes(stage.parameter_bytes)} at 16 bits each"
    return Text(f"on one rank: {amount}", "dim")


@dataclass
class Item:
    """Represents a line below a stage.

    Attributes:
        node: the module, or a fold of layers.
        name: its path; of a fold, with the indices for the last part.
        beside: name of the list, for a fold of its layers; otherwise empty.
        around: whether it is a module around the layers, whose contents have lines of their own.
        notes: notes of that list, to be printed once.
    """

    node: Node
    name: str
    beside: str = ""
    around: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class StageLine:
    """Represents one stage, or several in a row that hold as many of the same layers and nothing else.

    Attributes:
        stages: the stages in their order.
        items: the items of the first of these stages.
    """

    stages: list[StageReport]
    items: list[Item] = field(default_factory=list)


def stage_tree(report: ShowReport, writer: ModuleLines) -> Tree:
    """Returns the tree: a line for each stage, and below it the modules that the stage holds."""
    cut = any(stage.cut_at for stage in report.stages)
    how = "cut by the schedule" if cut else "layers balanced by cost"
    text = Text.assemble((report.model, "bold"), f"  in {len(report.stages)} stages, {how}")
    tree = Tree(text, guide_style="dim")
    for line in _stage_lines(report):
        branch = tree.add(_label(report, line))
        if not _all_as_before(line.items) or len(line.items) > 1:
            for item in line.items:
                _add_item(branch, item, line, writer)
    return tree


def stage_table(report: ShowReport) -> Table:
    """Returns a table of what each pipeline rank holds, all of its chunks together."""
    table = plain_table("pp rank", "layers, chunk by chunk", "parameters", "bytes", "FLOPs")
    table.columns[1].overflow = "fold"
    for column in (table.columns[0], *table.columns[2:]):
        column.justify = "right"
    for rank in range(report.layout.pp):
        stages = [stage for stage in report.stages if stage.pp_rank == rank]
        table.add_row(
            str(rank),
            ", ".join(_layers(stage.start, stage.stop) for stage in stages),
            format_count(sum(stage.parameters for stage in stages)),
            format_bytes(sum(stage.parameter_bytes for stage in stages)),
            f"{100 * sum(stage.flops_share for stage in stages):.1f} %",
        )
    return table


def stage_legend(report: ShowReport) -> Text:
    """Returns a line that explains the numbers."""
    flops = f"FLOPs: share of the forward pass at {report.sequence_length} tokens"
    return Text(f"parameters: on one rank, of {8 * BYTES_16_BITS} bits; {flops}", "dim")


# ---- what is in a stage -----------------------------------------------------------------------------


def _stage_lines(report: ShowReport) -> list[StageLine]:
    root = fold(report.modules, by_stage=True)
    found: list[StageLine] = []
    for stage in report.stages:
        line = StageLine([stage], _in_order(stage, list(_items(report, root, stage.stage))))
        if found and _alike(found[-1], line):
            found[-1].stages.append(stage)
        else:
            found.append(line)
    return found


def _items(report: ShowReport, node: Node, stage: int, prefix: str = "") -> Iterator[Item]:
    """Yields the items of a node's children on a stage; a module around the layers yields those inside it."""
    path = node.reports[0].path
    for child in node.children:
        first = child.reports[0]
        name = f"{prefix}{child.name}"
        if path == report.layers:
            if stage in first.stages:
                notes = node.reports[0].notes if child is node.children[0] else ()
                yield Item(child, name, beside=node.name, notes=notes)
        elif f"{report.layers}.".startswith(f"{first.path}.") or _is_spread(child):
            if stage == first.stages[0] and lines(first) and first.path != report.layers:
                yield Item(child, name, around=True)
            yield from _items(report, child, stage, f"{name}.")
        elif stage in first.stages:
            yield Item(child, name)


def _is_spread(node: Node) -> bool:
    """Returns whether anything in a module lives on other stages than the module itself."""
    stages = node.reports[0].stages
    return any(child.reports[0].stages != stages or _is_spread(child) for child in node.children)


def _in_order(stage: StageReport, items: list[Item]) -> list[Item]:
    """Returns the items with the modules beside layers first on the first stage, and last on every other stage."""
    return sorted(items, key=lambda item: bool(item.beside) == (stage.stage == 0))


def _all_as_before(items: list[Item]) -> bool:
    return all(item.beside and item.node.like for item in items)


def _alike(line: StageLine, other: StageLine) -> bool:
    """Returns whether two stages hold equally many layers of kinds known from earlier stages, and nothing else."""
    if not _all_as_before(line.items) or not _all_as_before(other.items):
        return False
    return _kinds(line) == _kinds(other)


def _kinds(line: StageLine) -> tuple[object, ...]:
    stage = line.stages[0]
    layers = tuple((item.node.like, item.node.members) for item in line.items)
    return layers, stage.parameters, _share(stage), stage.cut_at


# ---- how it looks -----------------------------------------------------------------------------------


def _label(report: ShowReport, line: StageLine) -> Text:
    first, last, count = line.stages[0], line.stages[-1], len(line.stages)
    layers = _layers(first.start, last.stop)
    if count == 1:
        text = Text(f"stage {first.stage}  ", "bold")
        chunk = f", chunk {first.vp_stage}" if report.layout.vpp > 1 else ""
        text.append(f"pp rank {first.pp_rank}{chunk}", "not bold")
        each = f"layers {layers}" if first.stop - first.start > 1 else f"layer {layers}"
        text.append(f"  {each if first.stop > first.start else 'no layers'}", "not bold")
    else:
        text = Text(f"stages {first.stage}-{last.stage}  ", "bold")
        text.append(f"×{count}  ", "bold yellow")
        text.append("" if report.layout.vpp > 1 else f"pp ranks {first.pp_rank}-{last.pp_rank}  ", "not bold")
        each = f", {first.stop - first.start} each" if first.stop > first.start else ""
        text.append(f"layers {layers}{each}" if each else "no layers", "not bold")
    if len(line.items) == 1 and _all_as_before(line.items):
        text.append(f", as {line.items[0].beside}.{line.items[0].node.like}", "dim not bold")
    amount = f"{format_count(first.parameters)} parameters, {format_bytes(first.parameter_bytes)}"
    end = f"; ends at {places([first.cut_at])}" if first.cut_at else ""
    return text.append(f"\n  {amount}; {_share(first)} of the FLOPs{' each' * (count > 1)}{end}", "not bold")


def _add_item(tree: Tree, item: Item, line: StageLine, writer: ModuleLines) -> None:
    stage, first_stage = line.stages[0].stage, item.node.reports[0].stages[0]
    if item.around:
        tree.add(writer.label(item.node, item.name, 2))
    elif first_stage < stage:
        tree.add(Text.assemble((item.name, "bold"), (f"  as on stage {first_stage}", "dim")))
    elif len(line.stages) > 1:  # the indices of one of them would say nothing of the others
        tree.add(Text(f"{item.node.members} each as {item.beside}.{item.node.like}", "dim"))
    else:
        writer.add(tree, item.node, item.name, 2, beside=item.beside, notes=item.notes)


def _share(stage: StageReport) -> str:
    return f"{100 * stage.flops_share:.1f} %"


def _layers(start: int, stop: int) -> str:
    """Returns a range of layers as text: ``4-7``, ``4``, or ``–`` for none."""
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start) if stop > start else "–"
