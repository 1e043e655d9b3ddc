"""Whatever an earlier run is just doing when a later one takes the folder over: no checkpoint is lost or mixed."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from megasched.errors import CheckpointError, ConfigError
from megasched.trainer.checkpoint import save_claim
from megasched.trainer.checkpoint.save_claim import FOLDER, Owner, SaveClaim

TRACKER = "latest_checkpointed_iteration.txt"
OLD = Owner("77", 0, "node1", 10, 0.0)
NEW = replace(OLD, restart=1, host="node2")


def write(claim, iteration, text, files=3):
    """A checkpoint as Megatron writes it, with the empty folder that it makes first."""
    public = claim.save / f"iter_{iteration:07d}"
    public.mkdir(exist_ok=True)
    aside = claim.written_aside(public)
    try:
        for index in range(files):
            (aside / f"{index}.distcp").write_text(text)
    except FileNotFoundError:
        claim.refuse_if_taken_over()
        raise
    claim.publish(aside, public)
    claim.publish_text(str(iteration), claim.save / TRACKER)


def contents(save):
    """Tracker, and of each checkpoint what its files say."""
    tracker = save / TRACKER
    found = {
        folder.name: [file.read_text() for file in sorted(folder.iterdir())]
        for folder in sorted(save.glob("iter_*"))
    }
    return tracker.read_text() if tracker.exists() else None, found


def test_what_is_published_is_there_and_nothing_else_is_left(tmp_path):
    claim = SaveClaim(tmp_path / "save", OLD)
    write(claim, 10, "a")
    write(claim, 20, "b")
    assert contents(tmp_path / "save") == ("20", {"iter_0000010": ["a"] * 3, "iter_0000020": ["b"] * 3})
    claim.release()
    assert not (tmp_path / "save" / FOLDER).exists()


def test_a_checkpoint_is_replaced_whole(tmp_path):
    claim = SaveClaim(tmp_path, OLD)
    write(claim, 10, "a", files=5)
    write(claim, 10, "b", files=2)
    assert contents(tmp_path) == ("10", {"iter_0000010": ["b"] * 2})
    assert [path.name for path in claim.folder.iterdir()] == ["owner.json"]


class _Lines:
    """Calls a function before the n-th line that runs of save_claim.py; counts them otherwise."""

    def __init__(self, at=None, then=None):
        self.at, self.then, self.count = at, then, 0

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename != save_claim.__file__:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.then()
        return self

    def run(self, action):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
@pytest.mark.parametrize("iteration", [10, 20], ids=["replacing", "new"])
def test_taken_over_at_any_line(tmp_path, iteration, writes):
    """The old run saves; before each line that this takes, the new one comes, and maybe saves too."""

    def begin(name):
        save = tmp_path / name
        old = SaveClaim(save, OLD)
        write(old, 10, "first")
        return save, old

    save, old = begin("count")
    counter = _Lines()
    counter.run(lambda: write(old, iteration, "old"))
    assert counter.count > 20
    refused = 0
    for at in range(1, counter.count + 1):
        save, old = begin(f"at-{at}")
        seen: dict = {}

        def take_over(save=save, seen=seen):
            seen["claim"] = SaveClaim(save, NEW)
            if writes:
                write(seen["claim"], 20, "new")
            seen["then"] = contents(save)

        try:
            _Lines(at, take_over).run(lambda old=old: write(old, iteration, "old"))
        except CheckpointError as error:
            refused += "taken this folder over: Slurm job 77, restart 1" in str(error)
        tracker, found = contents(save)
        whole = {text * n for text in ("first", "old", "new") for n in (0, 3)}  # 0: Megatron's empty one
        assert all("".join(texts) in whole for texts in found.values())
        assert len(found[f"iter_{int(tracker):07d}"]) == 3
        # After the take-over nothing that counts has changed, but for an empty folder.
        was_tracker, was = seen["then"]
        assert tracker == was_tracker
        assert {name: texts for name, texts in found.items() if texts} == {
            name: texts for name, texts in was.items() if texts
        }
        write(seen["claim"], 30, "later")
        assert contents(save)[0] == "30"
    assert refused > 20


def test_an_old_run_that_wakes_up_makes_no_claim(tmp_path):
    SaveClaim(tmp_path, NEW)
    with pytest.raises(
        CheckpointError, match=r"a later start of this job has taken it over: Slurm job 77, restart 1"
    ):
        SaveClaim(tmp_path, OLD)


def test_what_a_dead_run_left_is_removed(tmp_path):
    dead = SaveClaim(tmp_path, OLD)
    (dead.written_aside(tmp_path / "iter_0000010") / "half").write_text("x")
    new = SaveClaim(tmp_path, NEW)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [new.folder.name]


@pytest.mark.parametrize("job", ["", "77"])
def test_a_second_run_beside_one_that_lives_is_refused(tmp_path, monkeypatch, job):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    code = (
        "import sys; from pathlib import Path; from megasched.trainer.checkpoint.save_claim import SaveClaim\n"
        "SaveClaim(Path(sys.argv[1])); print('has it', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "has it\n"
    with pytest.raises(ConfigError, match=rf"another run writes there and is alive: .*process {other.pid} on"):
        SaveClaim(tmp_path)
    if job:  # requeued, on the same host: what it was before has lost the folder, though it lives
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        SaveClaim(tmp_path)
    other.communicate("")
    claim = SaveClaim(tmp_path)  # that one has ended without giving the folder free
    assert claim.owner.pid == os.getpid()


@pytest.mark.parametrize(("state", "refused"), [("RUNNING", True), ("", False)])
def test_slurm_is_asked_about_another_job(tmp_path, monkeypatch, state, refused):
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\necho {state}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=os.pathsep)
    save = tmp_path / "save"
    SaveClaim(save, OLD)
    other = replace(OLD, job="78")
    if refused:
        with pytest.raises(ConfigError, match="Slurm job 77"):
            SaveClaim(save, other)
    else:
        assert SaveClaim(save, other).owner == other
    assert (tmp_path / "asked").read_text().split()[:2] == ["--jobs", "77"]


def test_the_owner_is_told_by_slurms_variables(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)  # unset in the first run
    assert (Owner.this_process().job, Owner.this_process().restart) == ("5", 0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert Owner.this_process().restart == 2
    assert json.loads(json.dumps(Owner.this_process().pid)) == os.getpid()


@pytest.mark.parametrize(
    ("tracker", "iteration", "warned"),
    [
        ("40", 0, True),
        ("40", 20, True),
        ("40", 40, False),
        ("release", 0, False),
        ("?", 0, False),
        (None, 0, False),
    ],
)
def test_a_run_that_begins_before_the_last_checkpoint_says_so(tmp_path, capsys, tracker, iteration, warned):
    """The same command, after Ctrl-C, began anew without --load and wrote over what it had saved."""
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    SaveClaim(tmp_path).tell_of_what_is_ahead(iteration)
    told = (
        f"megasched: warning: --save {tmp_path} has a checkpoint of iteration 40, and this run begins after "
        f"iteration {iteration}: it will replace what is there; --load {tmp_path} goes on from the last one\n"
    )
    assert capsys.readouterr().err == told * warned
