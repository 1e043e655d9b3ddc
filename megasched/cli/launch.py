"""Defines the commands that start runs: ``megasched launch slurm | torchrun | local``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from megasched.cli.options import Json
from megasched.cli.output import format_bytes, format_count
from megasched.errors import ConfigError
from megasched.json_output import print_json
from megasched.launch.console_lines import ConsoleLines
from megasched.launch.jobs.checks import CHECKS, Checked, Checks, check, check_waived, failure_message
from megasched.launch.jobs.job_script import environment_of
from megasched.launch.jobs.words import refuse_unusable
from megasched.launch.local import LocalJob, narrow, run
from megasched.launch.run_folder import RunFolder
from megasched.launch.slurm import start as by_slurm
from megasched.launch.slurm.script import CPUS_PER_GPU, SlurmJob
from megasched.launch.torchrun import start as by_torchrun
from megasched.launch.torchrun.script import TorchrunJob, hosts_of
from megasched.printing.shell_command import shell_command

launch = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Start a run: by Slurm, torchrun, or here.")

Command = Annotated[
    list[str],
    typer.Argument(metavar="-- SCRIPT.py FLAGS ...", help="What each rank runs, as `megasched` takes it."),
]
Folder = Annotated[
    Path | None, typer.Option("--dir", metavar="RUN", help="The run's folder; runs/<job name> by default.")
]
JobName = Annotated[str, typer.Option(help="Of the job.")]
GpusPerNode = Annotated[int, typer.Option(min=1, help="GPUs of a node; a rank is a GPU.")]
Interface = Annotated[str, typer.Option(metavar="NAME", help="Network interface between the nodes.")]
Environment = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable of the ranks; several times.")
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="TYPE", help="Refuse what does not fit in its memory; as `megasched plan`."),
]
Check = Annotated[bool, typer.Option(help="Begin the run here once, up to training.")]
Waive = Annotated[
    list[str] | None,
    typer.Option(metavar="CHECK", help=f"Only warn of what this check finds: {', '.join(CHECKS)}; several times."),
]
MaxRestarts = Annotated[int, typer.Option(min=0, help="Give up after so many in a row without a new checkpoint.")]

# Of a job of Slurm.
Nodes = Annotated[int, typer.Option(min=1, help="Nodes of the job.")]
Time = Annotated[str, typer.Option(metavar="D-HH:MM:SS", help="Time limit.")]
Account = Annotated[str, typer.Option(help="Slurm's account.")]
Partition = Annotated[str, typer.Option(help="Slurm's partition.")]
CpusPerGpu = Annotated[int, typer.Option(min=1, help="Cores of each rank.")]
Container = Annotated[str, typer.Option(metavar="IMAGE", help="Run in it, by Pyxis.")]
ContainerMounts = Annotated[str, typer.Option(metavar="FROM:TO,...", help="As Pyxis takes them.")]
Python = Annotated[str, typer.Option(help="On the nodes; this one by default, `python` in a container.")]
Sbatch = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="OPTION", help="Any other, e.g. --sbatch=--qos=high; several times."),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Show all that the ranks print; else the log alone has Megatron's start-up."),
]
ByTorchrun = Annotated[bool, typer.Option("--torchrun", help="One task a node that runs torchrun, not one a GPU.")]
MinutesToSave = Annotated[int, typer.Option(min=1, help="Before the time limit the run saves and is requeued.")]
Chain = Annotated[int, typer.Option(min=1, metavar="N", help="Submit N of it, which run one after the other.")]


@launch.command(
    epilog="E.g. megasched launch slurm --nodes 8 --account llm --time 24:00:00 -- pretrain_gpt.py "
    "--model-schedule auto --hf-model ./Qwen3-8B ..."
)
def slurm(
    command: Command,
    nodes: Nodes,
    gpus_per_node: GpusPerNode = 8,
    job_name: JobName = "megasched",
    folder: Folder = None,
    time: Time = "",
    account: Account = "",
    partition: Partition = "",
    sbatch: Sbatch = None,
    cpus_per_gpu: CpusPerGpu = CPUS_PER_GPU,
    container: Container = "",
    container_mounts: ContainerMounts = "",
    python: Python = "",
    interface: Interface = "",
    env: Environment = None,
    torchrun: ByTorchrun = False,
    minutes_to_save: MinutesToSave = 10,
    max_restarts: MaxRestarts = 3,
    chain: Chain = 1,
    gpu: Gpu = None,
    check: Check = True,
    waive: Waive = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and submit nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check a job, write its batch script, and submit it.

    The script stays in the run's folder: edit it and submit it again as you like.
    """
    options = [f"--{name}={value}" for name, value in (("account", account), ("partition", partition)) if value]
    job = SlurmJob(
        name=job_name,
        run_folder=_run_folder(folder, job_name),
        directory=Path.cwd(),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        script=command[0],
        flags=tuple(command[1:]),
        python=python or ("python" if container else sys.executable),
        time=time,
        sbatch_options=(*options, *(sbatch or ())),
        cpus_per_gpu=cpus_per_gpu,
        container=container,
        container_mounts=container_mounts,
        interface=interface,
        environment=environment_of(env or ()),
        minutes_to_save=minutes_to_save,
        max_restarts=max_restarts,
        torchrun=torchrun,
    )
    checks = Checks(gpu, check, waived_of(waive, dry_run=dry_run))
    launch_slurm(job, checks, dry_run=dry_run, times=chain, as_json=as_json)


@launch.command(
    epilog="E.g. megasched launch torchrun --hosts node1,node2 --interface bond0 -- pretrain_gpt.py "
    "--model-schedule auto --hf-model ./Qwen3-8B ..."
)
def torchrun(
    command: Command,
    hosts: Annotated[
        str, typer.Option(metavar="NAME,...", help="Started on them by ssh; this machine without it.")
    ] = "",
    gpus_per_node: GpusPerNode = 8,
    job_name: JobName = "megasched",
    folder: Folder = None,
    interface: Interface = "",
    env: Environment = None,
    max_restarts: MaxRestarts = 3,
    gpu: Gpu = None,
    check: Check = True,
    waive: Waive = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and start nothing.")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Check a job, write its script, and run it by torchrun, here or on hosts, with restarts.

    The hosts share the folders of the run, the checkpoints and the software. Ctrl-C ends it on all of them;
    SIGUSR1 lets it save first.
    """
    job = TorchrunJob(
        run_folder=_run_folder(folder, job_name),
        directory=Path.cwd(),
        hosts=hosts_of(hosts),
        gpus_per_node=gpus_per_node,
        script=command[0],
        flags=tuple(command[1:]),
        python=sys.executable,
        interface=interface,
        environment=environment_of(env or ()),
        max_restarts=max_restarts,
    )
    checks = Checks(gpu, check, waived_of(waive, dry_run=dry_run))
    shown = show_lines(as_json=as_json, verbose=verbose)
    raise typer.Exit(launch_torchrun(job, checks, dry_run=dry_run, show=shown, as_json=as_json))


@launch.command(
    epilog="E.g. megasched launch local --ranks 4 -- pretrain_gpt.py --model-schedule auto --hf-model ./Qwen3-8B "
    "--hf-override num_hidden_layers=4 ..."
)
def local(
    command: Command,
    ranks: Annotated[int, typer.Option(min=1, help="Of the job.")],
    job_name: JobName = "megasched",
    folder: Folder = None,
    check: Check = True,
    waive: Waive = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Rehearse a job on this machine's CPU.

    The losses are real; times and memory say nothing about a GPU.
    """
    job = LocalJob(
        run_folder=_run_folder(folder, job_name), ranks=ranks, script=command[0], given=tuple(command[1:])
    )
    shown = show_lines(as_json=as_json, verbose=verbose)
    checks = Checks(None, check, waived_of(waive))
    raise typer.Exit(launch_local(job, checks, show=shown, as_json=as_json))


def _run_folder(folder: Path | None, job_name: str) -> Path:
    return (folder or Path("runs") / job_name).absolute()


def waived_of(names: list[str] | None, *, dry_run: bool = False) -> tuple[str, ...]:
    """Returns the names of the waived checks; the disk of who only wants to see the script is not the job's.

    Raises:
        ConfigError: there is no such check.
    """
    check_waived(names or ())
    return (*(names or ()), *(["disk"] if dry_run else []))


def launch_slurm(job: SlurmJob, checks: Checks, *, dry_run: bool, times: int, as_json: bool) -> None:
    """Checks a job, prints the findings, writes its script and submits it.

    Args:
        checks: passed to ``prepare``.
        dry_run: print the script alone.
        times: passed to ``enqueue``.

    Raises:
        ConfigError: the check finds a problem, before anything is written; or Slurm refuses the written script.
    """
    prepared = by_slurm.prepare(job, checks, ask_slurm=not dry_run)
    found = _found(job.script, f"{job.world_size} GPUs", prepared.checked)
    if dry_run:
        _print_script(prepared.text, found, as_json)
        return
    script = by_slurm.write(prepared)
    jobs = by_slurm.enqueue(RunFolder(job.run_folder), times)
    if as_json:
        print_json({**found, "run_folder": str(job.run_folder), "script": str(script), "jobs": jobs})
        return
    print(f"script: {script}")
    print(f"submitted: {', '.join(jobs)}; `{shell_command('status', jobs[0], '--watch')}` follows it")


def launch_torchrun(
    job: TorchrunJob, checks: Checks, *, dry_run: bool, show: Callable[[str], None], as_json: bool
) -> int:
    """Checks a job, prints the findings, writes its script, and runs it to its end, restarts included.

    Args:
        checks: passed to ``prepare``.
        dry_run: print the script alone.
        show: called with each line of the ranks, unless they are on hosts.

    Returns:
        The exit status.

    Raises:
        ConfigError: the check finds a problem; nothing is written or started then.
    """
    prepared = by_torchrun.prepare(job, checks, ask_hosts=not dry_run)
    found = _found(job.script, f"{job.world_size} GPUs", prepared.checked)
    if dry_run:
        _print_script(prepared.text, found, as_json)
        return 0
    script = by_torchrun.write(prepared)
    _say(f"script: {script}; `{shell_command('status', str(job.run_folder), '--watch')}` follows it")
    supervisor = by_torchrun.Supervisor(job, say=_say, on_line=(lambda line: None) if job.hosts else show)
    status = supervisor.run()
    if as_json:
        end = {"run_folder": str(job.run_folder), "script": str(script), "starts": supervisor.starts}
        print_json({**found, **end, "status": status})
    return status


def launch_local(job: LocalJob, checks: Checks, *, show: Callable[[str], None], as_json: bool) -> int:
    """Checks a job, rehearses it on this machine, and returns the exit status.

    Args:
        show: called with each line of the ranks.

    Raises:
        ConfigError: the check finds a problem; nothing is started then.
    """
    refuse_unusable(job)
    checked = check(job.script, job.flags, job.ranks, waived=checks.waived) if checks.check_run else None
    if checked is not None and checked.problems:
        raise ConfigError(failure_message(checked.problems))
    found = _found(job.script, f"{job.ranks} ranks of this machine", checked)
    too_little = narrow(job.ranks, found["facts"])
    for warning in too_little:
        _say(f"  warning: {warning}")
    status, log = run(job, say=_say, on_line=show)
    if as_json:
        found["warnings"] += too_little
        print_json({**found, "run_folder": str(job.run_folder), "log": str(log), "status": status})
    return status


def _print_script(text: str, found: dict[str, Any], as_json: bool) -> None:
    """Prints the script of a dry run: alone, or as JSON with the findings of the check."""
    if as_json:
        print_json({**found, "script": text})
    else:
        print(text, end="")


def _say(text: str) -> None:
    """Prints a message on stderr, because stdout carries the result that was asked for."""
    print(text, file=sys.stderr, flush=True)


def show_lines(*, as_json: bool, verbose: bool) -> Callable[[str], None]:
    """Returns a function that shows the lines of ranks that are worth it, and all of them with ``--verbose``."""
    output, lines = (sys.stderr if as_json else sys.stdout).buffer, ConsoleLines()

    def show(line: str) -> None:
        if verbose or lines.shows(line):
            output.write(f"{line}\n".encode(errors="surrogateescape"))  # in whatever encoding it came
            output.flush()

    return show


def _found(script: str, place: str, checked: Checked | None) -> dict[str, Any]:
    """Prints the findings of the check and returns its facts and warnings for JSON; without a check, none."""
    if checked is None:
        return {"facts": {}, "warnings": []}
    facts = checked.facts
    lines = [
        f"megasched: {script} on {place}: {facts['layout']}, {facts['microbatches']} micro-batches, "
        f"{format_count(facts['parameters'])} parameters"
    ]
    if "memory" in facts:
        lines.append(f"  memory of the fullest rank: {format_bytes(max(facts['memory']))}")
    if facts["save"]:
        lines.append(f"  a checkpoint: {decimal(facts['checkpoint_bytes'])} in {facts['save']}")
    lines += [f"  warning: {warning}" for warning in checked.warnings]
    _say("\n".join(lines))
    return {"facts": facts, "warnings": list(checked.warnings)}
