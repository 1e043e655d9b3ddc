"""Runs a Megatron training script, unmodified, under a schedule: ``python -m megasched script.py ...``.

Before the script runs as ``__main__``, the flags are put in Megatron's parser, the builder of its models is set to
ours, and, in a rehearsal, CUDA is emulated. A failure ends with one message and a process that is gone: the
launcher then ends the other ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import re
import runpy
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megasched import patches
from megasched.bundled_scripts import bundled_script
from megasched.collector import collector_paused
from megasched.errors import ConfigError
from megasched.files import check_writable
from megasched.imports import (
    named_package,
    quiet_imports,
    quiet_run,
    uncompiled_imports,
)
from megasched.language.schedule_file import check_schedule
from megasched.model_adapters.adapter_file import compile_adapter
from megasched.parent_process import end_with_parent
from megasched.patches import host_cuda
from megasched.printing.shell_command import shell_command
from megasched.reading.hf_source import check_hf_model
from megasched.trace.run_trace import FLAG
from megasched.trainer import run_failure, seams
from megasched.trainer.current_session import set_cluster_flags
from megasched.trainer.flags.arguments import add_megasched_arguments, refuse_unsupported
from megasched.trainer.flags.flag_parser import FlagParser
from megasched.trainer.flags.rehearsal import rehearsal_flags, rehearsal_mode, without_kernel_packages
from megasched.trainer.flags.sft import check_conversations
from megasched.transformers_names import missing_names
from megasched.versions import TESTED, warning_of

NO_LAUNCHER = (
    "{script}: no launcher has started it. Say `{launch} torchrun --gpus-per-node N -- {script} ...`, without "
    "GPUs `{launch} local --ranks N -- {script} ...`, or start it by torchrun"
)
DATA_PATHS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path")
OF_HUGGING_FACE = ("HuggingFaceTokenizer", "SFTTokenizer")
# torchrun sets it for its ranks; Slurm ends its own.
OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
WITHOUT_TE = "torch's attention and Adam instead of its fused kernels"
# Modules that scripts import, and that warn of missing kernels as they are.
LAYER_SPECS = ("gpt_layer_specs", "heterogeneous.heterogeneous_layer_specs")


@dataclass(frozen=True)
class Megatron:
    """Describes the Megatron that this process imports.

    Attributes:
        folder: the folder ``megatron`` that holds ``core`` and ``training``.
        version: of megatron-core, e.g. ``0.19.2``.
    """

    folder: Path
    version: str


def run_script(script: str, argv: Sequence[str]) -> None:
    """Runs a Megatron training script under a schedule; the command behind ``python -m megasched x.py``.

    It returns when the script does. On a failure the process ends here, without clean-up of threads and
    process groups that could hang: status 1, or what the script passed to ``sys.exit``. What megasched
    raises on purpose is one message on stderr (with the traceback if MEGASCHED_TRACEBACK=1) and status 2, as
    argparse has it: the same command would fail again, so launchers do not restart it. Anything else is a
    traceback, and after it one message, too.

    Args:
        script: path of the user's script, or the name of one that megasched brings along.
        argv: the flags after it, Megatron's and megasched's.
    """
    write_whole_lines()
    if os.environ.get(OF_TORCHRUN) and sys.platform == "linux":
        end_with_parent(signal.SIGKILL)  # else a rank waits for the others until its communicator gives up
    try:
        _run(script, list(argv))
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        if not isinstance(stop.code, int):
            run_failure.await_rank_0()
            print(stop.code, file=sys.stderr)
        run_failure.end(stop.code if isinstance(stop.code, int) else 1)
    except BaseException as error:
        run_failure.end_with_error(error)


def _run(script: str, argv: list[str]) -> None:
    path, bundled = find_script(script)
    own = megasched_flags(argv)
    if not {"-h", "--help"}.intersection(argv):
        if bundled and "MASTER_ADDR" not in os.environ:  # torch finds no other rank then, and Megatron ends
            raise ConfigError(NO_LAUNCHER.format(script=script, launch=shell_command("launch")))
        check_inputs(script, own)
        check_tokenizer(argv)
        if run_failure.rank_of("RANK", "SLURM_PROCID") == 0:  # which reads data, wherever others do
            check_data_paths(argv)
    mode = rehearsal_mode(argv)
    flags = rehearsal_flags(argv)
    if mode:
        _say(str(flags))
        without_kernel_packages()
    else:
        order_kernels(argv)
    arrange_process(path, bundled, mode, allow_unverified=own.allow_unverified)
    if mode:
        set_cluster_flags(refuse_unsupported(argv))
    sys.argv = [str(path), *(flags.argv if mode else argv)]
    runpy.run_path(str(path), run_name="__main__")


# ---- what was asked for -----------------------------------------------------------------------------


def megasched_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parses megasched's flags alone; Megatron's are passed over, not judged.

    Raises:
        ConfigError: one of megasched's flags lacks its value.
    """
    parser = FlagParser(add_megasched_arguments(argparse.ArgumentParser(add_help=False)))
    return parser.parse_known_args(list(argv))[0]


def find_script(script: str) -> tuple[Path, bool]:
    """Returns the absolute path of the script, and whether it is one that megasched brings along.

    A file of the user's comes before a bundled one of the same name.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(script).resolve()
    if path.is_file():
        return path, False
    bundled = bundled_script(script)
    if bundled is None:
        raise ConfigError(f"{script}: no such script")
    return bundled, True


def check_inputs(script: str, own: argparse.Namespace) -> None:
    """Checks that what the flags name exists, before anything heavy is imported.

    Raises:
        ConfigError: no schedule, no model, a path that is not there, or a syntax error in the adapter's file.
        ScheduleError: the schedule file has a syntax error.
    """
    if not own.model_schedule:
        raise ConfigError(
            f"{script}: there is no --model-schedule. Pass `--model-schedule auto` for the schedule that "
            f"megasched derives, or run the script itself (python {script} ...) for plain Megatron"
        )
    check_schedule(own.model_schedule)
    if not own.hf_model:
        raise ConfigError(
            "--model-schedule needs --hf-model: the folder of the Hugging Face model that the schedule is for"
        )
    check_hf_model(own.hf_model)
    if own.adapter is not None:
        compile_adapter(own.adapter)
    check_writable(FLAG, own.megasched_trace)


def check_tokenizer(argv: Sequence[str]) -> None:
    """Checks that a tokenizer of Hugging Face's is there, before anything heavy is imported.

    Raises:
        ConfigError: there is none.
    """
    kind, model = _given(argv, "--tokenizer-type", "--tokenizer-model")
    if kind in OF_HUGGING_FACE and model:
        check_hf_model(model, "--tokenizer-model")


def _given(argv: Sequence[str], *flags: str) -> list[str | None]:
    """Returns the values of Megatron's flags, before its parser is there; None for one that is not given."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in flags:
        parser.add_argument(flag, dest=flag)
    found = vars(FlagParser(parser).parse_known_args(list(argv))[0])
    return [found[flag] for flag in flags]


def check_data_paths(argv: Sequence[str]) -> None:
    """Checks that there is something at each path to data, before anything heavy is imported.

    Raises:
        ConfigError: with all that are missing; or a file of conversations has none.
    """
    paths: list[tuple[str, str]] = []
    flag = ""
    for word in argv:
        flag, equals, value = word.partition("=") if word.startswith("--") else (flag, "=", word)
        paths += [(flag, value)] if equals and flag in DATA_PATHS else []
    missing = [f"{flag} {path}" for flag, path in paths if not _has_data(path)]
    if missing:
        raise ConfigError("\n".join(f"{path}: no data: no such file or folder, and no .bin" for path in missing))
    if "--sft" in argv:
        for flag, path in paths:
            check_conversations(path, flag)


def _has_data(path: str) -> bool:
    """Returns whether a word after a flag of data is a weight of a blend, or something lies where it points."""
    weight = path.replace(".", "", 1).isdecimal()
    return weight or "://" in path or os.path.exists(path) or os.path.exists(f"{path}.bin")


# ---- the process ------------------------------------------------------------------------------------


def write_whole_lines() -> None:
    """Makes this process write each line that it prints at once, its end included.

    Ranks share a pipe. Under ``python -u`` a line and its end are two writes, and what another rank prints
    meanwhile stands between them, on the same line. Writes of up to ``PIPE_BUF`` bytes are not mixed (pipe(7)).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook or a test puts something else there
            # What is no UTF-8 in a name of a file or a word of the command is escaped, and ends nothing.
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


def arrange_process(path: Path, bundled: bool, mode: str, *, allow_unverified: bool) -> None:
    """Prepares this process for a training script that runs under a schedule.

    Args:
        path, bundled: the script, as ``find_script`` returns it.
        mode: as ``rehearsal_mode`` returns it.
        allow_unverified: the flag.

    Raises:
        ConfigError: Megatron is missing, a package can't be imported, a version was not tested, or what a patch
            changes is not there.
    """
    if not bundled:
        put_first(path.parent)
    megatron = find_megatron()
    _say(f"megasched: megatron-core {megatron.version} from {megatron.folder}")
    check_versions(megatron, allow_unverified=allow_unverified)
    te = not mode and importlib.util.find_spec("transformer_engine") is not None
    if not mode and not te:
        _say(f"megasched: Transformer Engine is not installed: {WITHOUT_TE}")
    quiet_run()
    uncompiled = uncompiled_imports if mode and host_cuda.turns_compiler_off() else nullcontext
    with collector_paused(), quiet_imports(), named_package(), uncompiled():
        if te:
            importlib.import_module("torch")  # which loads the CUDA libraries that Transformer Engine asks for
            importlib.import_module("transformer_engine.pytorch")  # Megatron goes on without it at an ImportError
        apply_patches(mode)
        set_builder()
        importlib.import_module("megatron.training")
        for name in LAYER_SPECS:
            importlib.import_module(f"megatron.core.models.gpt.{name}")


def order_kernels(argv: Sequence[str]) -> None:
    """Has GPUs start kernels in the order of the calls, where Megatron asks for it and the user says nothing.

    Megatron overlaps communication of TP and CP by it, and ends on GPUs before Blackwell without the variable
    (``training/arguments.py:1413``), which CUDA reads once, when it begins.
    """
    sizes = _given(argv, "--tensor-model-parallel-size", "--context-parallel-size")
    if not {"1", None}.issuperset(sizes) and CONNECTIONS not in os.environ:
        os.environ[CONNECTIONS] = "1"
        _say(f"megasched: {CONNECTIONS} is 1, which Megatron asks for under TP and CP")


def put_first(folder: Path) -> None:
    """Makes ``folder`` the first place to import from, as ``python folder/script.py`` does.

    So a Megatron-LM checkout beside the script is what it imports, as when it is run directly. The working
    directory, which ``python -m`` puts there, goes: a folder ``megatron`` that happens to lie in it must not
    hide the installed one.
    """
    if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        sys.path.pop(0)
    sys.path.insert(0, str(folder))


def find_megatron() -> Megatron:
    """Finds the Megatron that this process will import; nothing of it is imported yet.

    Raises:
        ConfigError: there is none, or it is in pieces from two places.
    """
    core, training = _package_folder("megatron.core"), _package_folder("megatron.training")
    if core.parent != training.parent:
        raise ConfigError(
            f"two Megatrons are mixed: megatron.core comes from {core}, megatron.training from {training}. "
            "Use a whole Megatron-LM checkout, or the megatron-core package alone"
        )
    return Megatron(core.parent, runpy.run_path(str(core / "package_info.py"))["__shortversion__"])


def check_versions(megatron: Megatron, *, allow_unverified: bool) -> None:
    """Checks the versions of what a run is made of; says which are newer than the tested ones.

    Raises:
        ConfigError: one is older than the tested versions, or newer without ``allow_unverified``; or a newer
            transformers has moved a private name that megasched uses.
    """
    elsewhere = (
        f"check out that version of Megatron-LM in the place of {megatron.folder.parent}, or run a script that "
        "does not lie in this checkout"
    )
    remedy = "" if megatron.folder.parent.name == "site-packages" else elsewhere
    found = [
        warning_of("megatron-core", megatron.version, allow_unverified=allow_unverified, remedy=remedy),
        *(
            warning_of(package, metadata.version(package), allow_unverified=allow_unverified)
            for package in ("torch", "transformers")
        ),
    ]
    moved = ", ".join(name.name for name in missing_names()) if found[-1] else ""
    if moved:
        raise ConfigError(
            f"transformers {metadata.version('transformers')} has moved what megasched uses: {moved}"
        )
    for warning in filter(None, found):
        _say(f"megasched: warning: {warning}")
        warnings.filterwarnings("ignore", re.escape(warning))  # once is enough, and every rank would


def _package_folder(package: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        parent = sys.modules.get("megatron")
        places = ", ".join(getattr(parent, "__path__", [])) or "nowhere"
        raise ConfigError(
            f"{package} can't be imported (`megatron` is found in: {places}). Install megatron-core "
            f"{TESTED['megatron-core']}, or run the pretrain_gpt.py of a Megatron-LM checkout of that version"
        )
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def apply_patches(mode: str = "") -> None:
    """Applies the patches of this installation; CUDA is emulated first, before Megatron binds functions.

    ``set_builder`` is apart, for who compares with Megatron's own models.

    Args:
        mode: as ``rehearsal_mode`` returns it; empty where CUDA is there or emulated already.
    """
    if mode:
        patches.apply("host_cuda", force=mode == "force")
    apart = ("host_cuda", "model_builder")
    patches.apply_each(patch.name for patch in seams.available() if patch.name not in apart)


def set_builder() -> None:
    """Makes Megatron build scheduled models."""
    patches.apply("model_builder")


def _say(text: str) -> None:
    if run_failure.rank_of("RANK", "SLURM_PROCID") == 0:
        print(text, file=sys.stderr, flush=True)
