"""Reads the command line of a run, Megatron's flags and megasched's, with short errors and a help that prints."""

from __future__ import annotations

import argparse
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from megasched.errors import ConfigError

USAGE = "megasched %(prog)s --model-schedule FILE --hf-model DIR <flags>"
# Of the flags that there are, so many are named beside one that there is not, and so alike they must be to it.
NEAREST, ALIKE = 3, 0.8


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
