"""Reads the command line of a run, with a help that prints, and errors that say what is wrong and nothing else.

Megatron's parser answers a misspelt flag with the usage of all, and flags that contradict each other with an
assertion, mostly without a word.
"""

from __future__ import annotations

import argparse
import linecache
import re
import textwrap
import traceback
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from megasched.errors import ConfigError

USAGE = "megasched %(prog)s --model-schedule FILE --hf-model DIR <flags>"
# Of the flags that there are, so many are named beside one that there is not, and so alike they must be to it.
NEAREST, ALIKE = 3, 0.8
# Megatron's function that compares flags with each other; of most rules the text is the code alone.
_JUDGE = "validate_args"
_READ = re.compile(r"\bargs\.(\w+)")
_ABSENT = re.compile(r"assert args\.\w+ is not None(, .*)?")


class FlagParser(argparse.ArgumentParser):
    """Parses the flags of other parsers, in their order; an error is a ``ConfigError`` without all flags."""

    def __init__(self, *parsers: argparse.ArgumentParser) -> None:
        super().__init__(
            usage=USAGE,
            description="Runs a training script of Megatron's under a schedule; megasched's flags come first.",
            parents=parsers,
            add_help=False,  # Megatron's parser has the flag
            allow_abbrev=False,
        )

    # The namespace is one that Megatron does not pass, and argparse's overloads are of its type.
    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Returns what the flags say.

        Raises:
            ConfigError: a flag that there is not, with the nearest that there are; or a flag without its value.
        """
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise ConfigError("\n".join(self._unknown(unknown)))
        return found

    def _unknown(self, words: Sequence[str]) -> Iterator[str]:
        """Yields a line for each flag among the words that nothing has taken, or for words that follow none."""
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not words[0].startswith("-"):
            yield f"{words[0]}: no flag takes this word; is the one before it a flag without a value?"
        known = [option for option, action in self._option_string_actions.items() if action.help != SUPPRESS]
        for flag in flags:
            nearest = ", ".join(get_close_matches(flag, known, n=NEAREST, cutoff=ALIKE))
            meant = f"did you mean {nearest}?" if nearest else f"`megasched {self.prog} --help` lists them"
            yield f"{flag}: there is no such flag; {meant}"

    def error(self, message: str) -> NoReturn:
        """Raises a ConfigError."""
        raise ConfigError(message)

    def format_help(self) -> str:
        """Returns the help of all flags; a text that is no format (Megatron has one) is printed as it is."""
        for action in self._actions:
            try:
                str(action.help) % {**vars(action), "prog": self.prog}
            except (ValueError, TypeError, KeyError):
                action.help = str(action.help).replace("%", "%%")
        return super().format_help()


def megatron_parser() -> argparse.ArgumentParser:
    """Returns a parser of the installed Megatron's flags alone."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))


def broken_rule(error: Exception) -> str:
    """Returns which rule is broken, where it stands and which flags it is about; empty for another error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.name != _JUDGE or last.lineno is None:
        return ""
    code = _rule(last.filename, last.lineno, last.end_lineno or last.lineno)
    flags = _flags(code)
    return "\n    ".join(
        [
            f"Megatron refuses {', '.join(flags) or 'these flags'}{f': {error}' if str(error) else ''}",
            f"rule: {last.filename}:{last.lineno}",
            *(f"    {line}" for line in code if not str(error)),
            *([f"remedy: {_remedy(code)}"] if flags else []),
        ]
    )


def _remedy(code: list[str]) -> str:
    """Returns what would be right: the flag whose absence the rule's own statement is about, or another value."""
    missing = _flags(code[-1:]) if _ABSENT.fullmatch(code[-1].strip()) else []
    return f"give {missing[0]}, too" if missing else "change one of them"


def _rule(file: str, first: int, last: int) -> list[str]:
    """Returns a statement, and before it the condition under which it runs, where it stands in one."""
    lines = [linecache.getline(file, number).rstrip() for number in range(first, last + 1)]
    indent = _indent(lines[0])
    above = (linecache.getline(file, number).rstrip() for number in range(first - 1, 0, -1))
    outer = next((line for line in above if line and _indent(line) < indent), "")
    conditions = [outer] if outer.lstrip().startswith(("if ", "elif ")) else []
    return textwrap.dedent("\n".join([*conditions, *lines])).splitlines()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _flags(code: list[str]) -> list[str]:
    """Returns the flags of which the code reads the values, in its order."""
    actions = megatron_parser()._actions
    spelled = {action.dest: action.option_strings[0] for action in reversed(actions) if action.option_strings}
    return [spelled[name] for name in dict.fromkeys(_READ.findall("\n".join(code))) if name in spelled]
