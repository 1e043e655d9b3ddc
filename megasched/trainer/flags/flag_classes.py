"""Says of each of Megatron's flags what becomes of it under a schedule.

Each is in one of four classes: honoured, derived from the HF model, refused, or idle, which changes nothing. A
flag that is in none is of a Megatron that these tables have not met. It may mean anything, so that it is refused
by its name, unless ``--allow-unverified`` goes on with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megasched.trainer.flags.flag_parser import megatron_parser
from megasched.trainer.flags.honoured_flags import DERIVED, HONOURED
from megasched.trainer.flags.idle_flags import IDLE
from megasched.trainer.flags.moe import is_mixture_flag
from megasched.trainer.flags.refused_flags import REFUSED, REFUSED_VALUES

_NOT_IN_MODEL = "the HF model has nothing that it speaks of"


@dataclass(frozen=True)
class GivenFlag:
    """Describes a flag that stands on the command line.

    Attributes:
        option: its spelling, e.g. ``--hidden-size``.
        value: parsed value.
        default: value that ``args`` holds without it.
        takes_value: whether a value follows it.
    """

    option: str
    value: Any
    default: Any
    takes_value: bool = True

    def __str__(self) -> str:
        value = getattr(self.value, "name", self.value)
        if isinstance(value, list):
            value = " ".join(map(str, value))
        return f"{self.option} {value}" if self.takes_value else self.option


def explicit_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, GivenFlag]:
    """Returns the flags that stand in ``argv``, by their ``args`` attribute.

    The same parser reads ``argv`` again with every default suppressed, so that ``--flag=value``, flags
    with several values and flags that switch something off count as Megatron itself counts them. The
    parser has no defaults afterwards.
    """
    defaults = {action.dest: parser._defaults.get(action.dest) for action in parser._actions}
    for action in reversed(parser._actions):  # as `get_default`, which looks through all of them for each
        if action.default is not None:
            defaults[action.dest] = action.default
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    given, _ = parser.parse_known_args(list(argv))
    spelled = {word.partition("=")[0] for word in argv}
    flags = {}
    for dest, value in vars(given).items():
        actions = [action for action in parser._actions if action.dest == dest]
        used = next((a for a in actions if spelled.intersection(a.option_strings)), actions[0])
        option = next((o for o in used.option_strings if o in spelled), used.option_strings[0])
        flags[dest] = GivenFlag(option, value, defaults[dest], takes_value=used.nargs != 0)
    return flags


def refusal(dest: str) -> str:
    """Returns why the flag is refused, whatever its value; empty where it is not."""
    if dest in REFUSED:
        return REFUSED[dest]
    return next((reason for pattern, reason in REFUSED.items() if fnmatchcase(dest, pattern)), "")


# Class -> whether the flag with this `args` attribute is in it.
CLASSES: dict[str, Callable[[str], bool]] = {
    "honoured": lambda dest: dest in HONOURED or is_mixture_flag(dest),
    "derived": DERIVED.__contains__,
    "idle": IDLE.__contains__,
    "refused": lambda dest: bool(refusal(dest)),
}


def flag_class(dest: str) -> str:
    """Returns the class of the flag with this ``args`` attribute; empty where it is in none."""
    return next((name for name, holds in CLASSES.items() if holds(dest)), "")


def refusals(given: Mapping[str, GivenFlag], *, unknown: bool = True) -> list[str]:
    """Returns a line for each of Megatron's flags that can't be used under a schedule; defaults can.

    Args:
        unknown: whether flags of no class are refused.
    """
    lines = []
    for dest, flag in _asked(given).items():
        name = str(getattr(flag.value, "name", flag.value))
        reason = refusal(dest) or REFUSED_VALUES.get((dest, name), "")
        if unknown and not flag_class(dest):
            reason = f"megasched does not know this flag of {_megatron()}; --allow-unverified goes on with it"
        lines += [f"{flag}: {reason}"] if reason else []
    return lines


def start_notes(given: Mapping[str, GivenFlag], in_model: Container[str]) -> list[str]:
    """Returns what the start of a run says of the given flags: which change nothing, and which are of no class.

    Args:
        in_model: the attributes that were derived from the HF model.
    """
    idle, unknown = [], []
    for dest, flag in _asked(given).items():
        reason = _NOT_IN_MODEL if dest in DERIVED and dest not in in_model else IDLE.get(dest, "")
        idle += [f"\n  - {flag}: {reason}"] if reason else []
        unknown += [] if flag_class(dest) else [f"{flag}"]
    notes = [f"flags that change nothing under a schedule:{''.join(idle)}"] if idle else []
    if unknown:
        notes.append(f"warning: flags of {_megatron()} that megasched does not know: {', '.join(unknown)}")
    return notes


def unknown_flags() -> list[str]:
    """Returns the ``args`` attributes of the installed Megatron's flags that are in no class."""
    return sorted({action.dest for action in megatron_parser()._actions if not flag_class(action.dest)})


def _asked(given: Mapping[str, GivenFlag]) -> dict[str, GivenFlag]:
    return {dest: flag for dest, flag in given.items() if flag.value != flag.default}


def _megatron() -> str:
    from megatron.core.package_info import __shortversion__

    return f"Megatron {__shortversion__}"
