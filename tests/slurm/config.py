"""The files of a cluster: what its slurm.conf, gres.conf and /etc/hosts say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0"  # seen by the lab alone
CONTROLLER = "controller"
CONTROLLER_ADDRESS = f"{NETWORK}.254"
# slurmd looks for cgroups in any case. A node's /sys has none, and this is the kind that does not mind.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"


@dataclass(frozen=True)
class Cluster:
    """What is in the cluster.

    Attributes:
        folder: of all files that Slurm writes; every node sees it.
        nodes: how many; they are called node1, node2, ...
        gpus: of each node.
        gpu_type: as in ``--gres=gpu:h100:8``.
        cpus: of each node, as the scheduler counts; the machine need not have them.
        memory: of each node in MB, likewise.
        settings: of slurm.conf, beyond those here or instead of them.
    """

    folder: Path
    nodes: int = 8
    gpus: int = 8
    gpu_type: str = "h100"
    cpus: int = 64
    memory: int = 2_000_000
    settings: Mapping[str, object] | None = None

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    def address(self, node: str) -> str:
        return f"{NETWORK}.{self.names.index(node) + 1}"

    def mac(self, node: str) -> str:
        """Of the node's network card: always the same, so that others reach it at once after it has crashed."""
        return f"02:00:00:00:00:{self.names.index(node) + 1:02x}"

    def write(self) -> None:
        """Makes the folder's files."""
        for name in ("state", "spool", "log", "pid", "gpus", "munge", "jobs"):
            (self.folder / name).mkdir()
        # Slurm wants a device in each place; one that does nothing does.
        for index in range(self.gpus):
            (self.folder / "gpus" / f"nvidia{index}").symlink_to("/dev/null")
        self.hosts.write_text(self.hosts_text())
        self.conf.write_text(self.slurm_conf())
        (self.folder / "gres.conf").write_text(self.gres_conf())
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF)

    def hosts_text(self) -> str:
        addresses = {"localhost": "127.0.0.1", CONTROLLER: CONTROLLER_ADDRESS}
        addresses |= {node: self.address(node) for node in self.names}
        return "".join(f"{address} {name}\n" for name, address in addresses.items())

    def gres_conf(self) -> str:
        devices = self.folder / "gpus" / f"nvidia[0-{self.gpus - 1}]"
        return f"NodeName=node[1-{self.nodes}] Name=gpu Type={self.gpu_type} File={devices} AutoDetect=off\n"

    def slurm_conf(self) -> str:
        lines = [f"{key}={value}" for key, value in {**self._settings(), **(self.settings or {})}.items()]
        lines += [
            f"NodeName=node[1-{self.nodes}] CPUs={self.cpus} RealMemory={self.memory} "
            f"Gres=gpu:{self.gpu_type}:{self.gpus} State=UNKNOWN",
            "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            # Preempted by `urgent` as `gpu` is, but with time to save.
            "PartitionName=patient Nodes=ALL MaxTime=INFINITE GraceTime=60 State=UP",
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF State=UP",
        ]
        return "\n".join(lines) + "\n"

    def _settings(self) -> dict[str, object]:
        return {
            "ClusterName": "lab",
            "SlurmctldHost": f"{CONTROLLER}({CONTROLLER_ADDRESS})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # A requeued job waits for a second more than this. Below 5 it is invalid, and 120 is taken in silence.
            "AuthInfo": f"socket={self.munge_socket},cred_expire=5",
            "CredType": "cred/munge",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool" / "%n",
            "SlurmctldPidFile": self.folder / "pid" / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "pid" / "slurmd.%n.pid",
            "SlurmctldLogFile": self.logs / "slurmctld.log",
            "SlurmdLogFile": self.logs / "%n.log",
            # No cgroups: the machine's are not the lab's to change.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "JobCompType": "jobcomp/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "MailProg": "/bin/true",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            # Else a job that asks for no memory gets all of a node's.
            "DefMemPerCPU": self.memory // self.cpus,
            # The CPUs and the memory below are believed, whatever slurmd finds.
            "SlurmdParameters": "config_overrides",
            "GresTypes": "gpu",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
            "JobRequeue": 1,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "SlurmctldParameters": "preempt_send_user_signal",  # that of --signal, where there is time
            "ReturnToService": 2,  # a node that answers again is used again
            # A node is DOWN after about both together. With half of it, messages of jobs that end get lost.
            "SlurmdTimeout": 10,
            "MessageTimeout": 5,
            "SlurmctldTimeout": 10,
            "KillWait": 3,  # between SIGTERM and SIGKILL; Slurm's default is 30
            "InactiveLimit": 0,
            "WaitTime": 0,
            "MinJobAge": 3600,  # else `scontrol show job` forgets jobs that have ended
        }
