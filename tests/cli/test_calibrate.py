"""``megasched plan --calibrate``: on a processor in the place of a GPU, from the command line to the file."""

import dataclasses
import json

import pytest
import torch

from megasched.cli import main
from megasched.cli.search import calibrate as command
from megasched.errors import ConfigError
from megasched.planner.hardware.calibrate import Gpu
from megasched.planner.hardware.calibrate_links import World
from megasched.planner.hardware.hardware import load_hardware
from tests.planner.test_calibrate import CPU, SIZES, TRUTH, planted, replay, wall_clock

GPU = Gpu(TRUTH.name, TRUTH.memory_gib, TRUTH.multiprocessors, fp8=True, in_node=2)
JOB = ["--hf-model", "nowhere", "--gpus", "8", "--seq-length", "64", "--global-batch-size", "8"]


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs ``megasched plan`` in a folder of its own: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as stop:
            main.main(["plan", *words])
        return stop.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def machine(monkeypatch):
    """This processor is a GPU that takes planted seconds."""
    monkeypatch.setattr(command, "own_gpu", lambda world: CPU)
    monkeypatch.setattr(command, "read_gpu", lambda device: GPU)
    monkeypatch.setattr(command, "Sizes", lambda: SIZES)
    monkeypatch.setattr(command, "CudaTimer", lambda: replay(planted(TRUTH, SIZES)))


@pytest.mark.usefixtures("machine")
def test_it_measures_writes_and_ends(run, tmp_path):
    status, out, err = run("--calibrate", "mine.toml", "--gpu", "h100-80gb")
    assert (status, err.splitlines()[-1]) == (0, "wrote mine.toml")
    assert load_hardware(str(tmp_path / "mine.toml")) == TRUTH
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][-2:] == ["measured", "h100-80gb"]
    assert ["product_efficiency", "0.6125", "0.75"] in rows
    assert ["kernel_us", "1.75", "2.5"] in rows
    text = (tmp_path / "mine.toml").read_text()
    assert f"torch {torch.__version__}, 1 process." in text
    assert "# Not measured: [node] and [network]; it takes torchrun" in text
    measured = [line.split(" = ")[0] for line in text.splitlines() if line.endswith("# measured")]
    assert measured == [
        *("name", "memory_gib", "multiprocessors", "product_efficiency", "attention_efficiency"),
        *("memory_efficiency", "kernel_us", "fp8_efficiency"),
    ]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "words",
    [
        ["--json", "--gpu", "h100-80gb", "--calibrate", "mine.toml"],
        ["--calibrate", "mine.toml", *JOB, "--gpu", "h100-80gb", "--json"],
    ],
    ids=["before", "after, with options of a plan"],
)
def test_json_and_any_order_of_options(words, run):
    status, out, _ = run(*words)
    found = json.loads(out)
    assert status == 0
    assert (found["file"], found["base"]) == ("mine.toml", "h100-80gb")
    assert found["hardware"]["product_efficiency"] == 0.6125
    assert "product_efficiency" in found["measured"]
    assert "node" not in " ".join(found["measured"])


@pytest.mark.usefixtures("machine")
def test_without_a_type_the_gpu_tells(run, monkeypatch, tmp_path):
    status, _, err = run("--calibrate", "mine.toml")
    assert (status, "no known type is Test 80GB with 79.5 GiB" in err) == (1, True)
    monkeypatch.setattr(command, "read_gpu", lambda device: dataclasses.replace(GPU, name="NVIDIA H100 80GB HBM3"))
    assert run("--calibrate", "mine.toml")[0] == 0
    assert "# of h100-80gb" in (tmp_path / "mine.toml").read_text()


@pytest.mark.usefixtures("machine")
def test_a_file_of_the_user_gives_the_peaks(run, tmp_path):
    assert run("--calibrate", "first.toml", "--gpu", "h100-80gb")[0] == 0
    assert run("--calibrate", "second.toml", "--gpu", "first.toml")[0] == 0
    assert load_hardware(str(tmp_path / "second.toml")) == TRUTH
    assert "# of first.toml" in (tmp_path / "second.toml").read_text()


@pytest.mark.usefixtures("machine")
def test_what_is_there_is_replaced_whole_or_not_at_all(run, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text("old")

    def fail(*where):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", fail)
        status, _, err = run("--calibrate", "mine.toml", "--gpu", "h100-80gb")
    assert (status, "mine.toml: it can't be written: No space left on device" in err) == (1, True)
    monkeypatch.setattr(command, "CudaTimer", lambda: lambda run: 0.0)
    status, _, err = run("--calibrate", "mine.toml", "--gpu", "h100-80gb")
    assert (status, "nothing is faster than its peak" in err) == (1, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]
    assert path.read_text() == "old"
    monkeypatch.setattr(command, "CudaTimer", lambda: replay(planted(TRUTH, SIZES)))
    assert run("--calibrate", "mine.toml", "--gpu", "h100-80gb")[0] == 0
    assert load_hardware(str(path)) == TRUTH


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.toml"], "--calibrate measures a GPU, and there is none here"),
        (["mine.txt"], "--calibrate mine.txt: the name must end in .toml"),
        (["absent/mine.toml"], "--calibrate absent/mine.toml: there is no folder absent"),
    ],
)
def test_what_can_not_be(words, message, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = run("--calibrate", *words)
    assert (status, out) == (1, "")
    assert f"megasched: error: {message}" in err


@pytest.mark.usefixtures("machine")
def test_a_type_that_is_not_known(run):
    status, _, err = run("--calibrate", "mine.toml", "--gpu", "h999")
    assert (status, "--gpu h999: known are" in err) == (1, True)


def test_each_rank_needs_a_gpu(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert command.own_gpu(World(1, 2, 1, 2)) == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match="3 ranks on this node, and 2 GPUs"):
        command.own_gpu(World(2, 3, 2, 3))


def test_without_it_a_plan_needs_what_it_needed(run):
    for missing in ("--hf-model", "--gpus", "--seq-length", "--global-batch-size"):
        at = JOB.index(missing)
        status, _, err = run(*JOB[:at], *JOB[at + 2 :])
        assert (status, f"Missing option '{missing}'" in err) == (2, True)


def test_help_says_what_it_does_and_what_is_required(run):
    status, out, _ = run("--help")
    assert (status, out.count("required]")) == (0, 4)
    assert "--calibrate FILE" in out
    assert "[default:\n                                  h100-80gb]" in out


# ---- ranks ------------------------------------------------------------------------------------------


def _calibrate(path):
    rank = torch.distributed.get_rank()
    world = World(rank, 2, rank, 2)
    found = command.calibrate("h100-80gb", GPU, world, CPU, wall_clock, SIZES)
    if rank == 0:
        command.write_calibration(found, path, world)
    return found


def test_two_ranks_find_the_same_and_measure_their_link(ranks, tmp_path):
    path = tmp_path / "mine.toml"
    first, second = ranks.run(2, _calibrate, path)
    assert first == second
    assert load_hardware(str(path)) == first.hardware
    assert first.hardware.gpus_per_node == 2
    text = path.read_text()
    assert "2 ranks, 2 on a node." in text
    assert "# Not measured: [network]; it takes torchrun" in text
    assert {name for name in first.measured if "." in name} == {
        *("node.gpus", "node.efficiency", "node.latency_us")
    }
    node, network = text.split("[node]")[1].split("[network]")
    assert (node.count("# measured"), network.count("# measured")) == (3, 0)
