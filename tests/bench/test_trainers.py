"""The comparison of whole trainers: two of them for real, and what is done with their runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plot
import pytest
import tables
import trainer_worker
import trainers

from megasched.launch.torchrun.start import free_port

JOB = trainer_worker.Job("tiny", ranks=2, tp=2, sequences=4, warmup=3, steps=2, rehearse=True)


def test_two_trainers_do_the_same_and_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, path = ["hf_ddp", "megasched_ddp"], tmp_path / "real.json"
    data = trainers.compare(names, JOB, 1, path)
    assert data["left_out"] == {}
    assert data["layouts"] == {"hf_ddp": {"tp": 1, "dp": 2}, "megasched_ddp": {"tp": 2, "dp": 1}}
    for name in names:
        (run,) = data["runs"][name]
        assert len(run["losses"]) == JOB.warmup
        assert len(set(run["losses"])) == JOB.warmup  # it learns
        assert len(run["peak_bytes"]) == JOB.ranks
        assert min(run["peak_bytes"]) > 0
        assert run["seconds"] > 0
    monkeypatch.setattr(trainers, "run_once", None)
    assert trainers.compare(names, JOB, 1, path)["runs"] == data["runs"]


def fake(ran: list[tuple[str, int]]) -> Callable[..., dict[str, Any]]:
    """Trainers that fail, learn otherwise, or take as many seconds as their name is long."""

    def run_once(name: str, job: trainer_worker.Job, folder: Path, nodes: trainers.Nodes) -> dict[str, Any]:
        ran.append((name, int(folder.name)))
        if name == "hf_compile_ddp":
            raise trainers.LeftOutError("no compiler")
        loss = 2.1 if name == "hf_fsdp2" else 2.0
        return {"losses": [loss] * job.warmup, "seconds": float(len(name)), "peak_bytes": [1 << 30, 2 << 30]}

    return run_once


def test_what_has_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(trainers, "run_once", fake(ran))
    names, path = ["hf_ddp", "megatron_native"], tmp_path / "some.json"
    trainers.compare(names, JOB, 2, path)
    assert ran == [("hf_ddp", 0), ("megatron_native", 0), ("megatron_native", 1), ("hf_ddp", 1)]
    ran.clear()
    data = trainers.compare([*names, "megasched_ddp"], JOB, 3, path)
    assert sorted(ran) == [
        *[("hf_ddp", 2)],
        *[("megasched_ddp", number) for number in range(3)],
        ("megatron_native", 2),
    ]
    assert data["rounds"]["megasched_ddp"] == [13.0] * 3
    assert data["speed_relative_to"]["hf_ddp"]["megasched_ddp"]["median"] == pytest.approx(6 / 13)
    assert json.loads(path.read_text())["runs"] == data["runs"]


def test_one_that_fails_or_learns_otherwise_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(trainers, "run_once", fake(ran))
    names, path = ["hf_ddp", "hf_compile_ddp", "hf_fsdp2", "megasched_ddp"], tmp_path / "some.json"
    data = trainers.compare(names, JOB, 2, path)
    assert data["left_out"] == {
        "hf_compile_ddp": "no compiler",
        "hf_fsdp2": "its losses are 5.0e-02 off those of the first trainer",
    }
    assert list(data["tokens_per_second"]) == ["hf_ddp", "megasched_ddp"]
    assert data["tokens_per_second"]["hf_ddp"] == pytest.approx(4 * 16 / 6)
    assert len(ran) == 2 + 1 + 1 + 2
    assert trainers.compare(names, JOB, 2, path) == data
    assert ran[6:] == [("hf_compile_ddp", 0), ("hf_fsdp2", 0)]  # the next command tries them again
    assert "left out: no compiler" in trainers.table(data)
    assert tables.trainers(data)[2:] == [
        "| `hf_ddp` | 1 x 2 | 11 | 11 |  |  | 2.15 GB |",
        "| `megasched_ddp` | 2 x 1 | 5 | 5 | 0.462 (0.462 to 0.462) |  | 2.15 GB |",
        "\nLeft out: `hf_compile_ddp`, no compiler.",
        "\nLeft out: `hf_fsdp2`, its losses are 5.0e-02 off those of the first trainer.",
    ]


def test_runs_of_another_job_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "run_once", fake([]))
    path = tmp_path / "some.json"
    trainers.compare(["hf_ddp"], JOB, 1, path)
    other = trainer_worker.Job("tiny", ranks=2, tp=1, sequences=4, warmup=3, steps=2, rehearse=True)
    with pytest.raises(ValueError, match="runs of another job"):
        trainers.compare(["hf_ddp"], other, 1, path)


@pytest.mark.parametrize(("ranks", "tp", "sequences"), [(4, 3, 4), (4, 2, 6)])
def test_what_does_not_divide_is_refused(ranks: int, tp: int, sequences: int) -> None:
    with pytest.raises(ValueError, match="must divide"):
        trainer_worker.Job("tiny", ranks, tp, sequences, warmup=1, steps=1, rehearse=True)


def test_numbers_of_ranks_are_drawn_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "run_once", fake([]))
    paths = []
    for ranks in (2, 4):
        job = trainer_worker.Job("tiny", ranks=ranks, tp=2, sequences=4, warmup=3, steps=2, rehearse=True)
        paths.append(tmp_path / f"{ranks}.json")
        trainers.compare(["hf_ddp", "megasched_ddp"], job, 1, paths[-1])
    assert plot.scaling(paths[:1], tmp_path) == []
    (drawn,) = plot.scaling(paths, tmp_path)
    assert drawn.stat().st_size > 1000
    assert plot.draw(paths[0], tmp_path).stat().st_size > 1000


def test_a_run_that_dies_says_its_reason(tmp_path: Path) -> None:
    with pytest.raises(trainers.LeftOutError, match="KeyError: 'no such shape'"):
        trainers.run_once(
            "hf_ddp", trainer_worker.Job("no such shape", 1, 1, 1, 1, 1, True), tmp_path, trainers.ONE_NODE
        )


@pytest.mark.slow
def test_nodes_meet(tmp_path: Path) -> None:
    """Two, which a launcher starts on this machine."""
    launcher = ("sh", "-c", '"$@" & "$@"; wait', "launcher")
    nodes = trainers.Nodes(2, launcher, f"127.0.0.1:{free_port()}")
    run = trainers.run_once("hf_ddp", JOB, tmp_path, nodes)
    assert len(run["peak_bytes"]) == JOB.ranks
