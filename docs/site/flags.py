"""Makes the page of all flags of a run: ours, and what becomes of each flag of the installed Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from mkdocs.structure.files import File, Files

from megasched.imports import quiet_imports
from megasched.trainer.flags.arguments import FLAGS
from megasched.trainer.flags.flag_classes import flag_class, refusal
from megasched.trainer.flags.honoured_flags import HONOURED
from megasched.trainer.flags.idle_flags import IDLE
from megasched.trainer.flags.refused_flags import REFUSED_VALUES

PAGE = "flags.md"
HEAD = f"""# Flags of a run

After this page you know what each flag of `megasched pretrain_gpt.py` does. megasched adds a few to Megatron's; of
Megatron's own ({version("megatron-core")}) each is in a class, which [Run a
training](run.md#what-becomes-of-megatrons-flags) explains.

## Of megasched

| flag | what it does |
| --- | --- |
"""
OF_MEGATRON = """
## Of Megatron

| flag | class | what it is for, or why it is not honoured |
| --- | --- | --- |
"""
OF_MIXTURES = "mixtures that are Megatron's own"
OF_THE_MODEL = "the HF config says it; a value that is given must agree"


def on_files(files: Files, config: Any) -> Files:
    """Adds the page."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Returns the page."""
    ours = [f"| `{flag}` | {_cell(told)} |" for flag, (_, told) in FLAGS.items()]
    return HEAD + "\n".join(ours) + "\n" + OF_MEGATRON + "\n".join(sorted(_rows())) + "\n"


def _rows() -> Iterator[str]:
    with quiet_imports():
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    for action in parser._actions:
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        yield f"| {names} | {flag_class(action.dest)} | {_cell(_why(action.dest))} |"


def _why(dest: str) -> str:
    values = [f"`{value}` is refused: {why}" for (of, value), why in REFUSED_VALUES.items() if of == dest]
    why = {
        "honoured": HONOURED.get(dest, OF_MIXTURES),
        "derived": OF_THE_MODEL,
        "idle": IDLE.get(dest, ""),
        "refused": refusal(dest),
    }[flag_class(dest)]
    return "; ".join([why, *values])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
