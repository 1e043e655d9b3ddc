"""How ``megasched doctor`` looks in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from megasched.cli.apex import PARTS, Apex
from megasched.cli.doctor import Diagnosis, PatchReport
from megasched.cli.installation import Package

APPLIED = {
    "always": "[green]in every run here[/]",
    "never": "not here",
    "rehearsal": "in rehearsals only",
    "refused": "[red]does not fit[/]",
}


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints a diagnosis; made for 100 columns."""
    console.print(_packages(diagnosis))
    console.print()
    _print_apex(diagnosis.apex, console)
    console.print()
    _print_devices(diagnosis, console)
    if diagnosis.patches:
        console.print("\n[bold]patches[/] (changes to other people's modules while a run lasts)")
        for patch in diagnosis.patches:
            _print_patch(patch, console)
    console.print()
    for warning in diagnosis.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    for problem in diagnosis.problems:
        console.print(f"[red]problem:[/] {escape(problem)}")
    verdict = "[green]ready[/]" if diagnosis.runnable else "[red]no run can start here[/]"
    console.print(f"megasched {diagnosis.version}: {verdict}")


def _packages(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("package", "found", "supported", ""):
        table.add_column(name, overflow="fold")
    for package in diagnosis.packages:
        found = f"[{'green' if package.ok else _colour(package)}]{package.found or 'none'}[/]"
        table.add_row(package.name, found, package.supported or "any", _remark(package))
    return table


def _print_apex(apex: Apex, console: Console) -> None:
    console.print("[bold]NVIDIA's apex[/] (optional; told by its compiled modules)")
    for part, here in apex.parts.items():
        console.print(f"  {part}  {'[green]here[/]' if here else f'none  [dim]{PARTS[part]}[/]'}")
    if apex.problem:
        console.print(f"  [yellow]{escape(apex.folder)} is {escape(apex.problem)}[/]")


def _colour(package: Package) -> str:
    return "red" if package.required else "yellow" if package.found else "default"


def _remark(package: Package) -> str:
    if package.ok:
        return f"[dim]{escape(package.where)}[/]"
    if package.required or package.found:
        return "[red]missing[/]" if not package.found else "[red]not supported[/]"
    return f"[dim]without: {package.cost}[/]"


def _print_devices(diagnosis: Diagnosis, console: Console) -> None:
    built = f"torch is built for CUDA {diagnosis.cuda}" if diagnosis.cuda else "torch is built without CUDA"
    console.print(f"[bold]CUDA devices[/] ({built})")
    for index, device in enumerate(diagnosis.devices):
        console.print(f"  {index}  {device.name}, {device.memory_gib} GiB, capability {device.capability}")
    if not diagnosis.devices:
        console.print("  none: a run here must be a rehearsal on the CPU (--rehearse)")


def _print_patch(patch: PatchReport, console: Console) -> None:
    state = APPLIED[patch.applied] + (", [bold]active now[/]" if patch.active else "")
    reason = f": {escape(patch.reason)}" if patch.reason else ""
    console.print(f"  [bold]{patch.name}[/]  {state}{reason}  [dim]{escape(patch.versions)}[/]")
    console.print(Padding(escape(patch.why), (0, 0, 0, 4)), style="dim")
