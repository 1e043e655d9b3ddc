"""Adds megasched's flags to Megatron's parser, under scripts that know nothing of them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from megasched.attributes import Undo, wrap_attribute
from megasched.errors import ConfigError
from megasched.patches.registry import Patch
from megasched.trainer.flags.arguments import (
    apply_derived,
    check_tokenizer,
    flag_parser,
)
from megasched.trainer.flags.flag_classes import GivenFlag, explicit_flags, flag_class
from megasched.trainer.flags.flag_parser import broken_rule
from megasched.trainer.flags.rehearsal import SWITCHES, rehearsal_mode

_PARSE = "megatron.training.arguments:parse_args"
_VALIDATE = "megatron.training.arguments:parse_and_validate_args"

Provider = Callable[[ArgumentParser], ArgumentParser]


def _with_schedule() -> Callable[..., Namespace]:
    from megasched.trainer.session_from_args import begin_session

    # Megatron parses anew for its restart and fault tolerance code; the model is planned once.
    derived_args: dict[tuple[str, ...], dict[str, Any]] = {}

    def patched(
        parse_args: Callable[..., Namespace],
        extra_args_provider: Provider | None = None,
        ignore_unknown_args: bool = False,
    ) -> Namespace:
        parsers: list[ArgumentParser] = []
        of_megatron: set[str] = set()

        def provider(parser: ArgumentParser) -> ArgumentParser:
            of_megatron.update(action.dest for action in parser._actions)
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            parsers.append(flag_parser(parser))
            return parsers[-1]

        args = parse_args(provider, ignore_unknown_args)
        if find_spec("one_logger") is None:  # NVIDIA's own, which Megatron asks each run for
            args.enable_one_logger = False
        given = explicit_flags(parsers[-1], sys.argv[1:])
        if "model_schedule" in given:
            argv, parsed = tuple(sys.argv[1:]), dict(vars(args))
            if argv not in derived_args:
                notes = apply_derived(args, _of_user(given, of_megatron))
                for line in notes if args.rank == 0 else ():
                    print(f"megasched: {line}")
                begin_session(args, given)
                derived_args[argv] = {
                    n: value for n, value in vars(args).items() if n not in parsed or parsed[n] != value
                }
            vars(args).update(derived_args[argv])
        return args

    return patched


def _of_user(given: dict[str, GivenFlag], of_megatron: set[str]) -> dict[str, GivenFlag]:
    """Returns the flags without those that a rehearsal has added, and those that a script has for itself alone."""
    added = SWITCHES if rehearsal_mode(sys.argv[1:]) else ()
    return {
        dest: flag
        for dest, flag in given.items()
        if flag.option not in added and (dest in of_megatron or flag_class(dest))
    }


def _with_checks(
    parse_and_validate_args: Callable[..., Namespace], /, *positional: Any, **named: Any
) -> Namespace:
    from megatron.training.global_vars import get_tokenizer

    try:
        args = parse_and_validate_args(*positional, **named)
    except Exception as error:
        if rule := broken_rule(error):
            raise ConfigError(rule) from error
        raise
    if args.model_schedule is not None:
        check_tokenizer(args, get_tokenizer())
    return args


def _change() -> list[Undo]:
    return [
        wrap_attribute(_PARSE, _with_schedule(), rebind=("megatron",)),
        wrap_attribute(_VALIDATE, _with_checks, rebind=("megatron",)),
    ]


PATCH = Patch(
    name="arguments",
    targets=(_PARSE, _VALIDATE),
    why=(
        "an unmodified pretrain_gpt.py parses its flags itself (megatron/training/arguments.py:116): "
        "megasched's own must be in that parser, and the model's sizes in args before they are validated"
    ),
    change=_change,
    signature={
        _PARSE: ("extra_args_provider", "ignore_unknown_args"),
        _VALIDATE: ("extra_args_provider", "ignore_unknown_args", "args_defaults"),
    },
)
