"""The commands that start runs, ``megasched launch slurm | torchrun | local``, and ``megasched status``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megasched.cli.options import Json
from megasched.json_output import print_json

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
MaxRestarts = Annotated[int, typer.Option(min=0, help="In a row that bring no new checkpoint.")]


@launch.command(
    epilog="E.g. megasched launch slurm --nodes 8 --account llm --time 24:00:00 -- pretrain_gpt.py "
    "--model-schedule auto --hf-model ./Qwen3-8B ..."
)
def slurm(
    command: Command,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")],
    gpus_per_node: GpusPerNode = 8,
    job_name: JobName = "megasched",
    folder: Folder = None,
    time: Annotated[str, typer.Option(metavar="D-HH:MM:SS", help="Time limit.")] = "",
    account: Annotated[str, typer.Option(help="Slurm's account.")] = "",
    partition: Annotated[str, typer.Option(help="Slurm's partition.")] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Any other, e.g. --sbatch=--qos=high; several times."),
    ] = None,
    cpus_per_gpu: Annotated[int | None, typer.Option(min=1, help="Cores of each rank.")] = None,
    container: Annotated[str, typer.Option(metavar="IMAGE", help="Run in it, by Pyxis.")] = "",
    container_mounts: Annotated[str, typer.Option(metavar="FROM:TO,...", help="As Pyxis takes them.")] = "",
    python: Annotated[str, typer.Option(help="On the nodes; this one by default, `python` in a container.")] = "",
    interface: Interface = "",
    env: Environment = None,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="One task a node that runs torchrun, not one a GPU.")
    ] = False,
    minutes_to_save: Annotated[
        int, typer.Option(min=1, help="Before the time limit the run saves and is requeued.")
    ] = 10,
    max_restarts: MaxRestarts = 3,
    chain: Annotated[
        int, typer.Option(min=1, metavar="N", help="Submit N of it, which run one after the other.")
    ] = 1,
    gpu: Gpu = None,
    check: Check = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and submit nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check a job, write its batch script, and submit it.

    The script stays in the run's folder: edit it and submit it again as you like.
    """
    from megasched.cli.launch_command import launch_slurm
    from megasched.launch.jobs.job_script import environment_of
    from megasched.launch.slurm.script import SlurmJob

    options = [
        *([f"--account={account}"] if account else []),
        *([f"--partition={partition}"] if partition else []),
    ]
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
    launch_slurm(job, gpu=gpu, check_run=check, dry_run=dry_run, times=chain, as_json=as_json)


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check a job, write its script, and run it by torchrun, here or on hosts, with restarts.

    The hosts share the folders of the run, the checkpoints and the software. Ctrl-C ends it on all of them;
    SIGUSR1 lets it save first.
    """
    from megasched.cli.launch_command import launch_torchrun
    from megasched.launch.jobs.job_script import environment_of
    from megasched.launch.torchrun.script import TorchrunJob, hosts_of

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
    raise typer.Exit(launch_torchrun(job, gpu=gpu, check_run=check, dry_run=dry_run, as_json=as_json))


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
    as_json: Json = False,
) -> None:
    """Rehearse a job on this machine's CPU.

    The losses are real; times and memory say nothing about a GPU.
    """
    from megasched.cli.launch_command import launch_local
    from megasched.launch.local import LocalJob

    job = LocalJob(
        run_folder=_run_folder(folder, job_name), ranks=ranks, script=command[0], given=tuple(command[1:])
    )
    raise typer.Exit(launch_local(job, check_run=check, as_json=as_json))


def _run_folder(folder: Path | None, job_name: str) -> Path:
    return (folder or Path("runs") / job_name).absolute()


def status(
    target: Annotated[
        str, typer.Argument(metavar="JOBID|DIR", help="A Slurm job, the folder of a run, or one of its logs.")
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again until the run has ended.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Print how a run is doing, by its logs and by Slurm.

    It needs no GPU, and reads nothing but the logs.
    """
    from megasched.launch.status.run_status import RunReader

    if watch and as_json:
        raise typer.BadParameter("--json prints one object, and --watch prints again and again: pass one of them")
    reader = RunReader(target)
    if as_json:
        print_json(reader.look().to_dict())
        return
    from megasched.cli import status_view
    from megasched.cli.console import report_console

    if not watch:
        status_view.print_status(reader.look(), report_console())
        return
    try:
        status_view.watch(reader.look, report_console(), interval)
    except KeyboardInterrupt:
        return  # it was asked to go on until then
