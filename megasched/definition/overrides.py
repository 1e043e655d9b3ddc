"""Applies ``--hf-override``: makes an HF config anew, as if the given values stood in its file.

An override is not set on the finished config, where no other field would follow from it. Instead, values in the
file that the class would derive anyway are removed, the overrides are added, and the class makes the config from
that.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megasched.definition.config_check import odd_sizes
from megasched.definition.config_file import (
    IDENTITY,
    Path,
    config_or_none,
    make_config,
    put,
    quietly,
    value_at,
    without,
    without_derived,
)
from megasched.errors import ConfigError
from megasched.reading.forms import unsound_text
from megasched.reading.json_file import NoJson, parse_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FLAG = "--hf-override"
ROPE = "rope_parameters"
LONGEST = 200  # characters of an override in a message
# Where config files had it before there were `rope_parameters`; classes still read them, and save none.
OLD_ROPE = ("rope_scaling", "rope_theta", "partial_rotary_factor")
# Fields that a class makes of another one only where they are not given.
NOT_BESIDE = {"num_labels": ("id2label", "label2id")}


class Override(NamedTuple):
    """Represents one ``key=value``.

    Attributes:
        text: as the user wrote it.
        path: path of the overridden field.
        value: new value of the field.
    """

    text: str
    path: Path
    value: Any

    @property
    def key(self) -> str:
        """Returns the path, joined with dots."""
        return ".".join(self.path)


def with_overrides(config: PretrainedConfig, file: Mapping[str, Any], texts: Sequence[str]) -> PretrainedConfig:
    """Returns the config that its class makes of the file with these values and without derived ones.

    Args:
        config: as its class made it of ``file``; it is not changed.
        file: the dictionary of ``config.json``.
        texts: ``key=value`` strings; see ``load_config``.

    Raises:
        ConfigError: one names no field, changes nothing, or has a value that is inconsistent with the others.
    """
    placed = [_placed(config, _parsed(text)) for text in texts]
    overrides = list({override.path: override for override in placed}.values())  # the last one counts
    with quietly():
        old = _with_overridden(config, file, overrides)
        given = without_derived(config, old, {override.path for override in overrides})
        new = _with_values(given, overrides)
        for why in odd_sizes(new):
            raise ConfigError(f"{FLAG}: {why}")
        _refuse_other_lengths(config, given, new, overrides)
    made = _made_or_refused(config, new, overrides)
    for override in overrides:
        _refuse_without_effect(config, given, made, override, overrides)
    return made


def _parsed(text: str) -> Override:
    if why := unsound_text(text):
        raise ConfigError(f"{FLAG}: {why}")
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{FLAG} {shown!r}: expected key=value")
    try:
        parsed = parse_json(value)
    except NoJson:
        parsed = value
    except ValueError as error:
        raise ConfigError(f"{FLAG} {text:.80}: {error}") from error
    return Override(shown, tuple(key.strip().split(".")), parsed)


def _placed(config: PretrainedConfig, override: Override) -> Override:
    """Returns the override with its path in the names that the class itself uses.

    Raises:
        ConfigError: the parents of the field do not exist.
    """
    from transformers import PretrainedConfig

    target: Any = config
    path: list[str] = []
    for parent in override.path[:-1]:
        name = _own_name(target, parent)
        target = value_at(target, (name,))
        path.append(name)
        if not isinstance(target, dict | PretrainedConfig):
            raise _no_field(config, override)
    field = _own_name(target, override.path[-1])
    if not isinstance(target, dict):
        path += _rope_path(target, field, override)
        if not _is_field(target, field) and hasattr(type(target), field):  # what belongs to the class
            raise _no_field(config, override)
    elif field in target or (ROPE in path and field in _rope_fields()):
        path.append(field)
    else:
        raise _no_field(config, override)
    return override._replace(
        path=tuple(path), value={} if path[-1] == ROPE and not override.value else override.value
    )


def _rope_path(target: PretrainedConfig, field: str, override: Override) -> list[str]:
    """Returns the current path of a field, which may have moved into the parameters of the rotary embedding.

    Raises:
        ConfigError: each kind of layer has its own rotary embedding, and the override does not name the kind.
    """
    rope, value = vars(target).get(ROPE), override.value
    old = field in OLD_ROPE and (field == OLD_ROPE[0] or field not in _fields(target))
    if not isinstance(rope, dict) or not (old or field == ROPE):
        return [field]
    below = [field] if field in OLD_ROPE[1:] else []
    kinds = [kind for kind, part in rope.items() if isinstance(part, dict)]
    if kinds and not (isinstance(value, dict) and any(isinstance(part, dict) for part in value.values())):
        ways = " or ".join(".".join([ROPE, kind, *below]) + "=..." for kind in kinds)
        what = f"{type(target).__name__} has one for each kind of layer"
        raise ConfigError(f"{FLAG} {override.text!r}: {what}; write {ways}")
    return [ROPE, *below]


def _with_values(file: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns a copy of the file with all overrides in it."""
    found = copy.deepcopy(file)
    for override in overrides:
        put(found, override.path, _completed(value_at(found, override.path), override))
    return found


def _completed(old: Any, override: Override) -> Any:
    """Returns the value of an override.

    The value of a rotary embedding keeps the old base and rotary fraction unless it sets them: files had those
    beside it.
    """
    value = override.value
    if ROPE not in override.path or not isinstance(old, dict) or not isinstance(value, dict):
        return value
    return {**{name: old[name] for name in OLD_ROPE[1:] if old.get(name) is not None}, **value}


def _rope_fields() -> set[str]:
    from transformers import RopeParameters

    return set(RopeParameters.__annotations__)


def _own_name(target: Any, name: str) -> str:
    return name if isinstance(target, dict) else type(target).attribute_map.get(name, name)


def _fields(target: PretrainedConfig) -> set[str]:
    return {*vars(target), *(field.name for field in dataclasses.fields(target))} - {"model_type"}


def _no_field(config: PretrainedConfig, override: Override) -> ConfigError:
    return ConfigError(
        f"{FLAG} {override.text!r}: {type(config).__name__} has no field {override.key[:LONGEST]!r}"
    )


def _made_or_refused(
    config: PretrainedConfig, file: Mapping[str, Any], overrides: Sequence[Override]
) -> PretrainedConfig:
    try:
        return make_config(config, file)
    except Exception as error:  # each class validates in its own way
        asked = " ".join(override.text for override in overrides)
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{FLAG} {asked}: {type(config).__name__} can't be made with that: {why:.600}"
        ) from error


def _with_overridden(
    config: PretrainedConfig, file: Mapping[str, Any], overrides: Sequence[Override]
) -> dict[str, Any]:
    """Returns a copy of the file with the current values of all overridden fields, under the class's own names."""
    found, values = copy.deepcopy(dict(file)), config.to_dict()
    for override in overrides:
        level, target, below = found, config, values
        for name in override.path:
            _rename(level, target, name)
            if name == ROPE and not isinstance(target, dict):
                for old in set(OLD_ROPE) - _fields(target):
                    level.pop(old, None)
            if not isinstance(below, dict) or name not in below:
                break
            if not isinstance(level.get(name), dict) or not isinstance(below[name], dict):
                level[name] = copy.deepcopy(below[name])
            level, target, below = level[name], value_at(target, (name,)), below[name]
        for other in NOT_BESIDE.get(override.path[-1], ()):
            found_at = value_at(found, override.path[:-1])
            found_at.pop(other, None)
    return found


def _rename(level: dict[str, Any], target: Any, name: str) -> None:
    """Renames a field that the file has under another name to the one that its class uses."""
    for other, own in ({} if isinstance(target, dict) else type(target).attribute_map).items():
        if own == name and other in level:
            value = level.pop(other)
            level.setdefault(name, value)


def _refuse_other_lengths(
    config: PretrainedConfig, old: dict[str, Any], new: dict[str, Any], overrides: Sequence[Override]
) -> None:
    """Checks that no list in the file gets the wrong length through the overrides.

    Raises:
        ConfigError: with the overrides the class would make a list of another length than the file's own.
    """
    overridden = {override.path for override in overrides}
    for path in _lists(old):
        if any(path[: len(other)] == other for other in overridden):
            continue
        own, before, after = (
            value_at(old, path),
            *(config_or_none(config, without(file, [path])) for file in (old, new)),
        )
        lengths = [
            len(value) if isinstance(value := value_at(made, path), list) else None for made in (before, after)
        ]
        if None not in lengths and lengths[0] == len(own) != lengths[1]:
            asked, key = " ".join(override.text for override in overrides), ".".join(path)
            raise ConfigError(
                f"{FLAG} {asked}: the config's own {key} has {len(own)} entries, {lengths[1]} are needed; they "
                f"are not those that {type(config).__name__} would choose, so say {key}='[...]' as well"
            )


def _lists(level: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    for name, value in level.items():
        if isinstance(value, list) and name not in IDENTITY:
            yield (*path, name)
        elif isinstance(value, dict):
            yield from _lists(value, (*path, name))


def _refuse_without_effect(
    config: PretrainedConfig,
    given: dict[str, Any],
    made: PretrainedConfig,
    override: Override,
    overrides: Sequence[Override],
) -> None:
    """Checks that an override has an effect.

    Repeating the field's present value is allowed: a script may do so for every model.

    Raises:
        ConfigError: the class has no such field, or makes the same config with the override and without.
    """
    known = _is_field(value_at(config, override.path[:-1]), override.path[-1])
    if known and _holds(value_at(made, override.path), override.value):
        return
    with quietly():
        other = config_or_none(config, _with_values(given, [one for one in overrides if one is not override]))
    if other is None:
        return
    before, after = other.to_dict(), made.to_dict()
    if not known:
        before, after = without(before, [override.path]), without(after, [override.path])
        if before == after:
            raise _no_field(config, override)
    if before == after:
        kept = value_at(made, override.path)
        raise ConfigError(
            f"{FLAG} {override.text!r} changes nothing: as its other fields are, {type(config).__name__} makes "
            f"{override.key} = {kept!r:.200} of it"
        )


def _is_field(target: Any, name: str) -> bool:
    """Returns whether a class has this field; it accepts other arguments too, and makes fields of them."""
    if isinstance(target, dict):  # looked for when the override was placed
        return True
    return name in _fields(target) or isinstance(getattr(type(target), name, None), property)


def _holds(value: Any, given: Any) -> bool:
    """Returns whether a config has the given value; its class may have added to it."""
    if isinstance(given, dict) and value is not None:
        return all(_holds(value_at(value, (name,)), part) for name, part in given.items())
    return value == given or str(value).removeprefix("torch.") == given
