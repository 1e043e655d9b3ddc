"""Renders the batch script of a job: readable, kept, and right without the tool that wrote it.

``shlex`` quotes everything of the user's that bash reads. ``sbatch`` reads the ``#SBATCH`` lines, for which no
quoting is common to all versions, so the user's words in them must be of harmless characters.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megasched.errors import ConfigError
from megasched.launch.jobs.job_script import Job, render_template

TEMPLATE = "slurm/job.sbatch.jinja"
# Of #SBATCH values. A path with a blank or a % would be read as something else.
HARMLESS = re.compile(r"[\w./:,=+@\[\]()*&|!-]*", re.ASCII)
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
NO_LIMIT = ("", "INFINITE", "UNLIMITED")
CPUS_PER_GPU = 8  # which nodes with GPUs have at least; the cluster is asked before anything is submitted
HEAD = "Look at it with `megasched status {run_folder}`; change what you like and submit it again with `sbatch`."


@dataclass(frozen=True, kw_only=True)
class SlurmJob(Job):
    """Describes a job to submit.

    Attributes:
        name: name of the job.
        nodes: how many are asked for.
        time: Slurm's ``--time``; empty for the partition's default.
        sbatch_options: further options, e.g. ``--account=llm``.
        cpus_per_gpu: cores of each rank; Slurm's own default is one, which data loading shares with the rank.
        container: image for Pyxis' ``--container-image``; mounts as for ``--container-mounts``.
        minutes_to_save: minutes before the time limit at which the ranks are told to save and end.
        torchrun: whether each node has one task that runs torchrun, instead of one task for each GPU.
    """

    name: str
    nodes: int
    time: str = ""
    sbatch_options: Sequence[str] = ()
    cpus_per_gpu: int = CPUS_PER_GPU
    container: str = ""
    container_mounts: str = ""
    minutes_to_save: int = 10
    torchrun: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node


def render(job: SlurmJob, head: str = "") -> str:
    """Renders the batch script.

    Args:
        head: the comment with which it begins.

    Raises:
        ConfigError: sbatch would misread a value, or the time limit is unusable.
    """
    options = _options(job)
    _refuse_odd(job, options)
    per = "torchrun on each node" if job.torchrun else "one task a GPU"
    return render_template(
        TEMPLATE,
        script=job.script,
        flags=job.flags,
        title=f"{job.world_size} GPUs on {job.nodes} nodes, {per}: {job.script}",
        head=head or HEAD.format(run_folder=job.run_folder),
        environment=job.environment,
        options=options,
        width=max(len(option) for option, why in options if why),
        run_folder=job.run_folder,
        python=job.python,
        max_restarts=job.max_restarts,
        torchrun=job.torchrun,
        interface=job.interface,
        threads=job.cpus_per_gpu,
        srun_options="".join(f" \\\n    {option}" for option in _srun_options(job)),
        gpus=job.gpus_per_node,
    )


def _options(job: SlurmJob) -> list[tuple[str, str]]:
    """Returns the options of the ``#SBATCH`` lines, each with the reason for it, which may be empty."""
    tasks = 1 if job.torchrun else job.gpus_per_node
    cpus = job.cpus_per_gpu * (job.gpus_per_node // tasks)
    return [
        (f"--job-name={job.name}", ""),
        (f"--nodes={job.nodes}", ""),
        (f"--ntasks-per-node={tasks}", "torchrun starts the ranks" if job.torchrun else "a rank is a task"),
        # Not --gpus-per-task: a rank that sees one GPU alone can't reach its neighbours' by NVLink.
        (f"--gpus-per-node={job.gpus_per_node}", "every rank sees them all and takes the one of its local rank"),
        (f"--cpus-per-task={cpus}", f"{job.cpus_per_gpu} cores a GPU; Slurm would give a task one"),
        *([(f"--time={job.time}", "")] if job.time else []),
        *((option, "") for option in job.sbatch_options),
        (f"--signal=B:USR1@{60 * job.minutes_to_save}", "seconds before the time limit, to this script"),
        ("--requeue", "when a node fails, and at preemption"),
        ("--open-mode=append", "a restart keeps what was printed before"),
        (f"--chdir={job.directory}", "relative paths are relative to it, wherever this is submitted"),
        (f"--output={job.run_folder}/logs/%j.log", ""),
    ]


def seconds_of(time: str) -> int | None:
    """Returns the seconds of Slurm's ``--time``; None where it is no time of Slurm's.

    It may be ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours`` and what may follow
    (sbatch(1)).
    """
    match = TIME.fullmatch(time)
    if match is None:
        return None
    days, first, second, third = (int(found or 0) for found in match.groups())
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second


def _srun_options(job: SlurmJob) -> list[str]:
    found = []
    if job.container:
        mounts = ",".join(filter(None, [f"{job.run_folder}:{job.run_folder}", job.container_mounts]))
        found = [f"--container-image={job.container}", f"--container-mounts={mounts}"]
        found.append(f"--container-workdir={job.directory}")
    # srun does not take this over from sbatch since Slurm 22.05.
    return [*map(shlex.quote, found), '--cpus-per-task="$SLURM_CPUS_PER_TASK"']


def _refuse_odd(job: SlurmJob, options: Sequence[tuple[str, str]]) -> None:
    for option, _ in options:
        value = option.replace("%j", "")
        if not option.startswith("--") or not HARMLESS.fullmatch(value):
            raise ConfigError(
                f"sbatch would misread `{option}`: an option of a batch script is of the form --name=value, "
                "without blanks, quotes, % or $"
            )
    limit = seconds_of(job.time)
    if limit is None and job.time not in NO_LIMIT:
        what = "Slurm takes minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        raise ConfigError(f"--time {job.time}: {what}")
    if limit is not None and limit <= 60 * job.minutes_to_save:
        raise ConfigError(
            f"--time {job.time} leaves no time to train: {job.minutes_to_save} minutes before its end the run "
            "is to save; give it more time, or less of it by --minutes-to-save"
        )
