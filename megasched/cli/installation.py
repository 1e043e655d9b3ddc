"""Finds the packages that megasched needs, according to its metadata, and those that are installed."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megasched.errors import ConfigError
from megasched.trainer.entry import WITHOUT_TE, find_megatron
from megasched.versions import TESTED, judge

# Optional package -> what a run does without it. Every package of the extras below has its line here.
COSTS = {
    "transformer-engine": WITHOUT_TE,
    "matplotlib": "megasched quickstart can't draw its loss curve",
    "tokenizers": "megasched quickstart can't write its tokenizer",
}
EXTRAS = ("te", "quickstart")


@dataclass(frozen=True)
class Package:
    """Describes one package that megasched works with.

    Attributes:
        name: name by which pip knows it; also ``python``.
        supported: version range, e.g. ``>=0.19,<0.21``; empty where any version will do.
        found: installed version; empty where there is none.
        required: whether nothing runs without it.
        cost: what the absence of an optional package costs.
        where: folder from which Megatron, which may be a checkout, is imported.
        problem: why the package can't be used although it is found; empty where it can.
    """

    name: str
    supported: str
    found: str
    required: bool = True
    cost: str = ""
    where: str = ""
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Returns whether the package is found, in the supported range and without a problem."""
        return bool(self.found) and not self.problem and judge(self.found, self.supported) == "tested"

    @property
    def untested(self) -> bool:
        """Returns whether it is newer than the tested ones, so that a run needs ``--allow-unverified``."""
        door = self.name in TESTED and bool(self.found) and not self.problem
        return door and judge(self.found, self.supported) == "newer"


def find_packages() -> list[Package]:
    """Returns Python, the required packages and the optional ones, in this order.

    Raises:
        ConfigError: megasched is imported without being installed, so that no metadata says what it needs.
    """
    try:
        lines, python = requires("megasched") or [], metadata("megasched")["Requires-Python"]
    except PackageNotFoundError:
        raise ConfigError("megasched itself is not installed; in its folder: pip install -e .") from None
    wanted = [Requirement(line) for line in lines]
    return [
        Package("python", _in_order(SpecifierSet(python)), platform.python_version()),
        *(_package(requirement) for requirement in wanted if requirement.marker is None),
        *_optional(wanted),
    ]


def _optional(wanted: list[Requirement]) -> Iterator[Package]:
    for requirement in wanted:
        marker = requirement.marker
        if marker is not None and any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
            yield Package(
                requirement.name,
                _in_order(requirement.specifier),
                _installed(requirement.name),
                required=False,
                cost=COSTS[requirement.name],
            )


def _package(requirement: Requirement) -> Package:
    supported = TESTED.get(requirement.name) or _in_order(requirement.specifier)
    if requirement.name == "megatron-core":
        return _megatron(supported)
    return Package(requirement.name, supported, _installed(requirement.name))


def _megatron(supported: str) -> Package:
    """Returns the Megatron that a run would import: a checkout on PYTHONPATH precedes the installed package."""
    installed = _installed("megatron-core")
    try:
        megatron = find_megatron()
    except ConfigError as error:
        return Package("megatron-core", supported, installed, problem=str(error))
    return Package("megatron-core", supported, megatron.version, where=str(megatron.folder))


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _in_order(specifiers: SpecifierSet) -> str:
    """Returns the specifiers as text, the lower bound first, as people write them."""
    return ",".join(sorted(map(str, specifiers), key=lambda text: (not text.startswith(">"), text)))
