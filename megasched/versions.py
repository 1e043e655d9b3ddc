"""Lists the tested versions of other packages, and judges others; ``pyproject.toml`` says the oldest to pip."""

from __future__ import annotations

from typing import Literal

from megasched.errors import ConfigError

# Package, as pip knows it -> versions. megatron-core 0.20 is Megatron-LM's main, at d98e8a6 of 2026-08-22.
TESTED = {
    "megatron-core": ">=0.19,<0.21",
    "transformers": ">=5.17,<5.25",
    "torch": ">=2.11,<2.16",
}

Judgement = Literal["tested", "older", "newer"]


def judge(found: str, tested: str) -> Judgement:
    """Says whether a version is in a range of tested ones, e.g. ``>=0.19,<0.21``, or on which side of it.

    A pre-release or a build of one's own counts as its release: torch is ``2.11.0a0+...`` in NVIDIA's images.
    """
    from packaging.specifiers import Specifier, SpecifierSet
    from packaging.version import Version

    release, ranges = Version(found).base_version, SpecifierSet(tested)
    if ranges.contains(release):
        return "tested"
    floors = [str(each) for each in ranges if each.operator in (">=", ">", "==")]
    return "newer" if all(Specifier(floor).contains(release) for floor in floors) else "older"


def warning_of(package: str, found: str, *, allow_unverified: bool, remedy: str = "") -> str:
    """Checks the version of a package of ``TESTED``; returns what is to be said of one that is newer.

    Args:
        package: name by which pip knows it.
        found: installed version.
        allow_unverified: the job goes on with a newer version.
        remedy: what would be right, if not pip.

    Returns:
        A warning; empty for a tested version.

    Raises:
        ConfigError: the version is older than all tested ones, or newer without ``allow_unverified``.
    """
    tested = TESTED[package]
    judgement = judge(found, tested)
    if judgement == "tested":
        return ""
    untested = f"{package} {found} is {judgement} than what megasched was tested with ({tested})"
    if judgement == "newer" and allow_unverified:
        return f"{untested}: --allow-unverified goes on with it"
    remedy = remedy or f"pip install '{package}{tested}'"
    door = ", or go on with it by --allow-unverified" if judgement == "newer" else ""
    raise ConfigError(f"{untested}: {remedy}{door}")
