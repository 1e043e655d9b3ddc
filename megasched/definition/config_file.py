"""Separates the values in the file of an HF config that were given from those that its class derives anyway.

``save_pretrained`` writes derived values beside given ones: the kinds of the layers, which follow from their
number and a window; the size of a head, which follows from the width. A value that equals the derived one need not
have been meant; a value that differs is the file's own.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What says the class and where it comes from.
IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version")

# Of a field, with those of the parts that it is in.
Path = tuple[str, ...]


@contextmanager
def quietly() -> Iterator[None]:
    """Runs its body without log messages of transformers about configs that are only made for inspection."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def make_config(config: PretrainedConfig, file: Mapping[str, Any]) -> PretrainedConfig:
    """Returns a config of the same class, made from another file."""
    return type(config).from_dict(copy.deepcopy(dict(file)), name_or_path=config.name_or_path)


def config_or_none(config: PretrainedConfig, file: Mapping[str, Any]) -> PretrainedConfig | None:
    """Returns the result of ``make_config``, or None if the class refuses that file."""
    try:
        return make_config(config, file)
    except Exception:  # each class validates in its own way; without a field that it needs there is no config
        return None


def without_derived(config: PretrainedConfig, file: dict[str, Any], overridden: set[Path]) -> dict[str, Any]:
    """Returns the file without the values that the class sets itself when they are missing.

    Args:
        overridden: fields that are not removed: others may follow from them.
    """
    whole = make_config(config, file)
    wanted = whole.to_dict()
    asked = list(_candidates(whole, file, wanted, overridden))
    found = _without_defaults(config, file, asked, wanted)
    asked = [path for path in asked if path[-1] in (value_at(found, path[:-1]) or ())]
    asked.sort(key=lambda path: _has_default(whole, path))
    while asked:
        path = asked.pop(0)
        less = without(found, [path])
        if _is_config(config, less, wanted):
            found = less
        elif isinstance(value_at(found, path), dict):
            asked[:0] = [(*path, name) for name in value_at(found, path)]
    return found


def _without_defaults(
    config: PretrainedConfig, file: dict[str, Any], asked: Sequence[Path], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the file without the values that a config without them has, too: most fields, in one step."""
    bare = config_or_none(config, without(file, asked))
    if bare is None:
        return file
    values = bare.to_dict()
    less = without(file, [path for path in asked if value_at(values, path) == value_at(file, path)])
    return less if _is_config(config, less, wanted) else file


def _is_config(config: PretrainedConfig, file: dict[str, Any], wanted: Mapping[str, Any]) -> bool:
    made = config_or_none(config, file)
    return made is not None and made.to_dict() == wanted


def _candidates(target: Any, level: Any, values: Any, overridden: set[Path], path: Path = ()) -> Iterator[Path]:
    """Yields the paths of fields that have the same value in the file and in the config."""
    from transformers import PretrainedConfig

    for name, value in level.items():
        here = (*path, name)
        if name in IDENTITY or name not in values or here in overridden:
            continue
        part = value_at(target, (name,))
        around = any(other[: len(here)] == here for other in overridden)
        if isinstance(value, dict) and (around or isinstance(part, PretrainedConfig)):
            if isinstance(values[name], dict):
                yield from _candidates(part, value, values[name], overridden, here)
        elif value == values[name]:
            yield here
        elif isinstance(value, dict) and isinstance(values[name], dict):
            yield from _candidates(part, value, values[name], overridden, here)


def _has_default(config: PretrainedConfig, path: Path) -> bool:
    """Returns whether a field has a fixed default; fields that follow from others are tried for removal first."""
    target = value_at(config, path[:-1])
    if isinstance(target, dict):
        return False
    return any(
        field.name == path[-1] and field.default not in (None, dataclasses.MISSING)
        for field in dataclasses.fields(target)
    )


def value_at(target: Any, path: Path) -> Any:
    """Returns a field of a config, or of its dictionary; None if there is none."""
    for name in path:
        fields = target if isinstance(target, dict) else getattr(target, "__dict__", {})
        # Of sizes that differ by layer, only the field itself may be asked for the one for all.
        target = fields[name] if name in fields else getattr(target, name, None)
    return target


def put(level: dict[str, Any], path: Path, value: Any) -> None:
    """Sets a field of a dictionary, and creates its missing parents."""
    for name in path[:-1]:
        level = level.setdefault(name, {})
    level[path[-1]] = copy.deepcopy(value)


def without(file: dict[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """Returns a copy of a dictionary without some fields."""
    found = copy.deepcopy(file)
    for path in paths:
        level = value_at(found, path[:-1])
        if isinstance(level, dict):
            level.pop(path[-1], None)
    return found
