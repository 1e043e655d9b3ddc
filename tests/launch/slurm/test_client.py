"""What ``scontrol show job`` prints (Slurm 22.05), read back, with a stand-in for scontrol on PATH."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from megasched.errors import ConfigError
from megasched.launch.slurm.client import SlurmJob, ask_slurm, parse_job

RUNNING = """\
JobId=1 JobName=llama-small
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:04 TimeLimit=01:00:00 TimeMin=N/A
   SubmitTime=2026-11-22T15:10:34 EligibleTime=2026-11-22T15:10:40
   AccrueTime=2026-11-22T15:10:40
   StartTime=2026-11-22T15:10:40 EndTime=2026-11-22T16:10:40 Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-22T15:10:40 Scheduler=Main
   Partition=gpu AllocNode:Sid=localhost:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=node[1-2]
   BatchHost=node1
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,mem=4000000M,node=2,billing=4
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command=/home/ada/run/job.sbatch
   WorkDir=/home/ada
   StdErr=/home/ada/run/logs/1.log
   StdIn=/dev/null
   StdOut=/home/ada/run/logs/1.log
   Power=
"""
HELD = """\
JobId=5 JobName=my job
   JobState=PENDING Reason=JobHeldUser Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A
   StartTime=Unknown EndTime=Unknown Deadline=N/A
   NodeList=
   Command={folder}/with space/job.sbatch --arg x=1 y z
   WorkDir=/home/ada
   StdOut={folder}/a b 5.out
"""
ARRAY = "JobId=2 ArrayJobId=2 ArrayTaskId=0-1 JobName=wrap\n   JobState=PENDING Reason=JobHeldUser\n"
HETEROGENEOUS = "JobId=4 HetJobId=3 HetJobOffset=1 JobName=wrap\n   HetJobIdSet=3-4\n   JobState=PENDING\n"


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Makes a scontrol that prints, and ends with a status; its arguments are in ``words``."""

    def make(out="", err="", status=0):
        (tmp_path / "out").write_text(out)
        (tmp_path / "err").write_text(err)
        program = tmp_path / "scontrol"
        program.write_text(f'#!/bin/sh\ncd {tmp_path}\necho "$@" > words\ncat out\ncat err >&2\nexit {status}\n')
        program.chmod(0o755)
        return tmp_path

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return make


def test_a_job_that_runs():
    assert parse_job(RUNNING) == SlurmJob(
        job_id="1",
        name="llama-small",
        state="RUNNING",
        reason="",
        restarts=1,
        nodes="node[1-2]",
        start=datetime(2026, 11, 22, 15, 10, 40),
        end=datetime(2026, 11, 22, 16, 10, 40),
        time_limit="01:00:00",
        command="/home/ada/run/job.sbatch",
        output="/home/ada/run/logs/1.log",
    )


def test_a_job_that_waits_and_names_with_spaces(tmp_path):
    job = parse_job(HELD.format(folder=tmp_path))
    assert (job.name, job.state, job.reason, job.nodes) == ("my job", "PENDING", "JobHeldUser", "")
    assert (job.start, job.end, job.time_limit) == (None, None, "UNLIMITED")
    assert job.output == f"{tmp_path}/a b 5.out"
    assert job.script is None
    script = tmp_path / "with space" / "job.sbatch"
    script.parent.mkdir()
    script.touch()
    assert job.script == script


def test_a_job_without_a_script():
    assert parse_job("JobId=2 JobName=wrap\n   JobState=RUNNING\n   Command=(null)\n").script is None


@pytest.mark.parametrize(
    ("text", "words"), [(ARRAY, "job 2 is a job array"), (HETEROGENEOUS, "job 3 is a heterogeneous job")]
)
def test_jobs_of_many_parts_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_job(text)


@pytest.mark.parametrize("job_id", ["2_1", "2_[0-3]", "3+1"])
def test_parts_of_jobs_are_refused(job_id):
    with pytest.raises(ConfigError, match="arrays and heterogeneous jobs are not supported"):
        ask_slurm(job_id)


def test_scontrol_is_asked(scontrol):
    folder = scontrol(RUNNING)
    assert ask_slurm("1").name == "llama-small"
    assert (folder / "words").read_text() == "show job 1\n"


def test_times_come_as_they_are_read_whatever_the_user_likes(scontrol, monkeypatch):
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    folder = scontrol(RUNNING)
    usual, liked = "StartTime=2026-11-22T15:10:40", "StartTime=15:10"
    as_liked = f'[ "$SLURM_TIME_FORMAT" = standard ] || sed -i "s/{usual}/{liked}/" {folder}/out'
    program = folder / "scontrol"
    program.write_text(program.read_text().replace("cat out", f"{as_liked}\ncat out"))
    assert ask_slurm("1").start == datetime(2026, 11, 22, 15, 10, 40)


def test_a_job_that_slurm_has_forgotten(scontrol):
    scontrol(err="slurm_load_jobs error: Invalid job id specified\n", status=1)
    with pytest.raises(ConfigError, match=r"^job 9: Slurm does not know it .*pass the run's folder$"):
        ask_slurm("9")


def test_slurm_does_not_answer(scontrol):
    told = "scontrol: error: x\nscontrol: fatal: Could not establish a configuration source\n"
    scontrol(err=told, status=1)
    with pytest.raises(ConfigError, match="Could not establish a configuration source"):
        ask_slurm("9")


def test_there_is_no_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^job 9: there is no scontrol here"):
        ask_slurm("9")


def test_the_script_is_looked_for_only_as_a_file(tmp_path):
    job = SlurmJob("1", "x", "RUNNING", command=str(tmp_path))
    assert job.script is None
    assert SlurmJob("1", "x", "RUNNING", command="").script is None
    assert Path("").is_dir()  # which an empty command must not be taken for
