"""A point of a space as words of a command line."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megasched.errors import ConfigError
from megasched.tuner.expression import Assignment
from megasched.tuner.space import Space


def point_words(space: Space, point: Assignment) -> list[str]:
    """Flags and schedule options of a point, to be put behind the command.

    Raises:
        ConfigError: a symbol's function returns no list of words.
    """
    words: list[str] = []
    options: list[str] = []
    for name, value in point.items():
        symbol = space.symbols[name]
        if symbol.schedule:
            options.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
        elif callable(symbol.flag):
            found = symbol.flag(value)
            if isinstance(found, str) or not isinstance(found, Sequence):
                raise ConfigError(
                    f"{name}: the function of flag= returns a list of words; for {value!r}: {found!r}"
                )
            words += map(str, found)
        elif value is True:
            words.append(symbol.flag)
        elif value is not None and value is not False:
            words += [symbol.flag, str(value)]
    return [*words, "--schedule-option", *options] if options else words


def trial_words(iterations: int) -> list[str]:
    """What makes a run a trial: it ends after a few iterations, each of which is logged."""
    return ["--exit-interval", str(iterations), "--log-interval", "1"]


def check_command(space: Space, command: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: there is none, it saves checkpoints, or it has a flag that is tried as well.
    """
    if not command:
        raise ConfigError(
            "there is no command to try; write it after `--`: megasched tune SPACE.py -- torchrun "
            "--nproc-per-node 8 -m megasched pretrain_gpt.py <flags>"
        )
    given = {word.partition("=")[0] for word in command}
    if "--save" in given:
        raise ConfigError(
            "--save: trials end after a few iterations, and must not leave checkpoints; leave it out"
        )
    for symbol in space.symbols.values():
        if symbol.flag in given and not symbol.schedule:
            raise ConfigError(
                f"{symbol.flag} is in the command, and the space tries it as {symbol.name}; leave it out of one"
            )
