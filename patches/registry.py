"""Lists every runtime change to other packages' code, and applies and undoes it by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from megasched.attributes import Undo, in_one_walk, resolve, undo_all
from megasched.errors import ConfigError
from megasched.versions import TESTED, judge

# Package -> files of it, each of which defines PATCH.
_DECLARED: dict[str, tuple[str, ...]] = {
    "megasched.patches": (
        *("host_cuda", "dataset_helpers", "adamw_resume", "fp32_resume", "zigzag_positions", "results_queue"),
        *("float32_numbers", "float32_places", "bucket_padding", "eval_batch", "skipped_steps"),
    )
}


def _always_needed() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Declares a runtime change to another package's code.

    Attributes:
        name: the name users know it by, e.g. ``adamw_resume``; also that of its file.
        targets: ``"module:attr"`` of everything it changes.
        why: the fault that it mends, with the upstream file and line.
        change: makes the change and returns its undo, or several in the order of the changes; keyword options of
            ``apply`` reach it.
        versions: package -> range of versions that it is known to work with.
        signature: target -> names of the parameters it must have.
        unneeded: why this installation can do without it, or None when it can't. Asked at ``apply``.
    """

    name: str
    targets: tuple[str, ...]
    why: str
    change: Callable[..., Undo | Sequence[Undo]]
    versions: Mapping[str, str] = field(default_factory=lambda: {"megatron-core": TESTED["megatron-core"]})
    signature: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unneeded: Callable[[], str | None] = _always_needed

    @property
    def version_range(self) -> str:
        """Returns the supported versions as text, e.g. ``megatron-core >=0.19,<0.21``."""
        return "; ".join(f"{package} {versions}" for package, versions in self.versions.items())


_undos: dict[str, Undo] = {}


def declare(package: str, *files: str) -> None:
    """Adds patches of another package.

    Args:
        files: modules of it; each defines ``PATCH`` and has that patch's name.
    """
    _DECLARED[package] = files
    _patches.cache_clear()


@cache
def _patches() -> dict[str, Patch]:
    modules = [f"{package}.{file}" for package, files in _DECLARED.items() for file in files]
    found = [importlib.import_module(module).PATCH for module in modules]
    return {patch.name: patch for patch in found}


def available() -> list[Patch]:
    """Returns all declared patches, active or not; imports neither torch nor Megatron."""
    return list(_patches().values())


def active() -> list[str]:
    """Returns the names of the patches in force in this process, in the order of their application."""
    return list(_undos)


def apply(name: str, **options: object) -> bool:
    """Applies a patch; a second time is a no-op.

    Args:
        name: as ``available`` lists it.
        options: handed to the patch (``force=True`` for host_cuda).

    Returns:
        Whether the patch is now in force: False when this installation does not need it.

    Raises:
        ConfigError: unknown name, a package older than the patch's range, a target that moved or whose
            parameters changed.
    """
    patch = _get(name)
    if name in _undos:
        return True
    if check(patch) is not None:
        return False
    made = patch.change(**options)
    _undos[name] = made if callable(made) else partial(undo_all, made)
    return True


def apply_each(names: Iterable[str]) -> None:
    """Applies patches that take no options, one after the other; see ``apply``."""
    with in_one_walk():
        for name in names:
            apply(name)


def check(patch: Patch) -> str | None:
    """Checks that a patch fits the installed packages.

    Returns:
        Why this installation can do without it; None when it needs it.

    Raises:
        ConfigError: a package older than the patch's range, a target that moved or whose parameters changed.
    """
    _check_versions(patch)
    reason = patch.unneeded()
    if reason is None:
        _check_targets(patch)
    return reason


def undo(name: str) -> None:
    """Takes a patch back; nothing happens when it is not in force.

    Raises:
        ConfigError: unknown name.
    """
    _get(name)
    if name in _undos:
        _undos.pop(name)()


def undo_each(names: Iterable[str]) -> None:
    """Takes patches back in the order given; see ``undo``."""
    with in_one_walk():
        for name in names:
            undo(name)


def installed_version(package: str) -> str:
    """Returns a package's version; Megatron's is that of the imported module, maybe a checkout and not the wheel.

    Raises:
        ConfigError: the package is not installed.
    """
    from importlib.metadata import PackageNotFoundError, version

    if package == "megatron-core":
        return resolve("megatron.core:__version__")
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise ConfigError(f"{package} is not installed") from error


def _get(name: str) -> Patch:
    try:
        return _patches()[name]
    except KeyError:
        raise ConfigError(f"no patch is called {name!r}; there are: {', '.join(_patches())}") from None


def _check_versions(patch: Patch) -> None:
    for package, versions in patch.versions.items():
        installed = installed_version(package)
        if judge(installed, versions) == "older":  # whether a newer one may run at all is said before any patch
            raise ConfigError(
                f"patch {patch.name} can't be applied to {package} {installed}; "
                f"it is known to work with {patch.version_range}"
            )


def _check_targets(patch: Patch) -> None:
    for target in patch.targets:
        try:
            found = resolve(target)
        except ConfigError as error:
            raise _moved(patch, str(error)) from error
        wanted = patch.signature.get(target, ())
        missing = [name for name in wanted if name not in inspect.signature(found).parameters] if wanted else []
        if missing:
            raise _moved(patch, f"{target} has no parameter {', '.join(missing)} any more")


def _moved(patch: Patch, what: str) -> ConfigError:
    installed = ", ".join(f"{package} {installed_version(package)}" for package in patch.versions)
    return ConfigError(
        f"patch {patch.name} does not fit what is installed ({installed}): {what}. "
        f"Versions known to work: {patch.version_range}"
    )
