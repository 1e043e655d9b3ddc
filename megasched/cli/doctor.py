"""``megasched doctor``: whether a run can start on this machine, and what it will do without."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megasched.cli.apex import Apex, find_apex
from megasched.cli.cuda_headers import headers_problem
from megasched.cli.installation import Package, find_packages
from megasched.errors import ConfigError
from megasched.patches import registry
from megasched.trainer import seams

# The one patch that emulates; entry.py applies it only in a rehearsal.
REHEARSAL_PATCH = "host_cuda"


@dataclass(frozen=True)
class Device:
    """A CUDA device: its name, memory in GiB, and compute capability, e.g. ``9.0``."""

    name: str
    memory_gib: float
    capability: str


@dataclass(frozen=True)
class PatchReport:
    """A patch on this installation.

    Attributes:
        name, why, targets: as the patch declares them.
        versions: packages and ranges it is known to work with.
        applied: ``always``, ``never`` (this installation can do without it), in a ``rehearsal`` only, or
            ``refused``: it is needed and does not fit.
        reason: why never, or why refused.
        active: in force in this process.
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
    """All that ``megasched doctor`` tells.

    Attributes:
        version: of megasched.
        packages: Python, required and optional ones.
        apex: parts of NVIDIA's apex.
        cuda: version of CUDA that torch was built for; empty for a CPU build.
        devices: CUDA devices of this machine.
        patches: all of them.
        problems: why no run can start; empty where one can.
        warnings: what is wrong, though a run can start.
    """

    version: str
    packages: list[Package]
    apex: Apex
    cuda: str
    devices: list[Device]
    patches: list[PatchReport]
    problems: list[str]
    warnings: list[str]

    @property
    def runnable(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        packages = [{**asdict(package), "ok": package.ok} for package in self.packages]
        return {"runnable": self.runnable, **asdict(self), "packages": packages}


def diagnose() -> Diagnosis:
    """Looks at this process's installation and devices; changes nothing.

    Raises:
        ConfigError: megasched itself is not installed.
    """
    from megasched import __version__

    packages = find_packages()
    problems = [_complaint(package) for package in packages if package.required and not package.ok]
    warnings = [_complaint(p) for p in packages if not p.required and p.found and not p.ok]
    found = {package.name: package for package in packages if package.found}
    cuda, devices = "", []
    if "torch" in found:
        try:
            cuda, devices = _cuda()
        except (ImportError, OSError) as error:
            problems.append(f"torch {found['torch'].found} can't be imported: {error}")
    if "transformer-engine" in found and cuda:
        problem = headers_problem(found["transformer-engine"].found, cuda)
        warnings += [problem] if problem else []
    patches = [_patch(patch) for patch in seams.available()]
    if not problems:  # a patch does not fit a missing or wrong package, which is said already
        problems += [f"patch {patch.name}: {patch.reason}" for patch in patches if patch.applied == "refused"]
    apex = find_apex()
    if apex.problem:
        warnings.append(f"apex in {apex.folder}: {apex.problem}. Remedy: {apex.remedy}")
    return Diagnosis(__version__, packages, apex, cuda, devices, patches, problems, warnings)


def _complaint(package: Package) -> str:
    if package.problem:
        return package.problem
    wanted = f"{package.name}{package.supported}" if package.supported else package.name
    remedy = f"install {wanted}" if package.name == "python" else f"pip install '{wanted}'"
    if not package.found:
        return f"{package.name} is not installed: {remedy}"
    return f"{package.name} {package.found} is not supported: {remedy}"


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
