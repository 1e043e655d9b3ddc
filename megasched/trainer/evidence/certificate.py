"""Writes certificates of what ``megasched verify`` found, and checks whether one is valid for a run."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions, version
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.definition.objectives import objective_of
from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule_file import SCHEDULE, find_schedule, split_file
from megasched.model_adapters.adapter_file import ADAPTER_FILE
from megasched.model_adapters.registry import adapter_origin
from megasched.reading.files import Expected, read_bytes
from megasched.reading.forms import misfit
from megasched.reading.json_file import read_json
from megasched.transformers_names import MODEL_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 4
FLAG = "--require-certificate"
CERTIFICATE = Expected(f"a certificate of format {FORMAT}, which `megasched verify` writes", flag=FLAG)
_KNOWN = {
    **{"versions": {str: str}, "schedule": {}, "model": {}, "adapter": {}, "classes": {str: str}},
    **{"parallelism": {str: bool}, "imports": {str: str}, "found": {}},
}
LIBRARIES = frozenset({"transformers", "torch", *sys.stdlib_module_names})
PACKAGES = ("megasched", "megatron-core", "transformers", "torch")
# Of a config: what says nothing about the model.
_IGNORED = (MODEL_NAME, "transformers_version", "torch_dtype", "dtype", "use_cache")


def subject_of(
    schedule: str, definition: PreTrainedModel, layout: ParallelDims, adapter: str | None = None
) -> dict[str, Any]:
    """Returns what a certificate is about: versions, schedule, model, adapter, classes, kinds of parallelism.

    Sizes of groups are left out: what holds for TP 2 holds for TP 8, as the same code runs.

    Args:
        schedule: the value of ``--model-schedule``; a file counts by its contents.
        definition: the model as it is trained, overrides made.
        adapter: the value of ``--adapter``; it counts by its contents, and an installed one by its package.
    """
    config = definition.config
    file, name = split_file(schedule)
    text = b"" if file is None else read_bytes(file, SCHEDULE)
    installed = adapter_origin(config.model_type) if adapter is None else ""
    mains = [Path(one) for one in (file, adapter) if one is not None]
    files, imports = _files_of(definition, mains, [_module_of(schedule), *_module_in(installed)])
    values = {key: value for key, value in config.to_dict().items() if key not in _IGNORED}
    return {
        "versions": {package: version(package) for package in PACKAGES},
        "schedule": {"name": name, "sha256": _hash(text)},
        "model": {
            "type": config.model_type,
            "objective": objective_of(definition).name,
            "sha256": _hash(json.dumps(values, sort_keys=True).encode()),
        },
        "adapter": {
            "installed": installed,
            "sha256": _hash(b"" if adapter is None else read_bytes(adapter, ADAPTER_FILE)),
        },
        "classes": {**sources_of(definition), **_hashes([found for found in files if found not in mains])},
        "imports": imports,
        "parallelism": _kinds(layout),
    }


def sources_of(definition: PreTrainedModel) -> dict[str, str]:
    """Returns hashes of the source of a definition's classes and their bases, under ``file.name``.

    Code of transformers and torch is left out: their versions stand for it.

    Raises:
        ConfigError: a class has no source that can be read.
    """
    found = {}
    for kind in custom_classes(definition):
        file, name = kind.__module__.rpartition(".")[2], kind.__qualname__
        try:
            found[f"{file}.{name}"] = _hash(inspect.getsource(kind).encode())
        except (OSError, TypeError) as error:
            what = f"no certificate speaks for {kind.__module__}.{name}: its source can't be read"
            raise ConfigError(what) from error
    return dict(sorted(found.items()))


def _module_of(schedule: str) -> str:
    """Returns the module of a schedule that is registered under a name; empty for one in a file."""
    if split_file(schedule)[0] is not None:
        return ""
    with suppress(ConfigError):  # there is none: no run has it
        return inspect.unwrap(find_schedule(schedule)).__module__
    return ""


def _module_in(origin: str) -> list[str]:
    """Returns the module that an installed adapter's origin names."""
    return [origin.partition(" = ")[2].partition(":")[0]] if origin else []


def _hashes(files: Sequence[Path]) -> dict[str, str]:
    """Returns hashes by the names of files; of several with one name, a hash of all."""
    by_name: dict[str, list[str]] = {}
    for file in sorted(files):
        by_name.setdefault(file.name, []).append(_hash(file.read_bytes()))
    return {name: of[0] if len(of) == 1 else _hash(" ".join(sorted(of)).encode()) for name, of in by_name.items()}


def _files_of(
    definition: PreTrainedModel, mains: Sequence[Path], modules: Sequence[str]
) -> tuple[list[Path], dict[str, str]]:
    """Returns the files of a definition's classes, of other files and modules, and of all that these import.

    Classes call functions beside them and in other files, and a schedule puts into a model what it imports.
    Imports inside of functions count, and nothing is imported to look at it. Installed packages are returned with
    their versions instead.
    """
    names = {kind.__module__ for kind in custom_classes(definition)} | set(modules)
    todo = {name: file for name in names if (file := _file(name))}
    todo |= {f" {number}": main for number, main in enumerate(mains)}  # they are no modules that others import
    met, used = dict[str, Path](), set[str](names)
    while todo:
        name, file = todo.popitem()
        met[name] = file
        module = vars(sys.modules[name]).values() if name in sys.modules else ()
        users = {one.__name__ if inspect.ismodule(one) else getattr(one, "__module__", None) for one in module}
        for user in {*_imported(name, file), *users}:
            if not isinstance(user, str) or user in met:
                continue
            used.add(user)
            if found := _file(user):
                todo[user] = found
    return list(dict.fromkeys(met.values())), _versions(used)


def _versions(modules: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the packages that modules are of, but for Python's own and those of ``PACKAGES``."""
    tops = {name.partition(".")[0] for name in modules} - LIBRARIES - {"", "megasched", "megatron"}
    packages = packages_distributions() if tops else {}
    held = {package for top in tops for package in packages.get(top, ())} - {*PACKAGES}
    return {package: version(package) for package in sorted(held)}


def _file(name: str) -> Path | None:
    """Returns the file of a module, imported or not; None for one of an installed package or without a file."""
    if name.partition(".")[0] in (*LIBRARIES, "megasched"):
        return None
    file, within = getattr(sys.modules.get(name), "__file__", None), None
    for end in range(1, name.count(".") + 2) if name not in sys.modules else ():
        spec = PathFinder.find_spec(".".join(name.split(".")[:end]), within)
        if spec is None:
            return None
        file, within = spec.origin, spec.submodule_search_locations
    path = Path(file) if isinstance(file, str) else None
    return path if path and path.suffix == ".py" and "site-packages" not in path.parts else None


def _imported(name: str, file: Path) -> Iterator[str]:
    """Yields the names of modules that a file may import: what is imported from a package may be one, too."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def custom_classes(definition: PreTrainedModel) -> list[type]:
    """Returns the classes of a definition's modules, and their bases, that are not transformers' or torch's."""
    met = dict.fromkeys(base for module in definition.modules() for base in type(module).__mro__)
    return [kind for kind in met if kind.__module__.partition(".")[0] not in LIBRARIES]


def _kinds(layout: ParallelDims) -> dict[str, bool]:
    return {
        "TP": layout.tp > 1,
        "SP": layout.sp,
        "PP": layout.pp > 1,
        "VPP": layout.vpp > 1,
        "CP": layout.cp > 1,
        "EP": layout.ep > 1,
    }


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def write_certificate(path: Path, subject: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Writes a certificate whole or not at all.

    Args:
        found: measured results by name; plain data.

    Raises:
        ConfigError: it can't be written there.
    """
    text = json.dumps({"format": FORMAT, **subject, "found": found}, indent=1) + "\n"
    try:
        write_whole(path, [text])
    except OSError as error:
        raise ConfigError(f"--certificate {path}: it can't be written: {error.strerror}") from error


def read_certificate(path: Path) -> dict[str, Any]:
    """Reads a certificate.

    Raises:
        ConfigError: there is none, or it is none that this version reads.
    """
    found: dict[str, Any] = read_json(path, CERTIFICATE, {"format": int})
    if found["format"] != FORMAT:
        raise CERTIFICATE.refusal(path, f"it is of format {found['format']}")
    if why := misfit(found, _KNOWN):
        raise CERTIFICATE.refusal(path, why)
    return found


def require_certificate(path: Path, subject: Mapping[str, Any]) -> None:
    """Refuses a run that a certificate is not valid for.

    The certificate must have every kind of parallelism that the run has. Under TP both must agree on sequence
    parallelism.

    Raises:
        ConfigError: with everything that differs.
    """
    held = read_certificate(path)
    wrong = []
    verdict = held["found"].get("verdict")
    if verdict != "equal":
        wrong.append(f"its verdict is {verdict!r}")
    if held["found"].get("bf16"):
        wrong.append("it was made with --bf16, which compares fewer numbers, and those of one step")
    wrong += [f"its copy of the model had no layer like {lack}" for lack in held["found"].get("lacks", ())]
    for package, wanted in subject["versions"].items():
        other = held["versions"].get(package)
        if other != wanted:
            wrong.append(f"{package} is {wanted} here, and was {other}")
    for what in ("schedule", "model", "adapter"):
        if held.get(what) != subject[what]:
            wrong.append(f"the {what} is another one")
    wrong += _changed(held["classes"], subject["classes"])
    for package in subject["imports"].keys() & held["imports"].keys():
        here, other = subject["imports"][package], held["imports"][package]
        wrong += [f"{package}, which its code imports, is {here} here, and was {other}"] if here != other else []
    known = held["parallelism"]
    missing = [kind for kind, used in subject["parallelism"].items() if used and not known.get(kind)]
    if missing:
        wrong.append(f"it was made without {', '.join(missing)}")
    if known.get("SP") and not subject["parallelism"]["SP"] and subject["parallelism"]["TP"]:
        wrong.append("it was made with SP, and the run is without")
    if wrong:
        lines = "\n  - ".join(["it does not speak for this run:", *wrong])
        raise ConfigError(f"{FLAG} {path}: {lines}\n`megasched verify` makes a new one")


def _changed(held: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a line for each class with other code, and for each file with other code beside its classes."""
    differing = [name for name in sorted(held.keys() | now.keys()) if held.get(name) != now.get(name)]
    classes = [name for name in differing if not name.endswith(".py")]
    files = {name.partition(".")[0] for name in classes}
    found = [f"the class {name} {_fate(name, held, now)}" for name in classes]
    beside = [name for name in differing if name.endswith(".py") and name.removesuffix(".py") not in files]
    return [*found, *(f"{name} has other code beside its classes" for name in beside)]


def _fate(name: str, held: Mapping[str, str], now: Mapping[str, str]) -> str:
    if name not in now:
        return "is not there any more"
    return "has other code than it had" if name in held else "was not there"
