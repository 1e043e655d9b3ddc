"""Checks for ``megasched doctor`` whether a run can start on this machine, and what it will lack."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megasched import __version__
from megasched.cli.apex import PARTS, Apex, find_apex
from megasched.cli.cuda_headers import headers_problem
from megasched.cli.installation import Package, find_packages
from megasched.errors import ConfigError
from megasched.imports import named_package
from megasched.patches import registry
from megasched.printing.tables import plain_table
from megasched.trainer import seams
from megasched.trainer.flags.flag_classes import unknown_flags
from megasched.transformers_names import PrivateName, private_names
from megasched.versions import warning_of

# The one patch that emulates; entry.py applies it only in a rehearsal.
REHEARSAL_PATCH = "host_cuda"
APPLIED = {
    "always": ("in every run here", "green"),
    "never": ("not here", ""),
    "rehearsal": ("in rehearsals only", ""),
    "refused": ("does not fit", "red"),
}


@dataclass(frozen=True)
class Device:
    """Describes a CUDA device: its name, memory in GiB, and compute capability, e.g. ``9.0``."""

    name: str
    memory_gib: float
    capability: str


@dataclass(frozen=True)
class PatchReport:
    """Describes a patch on this installation.

    Attributes:
        name, why, targets: as the patch declares them.
        versions: packages and version ranges with which it is known to work.
        applied: ``always``, ``never`` (this installation can do without it), in a ``rehearsal`` only, or
            ``refused``: it is needed and does not fit.
        reason: why it is never applied, or why it is refused.
        active: whether it is in force in this process.
    """

    name: str
    versions: str
    why: str
    targets: tuple[str, ...]
    applied: Literal["always", "never", "rehearsal", "refused"]
    reason: str
    active: bool


@dataclass(frozen=True)
class Diagnosis:
    """Holds everything that ``megasched doctor`` prints.

    Attributes:
        version: version of megasched.
        packages: Python, the required and the optional packages.
        apex: the parts of NVIDIA's apex.
        cuda: version of CUDA for which torch was built; empty for a CPU build.
        devices: CUDA devices of this machine.
        patches: all patches.
        unknown_flags: ``args`` attributes of this Megatron's flags of which no table says what becomes of them; a
            run refuses them.
        transformers_private_names: those that megasched uses.
        problems: why no run can start; empty where one can.
        warnings: what is wrong, though a run can start.
    """

    version: str
    packages: list[Package]
    apex: Apex
    cuda: str
    devices: list[Device]
    patches: list[PatchReport]
    unknown_flags: list[str]
    transformers_private_names: list[PrivateName]
    problems: list[str]
    warnings: list[str]

    @property
    def runnable(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as plain data for JSON."""
        packages = [{**asdict(p), "ok": p.ok, "untested": p.untested} for p in self.packages]
        return {"runnable": self.runnable, **asdict(self), "packages": packages}


def diagnose() -> Diagnosis:
    """Examines this process's installation and devices, and changes nothing.

    Raises:
        ConfigError: megasched itself is not installed.
    """
    packages = find_packages()
    problems = [_complaint(p) for p in packages if p.required and not p.ok and not p.untested]
    warnings = [_complaint(p) for p in packages if p.untested or (not p.required and p.found and not p.ok)]
    found = {package.name: package for package in packages if package.found}
    cuda, devices = "", []
    if "torch" in found:
        try:
            cuda, devices = _cuda()
        except (ImportError, OSError) as error:
            problems.append(f"torch {found['torch'].found} can't be imported: {error}")
    if "transformer-engine" in found:
        if problem := _import_problem("transformer_engine.pytorch"):
            (problems if devices else warnings).append(problem)  # rehearsals are without it
            sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # the rest is judged without it
        elif cuda and (problem := headers_problem(found["transformer-engine"].found, cuda)):
            warnings.append(problem)
    if not problems and (problem := _import_problem("megatron.training")):
        problems.append(problem)
    patches = [_patch(patch) for patch in seams.available()]
    names = private_names()
    if not problems:  # neither fits a missing or wrong package, which is said already
        problems += [f"patch {patch.name}: {patch.reason}" for patch in patches if patch.applied == "refused"]
        moved = f"transformers {found['transformers'].found} has moved"
        problems += [f"{moved}: {name.name}, which {name.reason}" for name in names if not name.found]
    unknown = [] if problems else unknown_flags()
    if unknown:
        warnings.append(
            f"flags of this Megatron that a run refuses, as they are not known here: {', '.join(unknown)}"
        )
    apex = find_apex()
    if apex.problem:
        warnings.append(f"apex in {apex.folder}: {apex.problem}. Remedy: {apex.remedy}")
    return Diagnosis(__version__, packages, apex, cuda, devices, patches, unknown, names, problems, warnings)


def _complaint(package: Package) -> str:
    if package.problem:
        return package.problem
    wanted = f"{package.name}{package.supported}" if package.supported else package.name
    if package.untested:
        return warning_of(package.name, package.found, allow_unverified=True)
    remedy = f"install {wanted}" if package.name == "python" else f"pip install '{wanted}'"
    if not package.found:
        return f"{package.name} is not installed: {remedy}"
    return f"{package.name} {package.found} is not supported: {remedy}"


def _import_problem(module: str) -> str:
    """Returns why a module of an installed package can't be imported; empty where it can."""
    try:
        with named_package():
            import_module(module)
    except (ConfigError, ImportError) as error:
        return str(error)
    return ""


def _cuda() -> tuple[str, list[Device]]:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(Device(properties.name, round(properties.total_memory / 2**30, 1), capability))
    return torch.version.cuda or "", devices


def _patch(patch: registry.Patch) -> PatchReport:
    applied: Literal["always", "never", "rehearsal", "refused"]
    applied = "rehearsal" if patch.name == REHEARSAL_PATCH else "always"
    reason = ""
    try:
        reason = registry.check(patch) or ""
        if reason:
            applied = "never"
    except (ConfigError, OSError) as error:  # OSError: a library that torch is linked with is not there
        applied, reason = "refused", str(error)
    active = patch.name in registry.active()
    return PatchReport(patch.name, patch.version_range, patch.why, patch.targets, applied, reason, active)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints a diagnosis, laid out for 100 columns."""
    untested = [package.name for package in diagnosis.packages if package.untested]
    verdict = ("ready", "green") if diagnosis.runnable else ("no run can start here", "red")
    newer = ""
    if diagnosis.runnable and untested:
        verdict, newer = ("ready by --allow-unverified", "yellow"), f" ({', '.join(untested)})"
    console.print(Text.assemble(f"megasched {diagnosis.version}: ", verdict, newer))
    for problem in diagnosis.problems:
        console.print(Text.assemble(("problem:", "red"), f" {problem}"))
    for warning in diagnosis.warnings:
        console.print(Text.assemble(("warning:", "yellow"), f" {warning}"))
    console.print()
    console.print(_packages(diagnosis))
    console.print()
    _print_apex(diagnosis.apex, console)
    console.print()
    _print_devices(diagnosis, console)
    if diagnosis.patches:
        told = " (changes to other people's modules while a run lasts)"
        console.print(Text.assemble(("\npatches", "bold"), told))
        for patch in diagnosis.patches:
            _print_patch(patch, console)


def _packages(diagnosis: Diagnosis) -> Table:
    table = plain_table("package", "found", "supported", "", overflow="fold")
    for package in diagnosis.packages:
        found = Text(package.found or "none", "green" if package.ok else _colour(package))
        table.add_row(package.name, found, package.supported or "any", _remark(package))
    return table


def _print_apex(apex: Apex, console: Console) -> None:
    console.print(Text.assemble(("NVIDIA's apex", "bold"), " (optional; told by its compiled modules)"))
    for part, here in apex.parts.items():
        found = [("here", "green")] if here else ["none  ", (PARTS[part], "dim")]
        console.print(Text.assemble(f"  {part}  ", *found))
    if apex.problem:
        console.print(f"  {apex.folder} is {apex.problem}", style="yellow")


def _colour(package: Package) -> str:
    return "red" if package.required and not package.untested else "yellow" if package.found else "default"


def _remark(package: Package) -> Text:
    if package.ok:
        return Text(package.where, "dim")
    if package.required or package.found:
        if package.untested:
            return Text.assemble(("newer than tested", "yellow"), " ", (package.where, "dim"))
        return Text("missing" if not package.found else "not supported", "red")
    return Text(f"without: {package.cost}", "dim")


def _print_devices(diagnosis: Diagnosis, console: Console) -> None:
    built = f"torch is built for CUDA {diagnosis.cuda}" if diagnosis.cuda else "torch is built without CUDA"
    console.print(Text.assemble(("CUDA devices", "bold"), f" ({built})"))
    for index, device in enumerate(diagnosis.devices):
        console.print(f"  {index}  {device.name}, {device.memory_gib} GiB, capability {device.capability}")
    if not diagnosis.devices:
        console.print("  none: a run here must be a rehearsal on the CPU (--rehearse)")


def _print_patch(patch: PatchReport, console: Console) -> None:
    active = [", ", ("active now", "bold")] if patch.active else []
    reason = f": {patch.reason}" if patch.reason else ""
    state = [APPLIED[patch.applied], *active, f"{reason}  "]
    console.print(Text.assemble("  ", (patch.name, "bold"), "  ", *state, (patch.versions, "dim")))
    console.print(Padding(patch.why, (0, 0, 0, 4)), style="dim")
