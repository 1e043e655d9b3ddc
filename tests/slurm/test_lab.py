"""The lab is a cluster: jobs are placed, run, signalled, requeued and torn apart as on one, and nothing leaks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, LabError, processes

pytestmark = pytest.mark.slow  # of the tests' own tools

# Beats until it is told to end, and says each time which incarnation on which node it is.
BEATS = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive --open-mode=append
echo "incarnation ${SLURM_RESTART_COUNT:-0}"
srun bash -c '
while [ ! -e end-$SLURM_JOB_ID ]; do
    echo "${SLURM_RESTART_COUNT:-0} $(hostname)" >> beats-$SLURM_JOB_ID
    sleep 0.2
done'
"""
TASKS = """\
#!/bin/bash
#SBATCH --nodes=8 --ntasks-per-node=8 --gpus-per-node=8
srun bash -c 'echo "$SLURM_PROCID $SLURM_LOCALID $(hostname) $CUDA_VISIBLE_DEVICES"' > all_gpus
srun --gpus-per-task=1 bash -c 'echo "$SLURM_PROCID $SLURM_LOCALID $(hostname) $CUDA_VISIBLE_DEVICES"' > own_gpu
"""
# The first task listens; the second tries to reach it, at each of two names.
REACH = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
srun PYTHON -c '
import os, pathlib, socket, time
if os.environ["SLURM_PROCID"] == "0":
    with socket.create_server(("", 29500)):
        pathlib.Path("listening").touch()
        while not pathlib.Path("tried").exists():
            time.sleep(0.05)
else:
    while not pathlib.Path("listening").exists():
        time.sleep(0.05)
    for name in ("localhost", "node1"):
        try:
            with socket.create_connection((name, 29500), timeout=10) as connection:
                print(name, "is", connection.getpeername()[0], flush=True)
        except ConnectionRefusedError:
            print(name, "refused", flush=True)
    pathlib.Path("tried").touch()
'
"""
TOO_MUCH = "Requested node configuration is not available"
SIGNALS = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
trap 'touch batch_shell_got_usr1' USR1
srun bash -c '
trap "touch $(hostname)_got_usr1; exit 0" USR1
touch $(hostname)_waits
while true; do sleep 0.1; done'
"""


def script(lab: Lab, name: str, text: str) -> Path:
    path = lab.jobs / name
    path.write_text(text)
    return path


def beats(lab: Lab, job: int) -> list[tuple[str, str]]:
    """Incarnation and node of each beat so far."""
    path = lab.jobs / f"beats-{job}"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


def start_beating(lab: Lab) -> int:
    """A job of which both tasks beat."""
    job = lab.submit(script(lab, "beats.sh", BEATS))
    lab.until(lambda: len(set(beats(lab, job))) == 2, "both nodes beat", 20, job)
    return job


def wait_for_second_incarnation(lab: Lab, job: int) -> None:
    """Until both of its tasks beat."""
    lab.until(lambda: [again for again, _ in set(beats(lab, job))].count("1") == 2, "both beat again", 60, job)


def grown(lab: Lab, job: int, beat: tuple[str, str], seconds: float = 1) -> int:
    """How many more of these beats there are after a while."""
    before = beats(lab, job).count(beat)
    time.sleep(seconds)
    return beats(lab, job).count(beat) - before


def end(lab: Lab, job: int) -> dict[str, str]:
    (lab.jobs / f"end-{job}").touch()
    return lab.wait(job, seconds=20)


def test_nodes_are_up(lab):
    assert lab.nodes_up() == {f"node{number}" for number in range(1, 9)}


def test_job_finds_itself_on_its_node_with_a_usable_environment(lab, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("OF_THE_TESTS", "seen")
    print_all = f"hostname; echo $SLURM_JOB_ID $OF_THE_TESTS $HOME $PWD; {sys.executable} -c 'import psutil'"
    job = lab.submit(script(lab, "where.sh", f"#!/bin/bash\nset -e\n{print_all}\n"), "--nodelist=node3")
    assert lab.wait(job)["NodeList"] == "node3"
    assert lab.output(job) == f"node3\n{job} seen {os.environ['HOME']} {lab.jobs}\n"
    assert lab.run("hostname").stdout == "controller\n"
    assert lab.run("hostname", node="node5").stdout == "node5\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--nodes=8", "--gpus-per-node=8", "--ntasks-per-node=8", "--cpus-per-task=8"), None),
        (("--nodes=8", "--gpus-per-node=h100:8"), None),
        (("--nodes=8", "--gpus-per-node=9"), TOO_MUCH),
        (("--nodes=9", "--gpus-per-node=8"), TOO_MUCH),
        (
            ("--nodes=1", "--ntasks-per-node=8", "--cpus-per-task=9"),
            TOO_MUCH,
        ),
        (("--partition=cpu",), "invalid partition specified"),
        (("--nodes=1", "--gpus-per-node=a100:8"), TOO_MUCH),
        (("--mem=2100G",), TOO_MUCH),
    ],
)
def test_requests_are_judged(lab, options, reason):
    run = lab.run("sbatch", "--test-only", *options, script(lab, "none.sh", "#!/bin/bash\n"))
    if reason is None:
        assert run.returncode == 0
        assert "on nodes node[1-8]" in run.stderr
    else:
        assert run.returncode == 1
        assert reason in run.stderr


def test_64_tasks_know_their_places(lab):
    job = lab.submit(script(lab, "tasks.sh", TASKS))
    lab.wait(job)
    place = {rank: f"{rank} {rank % 8} node{rank // 8 + 1}" for rank in range(64)}
    assert lines(lab, "all_gpus") == {f"{place[rank]} 0,1,2,3,4,5,6,7" for rank in range(64)}
    assert lines(lab, "own_gpu") == {f"{place[rank]} {rank % 8}" for rank in range(64)}


def lines(lab: Lab, name: str) -> set[str]:
    found = (lab.jobs / name).read_text().splitlines()
    assert len(found) == len(set(found))
    return set(found)


def test_names_lead_to_nodes_and_localhost_does_not(lab):
    found = lab.run("getent", "hosts", "node3", node="node1", check=True).stdout
    assert found.split() == ["10.77.0.3", "node3"]
    job = lab.submit(script(lab, "reach.sh", REACH.replace("PYTHON", sys.executable)))
    lab.wait(job)
    assert lab.output(job) == "localhost refused\nnode1 is 10.77.0.1\n"


def test_job_of_a_crashed_node_is_requeued_elsewhere(lab):
    job = start_beating(lab)
    lost = lab.nodes_of(job)[1]
    card = lab.run("cat", "/sys/class/net/eth0/address", node=lost, check=True).stdout
    lab.crash(lost)
    assert grown(lab, job, ("0", lost), seconds=0.5) == 0
    wait_for_second_incarnation(lab, job)
    assert lost not in lab.nodes_of(job)
    assert lab.node_states()[lost] == "down*"
    assert end(lab, job)["Restarts"] == "1"
    assert lab.output(job).splitlines()[0] == "incarnation 0"
    assert lab.output(job).splitlines()[-1] == "incarnation 1"
    lab.start(lost)
    assert lost in lab.nodes_up()
    # With another card, nodes that have talked to it before would not find it for seconds.
    assert lab.run("cat", "/sys/class/net/eth0/address", node=lost, check=True).stdout == card


def test_both_incarnations_write_when_a_node_is_cut_off(lab):
    job = start_beating(lab)
    lost = lab.nodes_of(job)[1]
    lab.cut(lost)
    wait_for_second_incarnation(lab, job)
    assert lost not in lab.nodes_of(job)
    assert grown(lab, job, ("0", lost)) > 0
    assert grown(lab, job, ("1", lab.nodes_of(job)[0])) > 0
    lab.heal(lost)
    lab.resume(lost)
    lab.until(lambda: grown(lab, job, ("0", lost)) == 0, "the old incarnation has ended", 20, job)
    assert grown(lab, job, ("1", lab.nodes_of(job)[0])) > 0
    assert end(lab, job)["Restarts"] == "1"


def test_restart_of_the_controller_disturbs_no_job(lab):
    job = start_beating(lab)
    nodes = lab.nodes_of(job)
    lab.restart_controller()
    assert lab.state(job) == "RUNNING"
    assert all(grown(lab, job, ("0", node)) > 0 for node in nodes)
    done = end(lab, job)
    assert (done["Restarts"], done["ExitCode"]) == ("0", "0:0")


def test_requeue_keeps_the_job_id(lab):
    job = start_beating(lab)
    lab.run("scontrol", "requeue", str(job), check=True)
    wait_for_second_incarnation(lab, job)
    assert end(lab, job)["Restarts"] == "1"


def test_signal_goes_to_tasks_and_not_to_the_batch_shell(lab):
    job = lab.submit(script(lab, "signals.sh", SIGNALS))
    nodes = lab.nodes_of(job) if lab.wait(job, "RUNNING") else []
    lab.until(lambda: all((lab.jobs / f"{node}_waits").exists() for node in nodes), "tasks wait", 20, job)
    lab.run("scancel", "--signal=USR1", str(job), check=True)
    lab.wait(job)
    assert {path.name for path in lab.jobs.glob("*_got_usr1")} == {f"{node}_got_usr1" for node in nodes}


def test_waiting_for_what_will_not_come_shows_logs(lab):
    job = lab.submit(script(lab, "fails.sh", "#!/bin/bash\necho it broke here >&2\nexit 3\n"))
    with pytest.raises(LabError, match=r"(?s)is FAILED, not COMPLETED.*ExitCode=3:0.*it broke here.*JobId"):
        lab.wait(job)
    job = lab.submit(script(lab, "late.sh", "#!/bin/bash\nsleep 60\n"), "--begin=now+1hour")
    with pytest.raises(LabError, match=r"(?s)after 0.5 s still not: job \d+ RUNNING.*Reason=BeginTime"):
        lab.wait(job, "RUNNING", seconds=0.5)
    with pytest.raises(LabError, match="Invalid job id"):
        lab.state(999999)


def test_reset_mends_what_a_test_has_left(lab):
    job = start_beating(lab)
    lab.crash("node8")
    lab.cut("node7")
    lab.run("scontrol", "update", "NodeName=node6", "State=DRAIN", "Reason=test", check=True)
    lab.reset()
    assert set(lab.node_states().values()) == {"idle"}
    assert lab.state(job) == "CANCELLED"
    done = lab.wait(lab.submit(script(lab, "all.sh", "#!/bin/bash\nsrun hostname > reset\n"), "--nodes=8"))
    assert done["NodeList"] == "node[1-8]"
    assert lines(lab, "reset") == set(lab.cluster.names)


def test_command_that_takes_too_long_is_killed_where_it_runs(lab):
    with pytest.raises(LabError, match="exit status 124"):
        lab.run("sleep", "987.6", seconds=0.3)
    assert lab.run("bash", "-c", "exit 124").returncode == 124
    assert ["sleep", "987.6"] not in [process.cmdline() for process in processes(lab.cluster.conf)]
