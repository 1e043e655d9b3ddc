"""How a run is doing, by its logs and by what Slurm says."""

from datetime import timedelta

import pytest

from megasched.errors import ConfigError
from megasched.launch.run_folder import RunFolder
from megasched.launch.slurm.client import SlurmJob
from megasched.launch.status import run_status
from megasched.launch.status.run_status import RunReader
from megasched.slurm import NoAnswerError
from tests.launch.status.runs import FIRST, LAST_LINE, SECOND, look, slurm_says


@pytest.mark.parametrize(
    ("slurm", "state", "why"),
    [
        ("RUNNING", "training", ""),
        ("PENDING", "waiting", ""),
        ("TIMEOUT", "stopped", "Slurm: TIMEOUT"),
        ("CANCELLED", "stopped", "Slurm: CANCELLED"),
        ("NODE_FAIL", "failed", "Slurm: NODE_FAIL"),
        ("COMPLETED", "stopped", "Slurm: COMPLETED, and the log does not say that training is done"),
    ],
)
def test_what_slurm_says_of_a_run_that_is_halfway(run, halfway, monkeypatch, slurm, state, why):
    job = slurm_says(monkeypatch, state=slurm, restarts=3)
    found = look(run, halfway + timedelta(seconds=10))
    assert (found.state, found.why, found.slurm, found.restarts) == (state, why, job, 3)
    assert found.ended == (slurm not in ("RUNNING", "PENDING"))
    assert (found.seconds_left is None) == (state != "training")


def test_a_job_that_slurm_has_started_again_has_no_logs_of_that_start_yet(run, halfway, monkeypatch):
    slurm_says(monkeypatch, start=halfway + timedelta(seconds=5))
    assert look(run, halfway + timedelta(seconds=8)).state == "starting"


def test_a_job_leads_to_its_folder(run, halfway, monkeypatch):
    run.folder.script.touch()
    slurm_says(monkeypatch, command=f"{run.folder.script} --flag")
    reader = RunReader("1")
    found = reader.look(halfway + timedelta(seconds=10))
    assert (found.path, found.iteration, found.state) == (str(run.folder.path), 28, "training")
    monkeypatch.setattr(run_status, "ask_slurm", lambda job_id: (_ for _ in ()).throw(ConfigError("forgotten")))
    assert reader.look(halfway + timedelta(seconds=10)).slurm is None  # it is known where the logs are


def test_a_job_of_another_script_leads_to_its_output(tmp_path, monkeypatch):
    output = tmp_path / "slurm-1.out"
    output.write_text("\n".join(FIRST[1]) + "\n")
    slurm_says(monkeypatch, command="/somewhere/train.sh", output=str(output))
    found = RunReader("1").look(LAST_LINE)
    assert (found.path, found.iteration) == (str(output), 28)


@pytest.mark.parametrize(
    ("slurm", "state", "why"),
    [
        ("PENDING", "waiting", ""),
        ("RUNNING", "starting", "there is no log yet"),
        ("FAILED", "failed", "Slurm: FAILED; its logs were not found"),
        ("CANCELLED", "stopped", "Slurm: CANCELLED; its logs were not found"),
    ],
)
def test_a_job_without_logs(monkeypatch, slurm, state, why):
    slurm_says(monkeypatch, state=slurm, output="logs/1.log")
    found = RunReader("1").look()
    assert (found.state, found.why, found.path, found.iteration) == (state, why, "logs/1.log", 0)


def test_the_folder_of_a_job_that_waits_leads_to_the_job(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.describe({"jobs": ["1", "2"]})
    job = slurm_says(monkeypatch, state="PENDING")
    found = RunReader(str(tmp_path)).look()
    assert (found.state, found.path, found.slurm) == ("waiting", str(tmp_path), job)


@pytest.mark.parametrize(("second", "state"), [("PENDING", "waiting"), ("RUNNING", "starting")])
def test_a_folder_that_was_submitted_again_leads_to_the_new_job(run, halfway, monkeypatch, second, state):
    """Its logs are of a job that has failed; --watch must not end by that."""
    run.folder.describe({"jobs": ["2", "3"]})
    start = halfway + timedelta(minutes=1)
    jobs = {
        "1": SlurmJob("1", "llama", "FAILED"),
        "2": SlurmJob("2", "llama", "CANCELLED"),
        "3": SlurmJob("3", "llama", second, start=start),
    }
    monkeypatch.setattr(run_status, "ask_slurm", jobs.get)
    found = look(run, start)
    assert (found.state, found.slurm, found.iteration, found.ended) == (state, jobs["3"], 28, False)
    jobs["3"] = SlurmJob("3", "llama", "COMPLETED")
    found = look(run, start)
    assert (found.state, found.slurm, found.ended) == ("failed", jobs["1"], True)


def test_a_slurm_that_does_not_answer_is_asked_once(run, halfway, monkeypatch):
    run.folder.describe({"jobs": ["1", "2", "3"]})
    asked = []

    def ask(job_id):
        asked.append(job_id)
        raise ConfigError("no answer") from NoAnswerError("after 20 s")

    monkeypatch.setattr(run_status, "ask_slurm", ask)
    assert look(run, halfway + timedelta(seconds=10)).slurm is None
    assert asked == ["1"]


def test_the_first_of_a_chain_that_trains_comes_before_those_that_wait(run, halfway, monkeypatch):
    run.folder.describe({"jobs": ["1", "2"]})
    jobs = {"1": SlurmJob("1", "llama", "RUNNING"), "2": SlurmJob("2", "llama", "PENDING")}
    monkeypatch.setattr(run_status, "ask_slurm", jobs.get)
    found = look(run, halfway + timedelta(seconds=10))
    assert (found.state, found.slurm) == ("training", jobs["1"])


@pytest.mark.parametrize(("submitted", "state"), [(["1", "2", "3"], "finished"), (["2", "3"], "waiting")])
def test_what_a_chain_has_left_waits_for_nothing_when_training_is_done(run, monkeypatch, submitted, state):
    """But jobs of a launch after it have something to do: more iterations, say."""
    run(0, 0, FIRST[0], LAST_LINE - timedelta(minutes=1))
    run(1, 0, SECOND[0], LAST_LINE)
    run(1, 1, SECOND[1], LAST_LINE)
    run.folder.describe({"jobs": submitted})
    jobs = {"1": SlurmJob("1", "llama", "COMPLETED"), "2": SlurmJob("2", "llama", "PENDING")}
    monkeypatch.setattr(run_status, "ask_slurm", lambda name: jobs.get(name) or SlurmJob(name, "llama", "PENDING"))
    found = look(run)
    assert (found.state, found.ended) == (state, state == "finished")
    assert found.slurm == jobs["1" if state == "finished" else "2"]


def test_a_path_comes_before_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "train.log").write_text("\n".join(FIRST[1]) + "\n")
    assert RunReader("12").look(LAST_LINE).iteration == 28
    with pytest.raises(ConfigError, match="job 13: unknown"):
        RunReader("13").look()


@pytest.mark.parametrize("target", ["runs", "12abc", "x12"])
def test_what_is_neither_a_path_nor_a_job(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{target}: no such file or folder"):
        RunReader(target).look()


def test_parts_of_a_job_are_asked_for_and_refused():
    with pytest.raises(ConfigError, match=r"job 12_3: unknown"):
        RunReader("12_3").look()


def test_a_log_that_can_not_be_read(run, halfway, monkeypatch):
    def forbidden(path, *given):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("megasched.reading.files.os.open", forbidden)
    with pytest.raises(ConfigError, match=r"node-0.log: Permission denied; expected a log of a run"):
        look(run)
