"""Builds the scripts of jobs for all launchers: templates, the user's words, and the file.

Every word of the user's that bash reads is quoted by ``shlex``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.launch.run_folder import RunFolder
from megasched.reading.files import Expected, read_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER = Path(__file__).parents[1]
SCRIPT = Expected("the script of an earlier job of this run")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# How a run begins that a restart must not begin again with: flag -> whether a value follows.
START_FLAGS = {
    "--load": True,
    "--finetune": False,
    "--no-load-optim": False,
    "--no-load-rng": False,
    "--load-main-params-from-ckpt": False,
    "--pretrained-checkpoint": True,
    "--ckpt-step": True,
    "--override-ckpt-iteration": True,
}
# Of those, where a run begins in the folder of --load: of no other folder can they be meant.
ITERATIONS = ("--ckpt-step", "--override-ckpt-iteration")
LONGEST_LINE = 100


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describes what every job on GPUs has, whoever starts it.

    Attributes:
        run_folder: absolute path of the folder for script and logs.
        directory: absolute path where the ranks start; relative paths among the flags are relative to it.
        gpus_per_node: GPUs of each node; a rank is a GPU.
        script: the training script, as ``megasched`` takes it.
        flags: the flags that follow it.
        python: the interpreter on the nodes, or in the container.
        interface: network interface between nodes; if it is empty, NCCL and gloo choose.
        environment: further variables of the ranks.
        max_restarts: most restarts in a row without a new checkpoint.
    """

    run_folder: Path
    directory: Path
    gpus_per_node: int
    script: str
    flags: Sequence[str]
    python: str
    interface: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 3


def value_of(flag: str, flags: Sequence[str]) -> str:
    """Returns what argparse would take for a flag's value: the last one given; empty without one."""
    found = ""
    for word, following in pairwise([*flags, ""]):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def environment_of(words: Sequence[str]) -> dict[str, str]:
    """Returns the variables that words ``NAME=VALUE`` set.

    Raises:
        ConfigError: a word has another form.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {word}: a variable is given as NAME=VALUE")
        found[name] = value
    return found


def render_template(
    name: str,
    *,
    script: str,
    flags: Sequence[str],
    title: str,
    head: str,
    environment: Mapping[str, str],
    **values: Any,
) -> str:
    """Renders a job's script from a template.

    Args:
        name: path of the template, from the folder ``launch`` on.
        script, flags: what each rank runs.
        title, head: the comment with which the script begins.
        environment: further variables of the ranks.
        values: further values for the template.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Nothing here is HTML: bash is what reads it, and every value goes through the filter `quote`.
    jinja = Environment(
        loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    jinja.filters["quote"] = lambda value: shlex.quote(str(value))
    start, rest = _start(flags)
    return jinja.get_template(name).render(
        title=" ".join(title.splitlines()),
        head=head.splitlines(),
        command=['"$PYTHON" -u -m megasched ' + shlex.quote(script), *flag_lines(rest)],
        start=shlex.join(start),
        save=value_of("--save", flags),
        environment=[f"{name}={shlex.quote(value)}" for name, value in environment.items()],
        **values,
    )


def flag_lines(flags: Sequence[str]) -> list[str]:
    """Returns flags as lines of a bash array: each line begins with a flag, and short flags share a line."""
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    lines: list[str] = []
    for group in groups:
        text = " ".join(group)
        if lines and len(lines[-1]) + 1 + len(text) <= LONGEST_LINE:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return lines


def write_script(path: Path, text: str, job: DataclassInstance, facts: Mapping[str, Any]) -> None:
    """Writes a script into its run's folder, and keeps an earlier one beside it.

    Args:
        path: path of the script in the run's folder; ``job.json`` is written beside it.
        job: the job from which the script was made.
        facts: facts from the check of the job.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and read_bytes(path, SCRIPT) != text.encode():
        kept = (path.with_name(f"{path.name}.{number}") for number in count(1))
        path.rename(next(name for name in kept if not os.path.lexists(name)))
    write_whole(path, [text])
    mode = path.stat().st_mode
    path.chmod(mode | (mode & 0o444) >> 2)  # run by whom the umask lets read
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(job).items()}
    written = datetime.now(UTC).isoformat(timespec="seconds")
    RunFolder(path.parent).describe({"written": written, "job": plain, "facts": dict(facts), "jobs": []})


def _start(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the flags that only a run's first start has, and the other flags.

    Raises:
        ConfigError: the run is to begin at some iteration of its own folder, as each restart would.
    """
    start: list[str] = []
    rest: list[str] = []
    taken = False
    for word in flags:
        name, equals, _ = word.partition("=")
        if taken or name in START_FLAGS:
            start.append(word)
            taken = not taken and START_FLAGS[name] and not equals
        else:
            rest.append(word)
    save = value_of("--save", flags)
    load = value_of("--load", flags) or save
    if save and Path(load) == Path(save):
        for name in ITERATIONS:
            if iteration := value_of(name, flags):
                raise ConfigError(
                    f"{name} {iteration} in the run's own folder, --save {save}: each restart would begin there "
                    f"again; give --load {save} and another --save"
                )
    if save and start in (["--load", save], [f"--load={save}"]):  # what a restart does anyway
        return [], rest
    return start, rest
