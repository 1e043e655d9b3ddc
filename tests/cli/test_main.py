"""The command line: what it routes where, what it prints, how it ends."""

import json
import resource
import subprocess
import sys

import pytest

from megasched.cli import main
from megasched.definition.small_models.small_models import small_config
from megasched.printing.shell_command import shell_command
from tests.launch.status.test_training_log import line

# Processor seconds that `megasched --help` may take; the wall clock is the machine's other users' as well.
HELP_LIMIT = 0.5

NANOBIND = 'made = type("nb_meta", (type,), {"__module__": "nanobind"})'
HEAVY = ("torch", "transformers", "megatron.core", "numpy")


def fresh(*argv):
    """Runs the command in a process of its own, which then prints which heavy modules it has imported."""
    code = (
        "import sys; from megasched.cli import main\n"
        "try: main.main()\n"
        f"finally: print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120, check=False
    )


JOB = ("--gpus", "8", "--seq-length", "8", "--global-batch-size", "8")


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["primitives"], 0),
        (["archs", "LlamaForCausalLM"], 0),
        (["show", "--help"], 0),
        (["nonsense"], 2),
        (["show", "--model-schedule", "auto", "--hf-model", "./absent"], 1),
        (["explain", "--model-schedule", "absent.py", "--hf-model", "."], 1),
        (["verify", "--model-schedule", "absent.py", "--hf-model", "."], 1),
        (["new-adapter", "--hf-model", "some/where/else"], 1),
        (["import", "--hf-model", "absent", "--save", "ckpt"], 1),
        (["plan", "--hf-model", ".", "--gpu", "h999", *JOB], 1),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_light_commands_and_trivial_errors_import_nothing_heavy(argv, status):
    done = fresh(*argv)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert done.returncode == status


@pytest.mark.parametrize(
    ("model_type", "line"),
    [("llama", 'sch["model.layers"][:1].checkpoint()'), ("mixtral", 'sch["model.layers.*.mlp"].level("block")')],
)
def test_a_command_that_measures_or_tries_is_quiet(tmp_path, model_type, line):
    """Megatron, which warns of kernels that it lacks, is imported for a prediction or a trial alone."""
    small_config(model_type).save_pretrained(tmp_path / "model")
    (tmp_path / "first.py").write_text(f"def schedule(sch, layout):\n    {line}\n")
    done = fresh("show", "--model-schedule", str(tmp_path / "first.py"), "--hf-model", str(tmp_path / "model"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "megatron.core" in done.stdout.splitlines()[-1]


def test_a_command_that_tries_megatrons_modules_is_quiet(tmp_path):
    small_config("mixtral").save_pretrained(tmp_path)
    done = fresh("show", "--tp", "2", "--sp", "--hf-model", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_do_without_the_compiler(monkeypatch):
    """Importing it takes seconds, and Megatron does where it is imported."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # else torch does without it in any case
    code = (
        "import sys; from megasched.cli import main\n"
        "try: main.main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, check=True)
    imported = set(done.stderr.split())
    assert "megatron.training.arguments" in imported
    assert "torch._inductor.compile_fx" not in imported


@pytest.mark.parametrize(
    ("imported", "end"),
    [("", "frozen True, enabled True"), (NANOBIND, "frozen False, enabled False")],
    ids=["others", "nanobind"],
)
def test_the_end_does_not_look_through_what_was_imported(imported, end):
    """A library made with nanobind would call leaked what is left."""
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(f'frozen {gc.get_freeze_count() > 1000}, enabled {gc.isenabled()}'))\n"
        f"{imported}\n"
        "from megasched.cli import main; main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == end


def test_help_is_quick():
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "megasched", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < HELP_LIMIT


def test_help_names_the_commands_and_the_scripts(run):
    status, out, _ = run("--help")
    assert status == 0
    assert all(
        word in out
        for word in ("primitives", "show", "verify", "new-adapter", "doctor", "quickstart", "SCRIPT.py")
    )


def test_version(run):
    assert run("--version") == (0, "megasched 0.1.0\n", "")


def test_a_script_gets_its_arguments_untouched(monkeypatch):
    calls = []
    monkeypatch.setattr("megasched.trainer.entry.run_script", lambda *given: calls.append(given))
    flags = ["--help", "--version", "--hf-override", "a=1", "b=2", "--", "-h"]
    main.main(["pretrain_gpt.py", *flags])
    assert calls == [("pretrain_gpt.py", flags)]


def test_quickstart_gets_its_arguments_untouched(run, monkeypatch):
    calls = []
    monkeypatch.setattr("megasched.launch.quickstart.command.main", lambda argv: calls.append(argv) or 7)
    assert run("quickstart", "--dir", "x", "--dry-run", "-h", "--iters", "3")[0] == 7
    assert calls == [["--dir", "x", "--dry-run", "-h", "--iters", "3"]]


# ---- primitives -------------------------------------------------------------------------------------


def test_primitives_are_listed_with_their_first_lines(run):
    status, out, _ = run("primitives")
    assert status == 0
    line = next(line for line in out.splitlines() if line.startswith("shard "))
    assert line.split(maxsplit=1)[1].strip() == "Cuts a parameter over the tensor-parallel group."
    assert "pipeline_split" in out


def test_one_primitive_is_documented_in_full(run):
    status, out, _ = run("primitives", "pipeline_split")
    assert status == 0
    assert out.startswith("cut_pipeline_stage()")
    assert "Example:" in out


def test_an_unknown_primitive_suggests_others(run):
    status, out, err = run("primitives", "shrad")
    assert (status, out) == (1, "")
    assert "did you mean shard" in err


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["show"], ["show", "auto", "--hf-model", "."], ["show", "--tp", "two"]]
)
def test_wrong_usage(argv, run):
    status, _, err = run(*argv)
    assert status == 2
    assert "Usage: megasched" in err


# ---- doctor -----------------------------------------------------------------------------------------


def test_doctor_as_json(run):
    status, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["runnable"] is True
    assert {"python", "torch", "megatron-core", "transformers"} <= {
        p["name"] for p in found["packages"] if p["ok"]
    }
    assert "arguments" in [patch["name"] for patch in found["patches"]]


def test_doctor_ends_with_1_when_nothing_can_run(run, monkeypatch):
    def none():
        from megasched.errors import ConfigError

        raise ConfigError("there is no Megatron")

    monkeypatch.setattr("megasched.cli.installation.find_megatron", none)
    status, out, _ = run("doctor")
    assert status == 1
    assert out.splitlines()[:2] == ["megasched 0.1.0: no run can start here", "problem: there is no Megatron"]


# ---- status -----------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        line(1, 900.0, 5.6) + line(2, 700.0, 5.5) + "[after training is done] datetime: 2026-11-20 11:00:00\n"
    )
    return path


def test_status_of_a_log(run, log):
    status, out, err = run("status", log)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["finished", str(log)]
    assert "iteration      2 of 160" in out


def test_status_is_watched_until_the_run_has_ended(run, log):
    status, out, _ = run("status", log, "--watch", "--interval", 60)
    assert status == 0
    assert out.partition("  ")[2] == "finished, iteration 2 of 160, loss 5.4000\n"


def test_ctrl_c_ends_watching(run, log, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    log.write_text(line(1, 900.0, 5.6))
    monkeypatch.setattr("time.sleep", interrupted)
    status, out, err = run("status", log, "--watch")
    assert (status, err) == (0, "")
    assert "iteration 1 of 160, loss 5.6000" in out


def test_status_watched_is_no_object(run, log):
    status, out, err = run("status", log, "--watch", "--json")
    assert (status, out) == (2, "")
    assert "pass one of them" in err


def test_a_command_to_paste_works_in_a_fresh_shell(tmp_path, monkeypatch):
    """An interpreter below the working directory is named from there; `megasched` if it is this one on PATH."""
    folder = tmp_path / "a folder" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "megasched"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir("/")
    assert shell_command("status", "a b") == f"'{str(folder / 'python').lstrip('/')}' -m megasched status 'a b'"
    monkeypatch.chdir(tmp_path)
    assert shell_command("status", "a b") == "'a folder/bin/python' -m megasched status 'a b'"
    monkeypatch.setenv("PATH", str(folder))
    assert shell_command("status", "a b") == "megasched status 'a b'"
