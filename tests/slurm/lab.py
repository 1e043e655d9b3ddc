"""A real Slurm of several emulated nodes on one machine, to test what a fake ``sbatch`` can't tell.

munged, slurmctld and a slurmd for each node are Debian's own programs. What is emulated is the hardware::

    machine, pytest
      lab                      namespaces net, mount, pid, uts; hostname "controller", 10.77.0.254
        munged, slurmctld, a bridge; sbatch, squeue and all that `Lab.run` runs
          node1                namespaces net, mount, pid, uts; hostname "node1", 10.77.0.1 on eth0
            slurmd, slurmstepd, the tasks of jobs
          node2                10.77.0.2
          ...

So each node has its own name, address, ``localhost`` and process ids, as real ones have: a job that tells its
ranks to meet at localhost hangs here too. All files are the machine's (as a cluster's shared file system), but
``/etc/hosts`` is the lab's, and ``/run`` is empty. Nothing of it is visible outside, and all of it ends with
process 1 of the lab, which ends with pytest, however pytest ends.

What is not emulated: cgroups (``--mem``, CPU binding and GPUs are accounted for, not enforced), GPUs
(``CUDA_VISIBLE_DEVICES`` is set, behind it is nothing), NCCL, accounting (sacct), prologs, containers, a ``/tmp``
and ``/dev/shm`` of each node's own, other users than root, and any network beyond the lab's.

Jobs inherit the environment of the tests, as ``sbatch`` does it, without Slurm's and pytest's own variables.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.slurm.config import CONTROLLER, CONTROLLER_ADDRESS, Cluster
from tests.slurm.install import PATH
from tests.slurm.space import Space

POLL_SECONDS = 0.2  # never sbatch --wait: it looks ever more rarely
QUESTIONS = 5
LAST_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"]
)
UP_STATES = frozenset(["allocated", "completing", "idle", "mixed"])
# Variables that Slurm's commands read, pytest's own, and the machine's network: jobs must not find those of tests.
OTHERS = re.compile(
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SCANCEL|SCONTROL|SINFO|SQUEUE|PYTEST)_|(GLOO|NCCL)_SOCKET_IFNAME$"
)
BRIDGE = "nodes"
TAIL = 20  # lines of each log in an error


class LabError(Exception):
    """Something that a test waits for did not happen, or a command of Slurm failed."""


class Lab:
    """A running cluster, used as a context manager.

    Attributes:
        cluster: its sizes and its folder.
        jobs: folder in which jobs are submitted, so ``slurm-<job>.out`` lands here.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.jobs = cluster.folder / "jobs"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._nodes: dict[str, Space] = {}
        self._booted: dict[str, str] = {}  # when each slurmd was started, as Slurm writes times

    def __enter__(self) -> Self:
        self.cluster.write()
        self._space = Space(("net", "mount", "uts"), self.environment(), before=("setpriv", "--pdeathsig", "KILL"))
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills all of it, and returns when no process is left."""
        self._space.end()
        for space in self._nodes.values():
            space.end()
        for daemon in self._daemons.values():
            daemon.wait()
        self._nodes.clear()
        self._daemons.clear()

    # Commands

    def environment(self) -> dict[str, str]:
        """Of all that runs in the lab."""
        ours = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}
        return {**ours, "PATH": PATH, "SLURM_CONF": str(self.cluster.conf)}

    def run(
        self,
        *command: str | Path,
        node: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        seconds: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command where the controller runs, as on a login node.

        Args:
            command: the program and its arguments.
            node: run it on this node instead.
            cwd: folder to run it in; by default that of the jobs.
            env: variables beyond those of ``environment()``.
            input: text for its standard input, which is empty otherwise.
            seconds: after which it is killed.
            check: whether an exit status other than 0 is an error.

        Raises:
            LabError: it took too long, or failed where that is an error.
        """
        space = self._nodes[node] if node else self._space
        # `timeout` is inside: killing nsenter would leave the command behind.
        line = [
            "timeout",
            "--kill-after=1",
            str(seconds),
            "env",
            f"--chdir={cwd or self.jobs}",
            *map(str, command),
        ]
        end = time.monotonic() + seconds
        run = subprocess.run(
            space.enter(*line),
            env={**self.environment(), **(env or {})},
            input=input or "",
            capture_output=True,
            text=True,
            check=False,
        )
        if time.monotonic() > end or (check and run.returncode != 0):
            raise LabError(f"{' '.join(line)}: exit status {run.returncode}\n{run.stdout}{run.stderr}")
        return run

    def submit(
        self,
        script: Path,
        *options: str,
        arguments: tuple[str, ...] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Job id of ``sbatch OPTIONS SCRIPT ARGUMENTS``."""
        run = self.run("sbatch", "--parsable", *options, script, *arguments, cwd=cwd, env=env, check=True)
        return int(run.stdout.strip().partition(";")[0])

    def _ask(self, *command: str) -> str:
        """Output of a command that only asks; it asks again when its connection to a busy slurmctld broke."""
        for _ in range(QUESTIONS):
            answer = self.run(*command)
            if answer.returncode != -signal.SIGPIPE:
                break
            time.sleep(POLL_SECONDS)
        if answer.returncode != 0:
            raise LabError(f"{' '.join(command)}: exit status {answer.returncode}\n{answer.stdout}{answer.stderr}")
        return answer.stdout

    # Jobs

    def job(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` says, e.g. ``["JobState"]``, ``["Restarts"]``, ``["NodeList"]``."""
        said = self._ask("scontrol", "show", "job", str(job))
        # Pairs stand side by side; a value goes to the next `Name=` or to the end of its line.
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[\w:/]+=|\s*$)", said, re.MULTILINE))

    def state(self, job: int) -> str:
        """E.g. ``PENDING``, ``RUNNING``, ``COMPLETED``."""
        return self.job(job)["JobState"]

    def nodes_of(self, job: int) -> list[str]:
        """Names of the nodes that a job has, in its order of ranks."""
        return self._ask("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def output(self, job: int) -> str:
        """What the job has printed so far; nothing where it has not started."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: int, *states: str, seconds: float = 60) -> dict[str, str]:
        """Waits for a state of a job (``COMPLETED``, if none is given), and returns what is then known of it.

        Raises:
            LabError: it has ended in another state, or does not come in time; with the tails of all logs.
        """
        wanted = states or ("COMPLETED",)

        def found() -> dict[str, str] | None:
            job_now = self.job(job)
            state = job_now["JobState"]
            if state in LAST_STATES and state not in wanted:
                raise LabError(f"job {job} is {state}, not {' or '.join(wanted)}\n{self.logs(job)}")
            return job_now if state in wanted else None

        return self.until(found, f"job {job} {' or '.join(wanted)}", seconds, job)

    def until[T](self, condition: Callable[[], T], what: str, seconds: float = 60, job: int | None = None) -> T:
        """Waits until something holds, and returns what ``condition`` then gives.

        Raises:
            LabError: it does not come in time; with the tails of Slurm's logs and the job's.
        """
        end = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > end:
                raise LabError(f"after {seconds} s still not: {what}\n{self.logs(job)}")
            time.sleep(POLL_SECONDS)
        return found

    def logs(self, job: int | None = None) -> str:
        """The last lines of what Slurm and a job have written."""
        parts = [("squeue", self.run("squeue", "--long").stdout), ("sinfo", self.run("sinfo", "--long").stdout)]
        if job is not None:
            found = self.job(job)
            parts.append((f"job {job}", "\n".join(f"{key}={value}" for key, value in found.items())))
            parts += [(path, _tail(Path(path))) for path in sorted({found["StdOut"], found["StdErr"]})]
        for output in sorted(self.cluster.logs.glob("*.out")):
            log = output.with_suffix(".log")  # says the same, unless the daemon got nowhere
            parts.append((str(log), _tail(log) or _tail(output)))
        return "\n".join(f"== {name}\n{text}" for name, text in parts if text)

    # Nodes

    def nodes_up(self) -> set[str]:
        """Names of the nodes that can run jobs, and answer."""
        return {node for node, state in self.node_states().items() if state in UP_STATES}

    def node_states(self) -> dict[str, str]:
        """As ``sinfo`` tells, e.g. ``idle``, ``down*``; the star says that the node does not answer."""
        said = self._ask("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in said.splitlines())

    def crash(self, node: str) -> None:
        """The power goes: its link and all its processes are gone at once, and nobody is told."""
        self._ip(f"link delete {node}")  # first, so that no dying socket says goodbye
        self._nodes.pop(node).end()
        self._daemons.pop(node).wait()
        self._ip(f"netns delete {node}")

    def start(self, node: str) -> None:
        """Brings back a node that has crashed, and returns when it can run jobs again."""
        self._boot(node)
        self.until(lambda: node in self.nodes_up() and self._registered(node), f"{node} is up", seconds=30)

    def cut(self, node: str) -> None:
        """The cable goes: the node's processes live on, and reach nobody."""
        self._ip(f"link set {node} down")

    def heal(self, node: str) -> None:
        """The cable is back. Slurm looks at one DOWN node every few seconds, so it may take long to see it."""
        self._ip(f"link set {node} up")

    def resume(self, node: str) -> None:
        """Lets Slurm use a node again that is DOWN or drained, and look at it at once."""
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=True)

    def restart_controller(self) -> None:
        """Ends slurmctld as an administrator does, and returns when the new one answers."""
        self._stop("slurmctld")
        self._daemon("slurmctld", self._space, "slurmctld", "-D")
        self.until(lambda: self.run("scontrol", "ping").returncode == 0, "slurmctld answers", seconds=30)

    def reset(self) -> None:
        """Cancels all jobs, mends all nodes, and returns when all are idle."""
        if jobs := self.run("squeue", "--noheader", "--format=%A", check=True).stdout.split():
            self.run("scancel", *jobs)
        dead = [node for node in self.cluster.names if node not in self._nodes]
        for node in self._nodes:
            self.heal(node)
        for node in dead:
            self._boot(node)
        for node in dead:
            self.until(lambda node=node: self._registered(node), f"{node} has registered", seconds=30)
        for node, state in self.node_states().items():
            if "drain" in state or "down" in state:
                self.resume(node)
        self.until(lambda: set(self.node_states().values()) == {"idle"}, "all nodes are idle")

    # How it is made

    def _begin(self) -> None:
        self._space_run("hostname", CONTROLLER)
        self._space_run("mount", "--bind", self.cluster.hosts, "/etc/hosts")
        self._space_run("mount", "-t", "tmpfs", "tmpfs", "/run")  # `ip netns` keeps its files there
        self._ip(
            "link set lo up",
            f"link add {BRIDGE} type bridge forward_delay 0",
            f"address add {CONTROLLER_ADDRESS}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        )
        self._munge()
        self._daemon("slurmctld", self._space, "slurmctld", "-D")
        for node in self.cluster.names:
            self._boot(node)
        everyone = set(self.cluster.names)
        self.until(lambda: self.run("scontrol", "ping").returncode == 0, "slurmctld answers", seconds=30)
        self.until(lambda: self.nodes_up() == everyone, f"{len(everyone)} nodes are up", seconds=60)

    def _munge(self) -> None:
        folder = self.cluster.munge_socket.parent
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"key-file": key, "pid-file": folder / "pid", "seed-file": folder / "seed"}
        files |= {"socket": self.cluster.munge_socket, "log-file": self.cluster.logs / "munged.log"}
        # --force: it dislikes folders that others can write in, as some above ours may be.
        options = [f"--{name}={path}" for name, path in files.items()]
        self._daemon("munged", self._space, "munged", "--foreground", "--force", *options)
        self.until(self.cluster.munge_socket.exists, "munged listens", seconds=30)

    def _boot(self, node: str) -> None:
        self._ip(
            f"netns add {node}",
            f"link add {node} type veth peer name eth0 address {self.cluster.mac(node)} netns {node}",
            f"link set {node} master {BRIDGE} up",
        )
        self._ip(
            "link set lo up",
            f"address add {self.cluster.address(node)}/24 dev eth0",
            "link set eth0 up",
            options=("-netns", node),
        )
        before = self._space.enter("ip", "netns", "exec", node)
        space = self._nodes[node] = Space(("mount", "uts"), self.environment(), before)
        self.run("hostname", node, node=node, check=True)
        self._booted[node] = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._daemon(node, space, "slurmd", "-D")

    def _registered(self, node: str) -> bool:
        """Whether the controller has heard of the slurmd that runs now, and not only of the one before."""
        said = self.run("scontrol", "show", "node", node, check=True).stdout
        return re.search(r"SlurmdStartTime=(\S+)", said)[1] >= self._booted[node]

    def _ip(self, *commands: str, options: tuple[str, ...] = ()) -> None:
        self._space_run("ip", *options, "-batch", "-", input="\n".join(commands) + "\n")

    def _space_run(self, *command: str | Path, input: str | None = None) -> None:
        self.run(*command, input=input, check=True)

    def _daemon(self, name: str, space: Space, *command: str) -> None:
        with (self.cluster.logs / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                space.enter(*command),
                env=self.environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        for child in psutil.Process(daemon.pid).children():  # nsenter itself does not hand signals on
            child.terminate()
        daemon.wait()


def processes(conf: Path) -> set[psutil.Process]:
    """All processes of the lab with that slurm.conf, also those that hold it from outside."""
    spaces: dict[psutil.Process, str] = {}
    marked = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it may end while it is looked at
            spaces[process] = os.readlink(f"/proc/{process.pid}/ns/pid")
            if process.environ().get("SLURM_CONF") == str(conf):
                marked.add(process)
    # slurmstepd writes over its environment, so all in the same namespaces count.
    inside = {spaces[process] for process in marked} - {os.readlink("/proc/self/ns/pid")}
    return marked | {process for process, space in spaces.items() if space in inside}


def _tail(path: Path) -> str:
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL:])
