"""Writes certificates of what ``megasched verify`` found, and checks whether one is valid for a run."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.definition.objectives import objective_of
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule_file import SCHEDULE, split_file
from megasched.model_adapters.adapter_file import ADAPTER_FILE
from megasched.model_adapters.registry import adapter_origin
from megasched.reading.files import Expected, read_bytes
from megasched.reading.forms import misfit
from megasched.reading.json_file import read_json
from megasched.transformers_names import MODEL_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 3
FLAG = "--require-certificate"
CERTIFICATE = Expected(f"a certificate of format {FORMAT}, which `megasched verify` writes", flag=FLAG)
_KNOWN = {
    **{"versions": {str: str}, "schedule": {}, "model": {}, "adapter": {}, "classes": {str: str}},
    **{"parallelism": {str: bool}, "found": {}},
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
            "installed": adapter_origin(config.model_type) if adapter is None else "",
            "sha256": _hash(b"" if adapter is None else read_bytes(adapter, ADAPTER_FILE)),
        },
        "classes": sources_of(definition),
        "parallelism": _kinds(layout),
    }


def sources_of(definition: PreTrainedModel) -> dict[str, str]:
    """Returns hashes of the source of a definition's classes and their bases, and of files around them.

    A class is under ``file.name``. Under the name of a file is the hash of all of it, as classes call functions
    beside them, and in other files. Code of transformers and torch is left out: their versions stand for it.

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
    for file in _files_of({kind.__module__ for kind in custom_classes(definition)}):
        found[file.name] = _hash(file.read_bytes())
    return dict(sorted(found.items()))


def _files_of(modules: set[str]) -> list[Path]:
    """Returns the files of modules and of those whose code they use, but not of installed packages."""
    todo, met = sorted(modules), dict[str, Path]()
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in met or name.partition(".")[0] in (*LIBRARIES, "megasched") or not file:
            continue
        if "site-packages" in Path(file).parts:
            continue
        met[name] = Path(file)
        for value in vars(module).values():
            user = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            todo += [user] if isinstance(user, str) else []
    return list(met.values())


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
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    except OSError as error:
        raise ConfigError(f"--certificate {path}: it can't be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


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
    for package, wanted in subject["versions"].items():
        other = held["versions"].get(package)
        if other != wanted:
            wrong.append(f"{package} is {wanted} here, and was {other}")
    for what in ("schedule", "model", "adapter"):
        if held.get(what) != subject[what]:
            wrong.append(f"the {what} is another one")
    wrong += _changed(held["classes"], subject["classes"])
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
