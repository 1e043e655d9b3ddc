"""``python -m megasched script.py``: what the script finds, and how a run ends that can't go on."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from megasched.trainer import entry, run_failure

RUN = "from sys import argv; from megasched.trainer import entry; {}entry.run_script(argv[1], argv[2:])"
ALL = RUN.format("")
# A script that does not train needs no Megatron, which each process takes half of its time to import.
NO_MEGATRON = RUN.format("entry.arrange_process = lambda *given, **named: None; ")


@pytest.fixture
def hf_model(tmp_path: Path) -> str:
    folder = tmp_path / "hf"
    LlamaConfig(
        num_hidden_layers=2,
        hidden_size=48,
        intermediate_size=112,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=64,
    ).save_pretrained(folder)
    return str(folder)


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MEGASCHED_")}
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"} | variables


def run(
    *argv: str, ranks: int = 1, code: str = ALL, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Runs a script through ``run_script``: one process, or ``ranks`` of them under torchrun."""
    command = [sys.executable, "-c", code, *argv]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc-per-node={ranks}", "--no-python", *command]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(**variables))


@pytest.mark.parametrize("options", [["-u"], []], ids=["unbuffered", "buffered"])
def test_a_line_is_written_with_its_end(options):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps writes apart
    with ours, theirs:
        subprocess.run(
            [sys.executable, *options, "-c", ALL, "missing.py"],
            stdout=theirs,
            stderr=theirs,
            env=environment(),
        )
        assert ours.recv(4096) == b"megasched: error: missing.py: no such script\n"


@pytest.mark.parametrize(
    ("flags", "given", "then"),
    [
        ("--tensor-model-parallel-size 2", None, "1"),
        ("--bf16 --context-parallel-size=2", None, "1"),
        ("--tensor-model-parallel-size 2", "8", "8"),
        ("--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2", None, None),
    ],
)
def test_kernels_start_in_order_where_megatron_asks_for_it(monkeypatch, flags, given, then):
    environ = {entry.CONNECTIONS: given} if given else {}
    monkeypatch.setattr(os, "environ", environ)
    entry.order_kernels(flags.split())
    assert environ.get(entry.CONNECTIONS) == then


def script(folder: Path, text: str) -> str:
    path = folder / "pretrain.py"
    path.write_text(text)
    return str(path)


# ---- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("absent.py", "--model-schedule auto --hf-model {hf}", "absent.py: no such script"),
        (
            "pretrain_gpt.py",
            "--model-schedule auto --hf-model {hf}",
            "pretrain_gpt.py: no launcher has started it.",
        ),
        ("pretrain.py", "--hf-model {hf}", "there is no --model-schedule. Pass `--model-schedule auto`"),
        (
            "pretrain.py",
            "--model-schedule absent_schedule.py --hf-model {hf}",
            "--model-schedule absent_schedule.py: no such file",
        ),
        (
            "pretrain.py",
            "--model-schedule absent:1/sched.py:name --hf-model {hf}",
            "--model-schedule absent:1/sched.py:name: no such file",
        ),
        ("pretrain.py", "--model-schedule auto", "--model-schedule needs --hf-model"),
        (
            "pretrain.py",
            "--model-schedule auto --hf-model ./absent",
            "--hf-model ./absent: no such file or folder",
        ),
        (
            "pretrain.py",
            "--model-schedule auto --hf-model {hf} --megasched-trace absent/trace.json",
            "--megasched-trace absent/trace.json: there is no folder absent that can be written to",
        ),
        (
            "pretrain.py",
            "--model-schedule auto --hf-model some/where/else",
            "--hf-model some/where/else: no such file or folder",
        ),
        (
            "pretrain.py",
            "--model-schedule auto --hf-model hf/absent",
            "--hf-model hf/absent: no such file or folder",  # no hub id: there is a folder hf
        ),
        (
            "pretrain.py",
            "--model-schedule auto --hf-model megasched/absent",
            "--hf-model megasched/absent: there is no such folder; as a hub id, it is not in",
        ),
        (
            "pretrain.py",
            "--model-schedule odd.py --hf-model {hf}",
            "the schedule file has a syntax error: expected ':'\n    asked for at: odd.py:1",
        ),
        (
            "pretrain.py",
            "--model-schedule auto --hf-model {hf} --data-path 0.3 absent 0.7 hf --train-data-path=s3://bucket/x",
            "--data-path absent: no data: no such file or folder, and no .bin\n",
        ),
        (
            "pretrain.py",
            "--model-schedule auto --hf-model {hf} --tokenizer-type HuggingFaceTokenizer --tokenizer-model absent",
            "--tokenizer-model absent: no such file or folder\n",
        ),
        (
            "pretrain.py",
            "--hf-model {hf} --model-schedule",
            "argument --model-schedule: expected one argument",
        ),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, hf_model: str, name: str, flags: str, message: str) -> None:
    """It comes at once: before anything is imported that takes seconds."""
    script(tmp_path, "raise SystemExit('the script must not run')")
    for heavy in ("torch", "transformers", "megatron"):
        (tmp_path / f"{heavy}.py").write_text("raise SystemExit(f'{__name__} must not be imported')")
    (tmp_path / "odd.py").write_text("def schedule(sch, layout)\n    pass\n")
    done = run(name, *flags.format(hf=hf_model).split(), cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("megasched: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == (3 if "syntax" in message else 1)


def test_a_transformer_engine_that_can_not_be_imported(tmp_path: Path, hf_model: str, broken_package) -> None:
    """Megatron would go on without it at an ImportError, and say nothing. Torch has loaded CUDA's libraries."""
    package = broken_package("transformer_engine")
    text = "import sys\nassert 'torch' in sys.modules\nraise ImportError('lib.so: undefined symbol: f')\n"
    (package / "transformer_engine" / "__init__.py").write_text(text)
    script(tmp_path, "raise SystemExit('the script must not run')")
    given = ["--model-schedule", "auto", "--hf-model", hf_model]
    done = run("pretrain.py", *given, cwd=tmp_path, PYTHONPATH=str(package))
    assert done.returncode == 2
    said = "transformer_engine 2.16.0 can't be imported here: ImportError: lib.so: undefined symbol: f."
    assert done.stderr.splitlines()[-1].startswith(f"megasched: error: {said}")


def test_traceback_when_asked_for(tmp_path: Path) -> None:
    done = run("absent.py", cwd=tmp_path, MEGASCHED_TRACEBACK="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "absent.py: no such script" in done.stderr


def test_a_rank_of_slurm_names_itself(tmp_path: Path) -> None:
    done = run("absent.py", cwd=tmp_path, SLURM_PROCID="1", SLURM_LOCALID="1")
    assert done.returncode == 2
    assert done.stderr == "megasched: error on rank 1: absent.py: no such script\n"


def test_schedule_may_be_a_registered_name_or_one_of_several_in_a_file(tmp_path: Path) -> None:
    given = {"hf_model": str(tmp_path), "adapter": None, "megasched_trace": None}
    entry.check_inputs("x.py", Namespace(model_schedule="someones_schedule", **given))
    several = tmp_path / "several.py"
    several.touch()
    entry.check_inputs("x.py", Namespace(model_schedule=f"{several}:second", **given))


# ---- a fault on the way -----------------------------------------------------------------------------

# Rank 0 hangs where a collective would: without the launcher's signal for longer than a test may take.
ONE_RANK = """
import os, signal, time
from pathlib import Path
from megasched.errors import ConfigError

def told_to_end(*_):
    print("told to end", flush=True)
    os._exit(1)

hangs = Path(__file__).with_name("hangs")
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, told_to_end)
    hangs.touch()
    time.sleep(3600)
while not hangs.exists():
    time.sleep(0.05)
raise ConfigError("only here")
"""

# So long rank 1 keeps to itself what rank 0 says: it says nothing if that one's end is its own.
ALL_RANKS = """
from megasched.errors import ConfigError
from megasched.trainer import run_failure
run_failure.GRACE_SECONDS = 3600
raise ConfigError("everywhere")
"""


@pytest.mark.parametrize(
    ("text", "out", "message"),
    [
        (ONE_RANK, "told to end\n", "megasched: error on rank 1: only here"),
        (ALL_RANKS, "", "megasched: error: everywhere"),
    ],
    ids=["one", "all"],
)
def test_ranks_end_together_with_one_message(
    tmp_path: Path, hf_model: str, text: str, out: str, message: str
) -> None:
    path = script(tmp_path, text)
    done = run(path, "--model-schedule", "auto", "--hf-model", hf_model, ranks=2, code=NO_MEGATRON)
    assert done.returncode != 0
    assert out in done.stdout
    assert len(re.findall("^megasched: error", done.stderr, re.MULTILINE)) == 1
    # torchrun ends with what the rank has told it.
    assert done.stderr.count("megasched: error") == 2
    assert re.search(rf"  traceback : {message}\n=+\n$", done.stderr)


@pytest.mark.parametrize(
    ("text", "status", "stderr"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('enough')", 1, "enough\n"),
        ("import sys; sys.exit()", 0, ""),
        (
            "raise ValueError('odd')",
            1,
            "ValueError: odd\nmegasched: the run failed: ValueError: odd\n    at: {path}:1\n"
            "        raise ValueError('odd')\n",
        ),
        (  # as packages do that read files
            "try:\n    int('x')\nexcept ValueError as why:\n    raise RuntimeError('it failed') from why",
            1,
            "megasched: the run failed: RuntimeError: it failed\n    at: {path}:4\n"
            "        raise RuntimeError('it failed') from why\n"
            "    because of: ValueError: invalid literal for int() with base 10: 'x'\n",
        ),
        # A thread that nobody joins must not keep a failed process.
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); assert False",
            1,
            "AssertionError",
        ),
    ],
)
def test_what_the_script_ends_with(tmp_path: Path, hf_model: str, text: str, status: int, stderr: str) -> None:
    path = script(tmp_path, text)
    done = run(path, "--model-schedule", "auto", "--hf-model", hf_model, code=NO_MEGATRON)
    assert done.returncode == status
    assert stderr.format(path=path) in done.stderr


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21633", True),
        ("NCCL error: remote process exited or there was a network error", True),
        ("connection to the database closed", False),
    ],
)
def test_a_rank_whose_peer_has_gone_leaves_the_status_to_it(monkeypatch, words: str, waits: bool) -> None:
    """The launcher looks every 0.1 s; of two ranks that it finds ended it may take either for the first."""
    slept: list[float] = []

    def fail(*given: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(entry, "_run", fail)
    monkeypatch.setattr(run_failure.time, "sleep", slept.append)
    monkeypatch.setattr(run_failure, "end", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        entry.run_script("pretrain_gpt.py", [])
    assert slept == [run_failure.GRACE_SECONDS] * waits


# ---- what the script finds --------------------------------------------------------------------------

INSPECT = """
import json, os, sys
import neighbour
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.base import ModelConfig

def extra(parser):
    parser.add_argument("--of-the-script", type=int)
    return parser

if __name__ == "__main__":
    import torch
    defaults = {"tokenizer_type": "NullTokenizer"}
    args = parse_and_validate_args(extra_args_provider=extra, args_defaults=defaults)
    names = "num_layers hidden_size num_query_groups padded_vocab_size distributed_backend of_the_script"
    print("found", json.dumps({
        "name": __name__, "argv0": sys.argv[0], "path0": sys.path[0], "neighbour": neighbour.__file__,
        "builder": ModelConfig.get_builder_cls.__module__, "cuda": torch.cuda.is_available(), "lr": args.lr,
        **{name: getattr(args, name) for name in names.split()},
    }))
"""


def test_an_unmodified_script_in_a_rehearsal(tmp_path: Path, hf_model: str) -> None:
    """A script in the shape of Megatron's own: modules beside it, its own parser, flags of its own."""
    path = script(tmp_path, INSPECT)
    (tmp_path / "neighbour.py").touch()
    for kernels in ("transformer_engine", "apex"):  # they need a GPU, and Megatron takes them where they are
        (tmp_path / f"{kernels}.py").write_text(f"raise RuntimeError('{kernels} was imported')")
    # Must not hide the installed Megatron: `python script.py` would not look here either.
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "megatron").mkdir(parents=True)
    (elsewhere / "megatron" / "__init__.py").touch()
    flags = (
        f"--model-schedule auto --hf-model {hf_model} --hf-random-init --rehearse --of-the-script 5 "
        "--lr 0.25 --vocab-size 300 --seq-length 32 --micro-batch-size 1 --train-iters 1 --mock-data "
        "--transformer-impl transformer_engine"
    )
    done = run(path, *flags.split(), cwd=elsewhere, PYTHONWARNINGS="")
    assert done.returncode == 0, done.stderr
    found = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    assert json.loads(found.removeprefix("found ")) == {
        "name": "__main__",
        "argv0": path,
        "path0": str(tmp_path),
        "neighbour": str(tmp_path / "neighbour.py"),
        "builder": "megasched.trainer.seams.model_builder",
        "cuda": True,
        "lr": 0.25,
        "num_layers": 2,
        "hidden_size": 48,
        "num_query_groups": 2,
        "padded_vocab_size": 384,
        "distributed_backend": "gloo",
        "of_the_script": 5,
    }
    assert "--transformer-impl transformer_engine -> --transformer-impl local" in done.stderr
    assert "stays as it will run on the cluster" in done.stderr
    assert f"megasched: megatron-core {entry.find_megatron().version}" in done.stderr
    assert "Warning" not in done.stderr + done.stdout


def test_a_rehearsal_refuses_what_the_cluster_would(tmp_path: Path, hf_model: str) -> None:
    """--fp4-format can't run on a CPU and is left out there; under a schedule it can't run anywhere."""
    path = script(tmp_path, "raise SystemExit('the script must not run')")
    flags = f"--model-schedule auto --hf-model {hf_model} --rehearse --fp4-format e2m1"
    done = run(path, *flags.split())
    assert done.returncode == 2
    assert "--fp4-format e2m1: 4-bit training is not available" in done.stderr
