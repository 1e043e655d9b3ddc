"""The command line: what it routes where, what it prints, how it ends."""

import json
import resource
import subprocess
import sys

import pytest

from megasched.cli import main
from megasched.language.records import load_records
from tests.cli.conftest import SCHEDULE
from tests.launch.status.test_training_log import line

# Processor seconds that `megasched --help` may take; the wall clock is the machine's other users' as well.
HELP_LIMIT = 0.5

HEAVY = ("torch", "transformers", "megatron.core", "numpy")


@pytest.fixture
def run(capsys):
    """Runs a command in this process: exit status, stdout, stderr."""

    def run(*argv):
        with pytest.raises(SystemExit) as stop:
            main.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def schedule(tmp_path):
    path = tmp_path / "mysched.py"
    path.write_text(SCHEDULE)
    return path


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


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["primitives"], ["show", "--help"], ["nonsense"]])
def test_light_commands_import_nothing_heavy(argv):
    done = fresh(*argv)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert done.returncode == (2 if argv == ["nonsense"] else 0)


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


# ---- show -------------------------------------------------------------------------------------------


def test_show_as_json(run, schedule, llama):
    status, out, _ = run(
        *("show", schedule, "--hf-model", llama, "--tp", 2, "--sp", "--pp", 2, "--vp", 2, "--json")
    )
    found = json.loads(out)
    assert status == 0
    assert (found["model"], found["parameters"]) == ("LlamaForCausalLM", 96 * 32 * 2 + 32 + 4 * 10304)
    assert found["layout"]["tensor_model_parallel_size"] == 2
    assert found["layout"]["sequence_parallel"] is True
    modules = {module["path"]: module for module in found["modules"]}
    assert modules["model.layers.3.mlp.up_proj"]["parameters"][0]["local_shape"] == [32, 32]
    assert [(stage["pp_rank"], stage["vp_stage"]) for stage in found["stages"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len(found["records"]) == 2 + 4 * 7


def test_show_reads_megatrons_names_and_several_overrides(run, schedule, llama):
    flags = ["--tensor-model-parallel-size", 4, "--sequence-parallel", "--pipeline-model-parallel-size", 2]
    flags += ["--num-virtual-stages-per-pipeline-rank", 3]
    overrides = ["--hf-override", "num_hidden_layers=6", "vocab_size=100", "--json"]
    status, out, _ = run("show", schedule, "--hf-model", llama, *flags, *overrides)
    found = json.loads(out)
    assert status == 0
    assert len(found["stages"]) == 6
    embedding = next(m for m in found["modules"] if m["path"] == "model.embed_tokens")
    assert embedding["parameters"][0]["shape"] == [100, 32]
    assert embedding["parameters"][0]["local_shape"] == [128, 32]


def test_an_override_before_the_schedule(run, schedule, llama):
    status, out, _ = run("show", "--hf-override", "num_hidden_layers=2", schedule, "--hf-model", llama, "--json")
    assert status == 0
    assert json.loads(out)["stages"][0]["stop"] == 2


def test_show_prints_a_folded_tree_of_100_columns(run, schedule, llama, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    status, out, _ = run("show", schedule, "--hf-model", llama, "--tp", 2)
    assert status == 0
    assert "layers.0-3  ×4  LlamaDecoderLayer" in out
    assert "q_proj  Linear → ColumnParallelLinear  weight [32, 32] → [16, 32]  mysched.py:5" in out
    assert max(map(len, out.splitlines())) <= 100


def test_show_diff_as_json_and_as_a_page(run, schedule, llama):
    words = ("show", "auto", "--hf-model", llama, "--tp", 2, "--diff", schedule)
    status, out, _ = run(*words, "--json")
    assert (status, json.loads(out)["changes"]) == (0, [])
    status, out, _ = run(*words)
    assert (status, out.splitlines()[-1]) == (0, "both do the same to every module")


def test_show_writes_a_page(run, schedule, llama, tmp_path):
    path = tmp_path / "page.html"
    words = ("show", schedule, "--hf-model", llama, "--tp", 2, "--pp", 2, "--html", path)
    assert run(*words, "--global-batch-size", 6)[:2] == (0, f"wrote {path}\n")
    text = path.read_text()
    assert "<dt>Micro-batches in a step</dt><dd>6</dd>" in text
    assert "mysched.py:2" in text
    status, _, err = run(*words, "--trace", schedule)
    assert (status, "mysched.py: line 1, column 1: it is no JSON" in err) == (1, True)
    assert path.read_text() == text


def test_records_are_saved(run, schedule, llama, tmp_path):
    path = tmp_path / "records.json"
    assert run("show", schedule, "--hf-model", llama, "--records", path)[0] == 0
    records = load_records(path)
    assert len(records) == 2 + 4 * 7
    assert str(records[0]) == "model.embed_tokens: shard(param='weight', axis=0)"
    assert records[0].source == f"{schedule}:2"


def test_an_invalid_schedule_is_reported_in_full(run, schedule, llama):
    schedule.write_text(
        SCHEDULE + '    sch["model.norm"].shard("weight", axis=3)\n    sch["lm_head"].annotate("x", "k", 1)\n'
    )
    status, out, err = run("show", schedule, "--hf-model", llama, "--tp", 2)
    assert (status, out) == (1, "")
    assert err.startswith("megasched: error: the schedule has 2 problems")
    assert f"asked for at: {schedule}:11" in err
    assert f"asked for at: {schedule}:12" in err
    assert "Traceback" not in err


def test_the_traceback_is_there_when_asked_for(run, llama, monkeypatch):
    monkeypatch.setenv("MEGASCHED_TRACEBACK", "1")
    status, _, err = run("show", "nowhere.py", "--hf-model", llama)
    assert status == 1
    assert "Traceback" in err
    assert err.splitlines()[-1] == "megasched: error: --model-schedule nowhere.py: no such file"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tp", "0"], "tensor_model_parallel_size is 0"),
        (["--vp", "2"], "need pipeline_model_parallel_size"),
        (["--hf-override", "nonsense=1"], "no field 'nonsense'"),
        (["--html", "absent/page.html"], "--html absent/page.html: it can't be written: No such file"),
        (
            ["--html", "x.html", "--global-batch-size", "3", "--dp", "2"],
            "--global-batch-size 3 is no multiple of 2",
        ),
    ],
)
def test_flags_that_can_not_be_used(argv, words, run, schedule, llama):
    status, _, err = run("show", schedule, "--hf-model", llama, *argv)
    assert status == 1
    assert words in err


@pytest.mark.parametrize("argv", [["nonsense"], ["show"], ["show", "auto"], ["show", "auto", "--tp", "two"]])
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
    assert "problem: there is no Megatron" in out
    assert out.splitlines()[-1] == "megasched 0.1.0: no run can start here"


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


# ---- verify -----------------------------------------------------------------------------------------


def test_verify_prints_writes_and_ends_with_its_verdict(run, llama, tmp_path, monkeypatch):
    from megasched.language.parallel_dims import Layout
    from megasched.verify.compare_step import Check
    from megasched.verify.locate.locate import Finding
    from megasched.verify.verify import Verification

    call = ("model.norm", "model.norm: hook(mode='fw_post')", "mine.py:3")
    finding = Finding("forward", "model.norm", "what it gives", (1,), 0.5, "twice", "a cause", (call,), (call,))
    checks = [Check("loss", 2e-3, 1e-5, equal=False), Check("dropout masks", None, 0.0)]
    layout = Layout(tensor_model_parallel_size=2)
    found = Verification(
        "auto", str(llama), layout, "Llama", True, 4, "wrong", "loss differs", checks, finding, 7.0
    )
    asked = {}
    monkeypatch.setattr("megasched.verify.verify.verify_schedule", lambda *given, **o: asked.update(o) or found)
    file = tmp_path / "certificate.json"
    words = ("verify", "auto", "--hf-model", llama, "--tp", "2", "--layers", "6", "--certificate", file)
    status, out, _ = run(*words)
    assert (status, asked["layers"]) == (1, 6)
    assert "where it goes wrong first: forward, model.norm" in out
    assert "what it gives is off by 5.0e-01 on rank 1" in out
    assert out.count("model.norm: hook(mode='fw_post')  (mine.py:3)") == 2
    assert json.loads(file.read_text())["found"]["verdict"] == "wrong"
    found.verdict, found.finding = "equal", None
    status, out, _ = run(*words, "--json")
    assert (status, json.loads(out)["verdict"]) == (0, "equal")


# ---- new-adapter ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt_neo(tmp_path_factory):
    from transformers import GPTNeoConfig

    folder = tmp_path_factory.mktemp("gpt_neo")
    kinds = [[["global", "local"], 1]]
    GPTNeoConfig(vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, attention_types=kinds).save_pretrained(
        folder
    )
    return folder


def test_new_adapter_writes_what_it_has_checked(run, gpt_neo, tmp_path, ranks_of_commands):
    file = tmp_path / "gpt_neo.py"
    status, out, err = run("new-adapter", "--hf-model", gpt_neo, "--output", file)
    lines = [line.split() for line in out.splitlines()]
    assert [words[:2] for words in lines if words and words[0] in ("tp2", "tp2-sp", "pp2")] == [
        ["tp2", "equal"],
        ["tp2-sp", "equal"],
        ["pp2", "equal"],
    ]
    assert status == 0
    assert "of its linears 0 are cut by HF's plan, 12 by what was inferred" in out
    assert "an Adapter of 14 lines" in out
    assert [line for line in err.splitlines() if line.startswith("checking")] == [
        "checking tp2 ...",
        "checking tp2-sp ...",
        "checking pp2 ...",
    ]
    assert '    local_attributes={"transformer.h.*.attn.attention": ("num_heads",)},\n)\n' in file.read_text()


def test_new_adapter_ends_with_1_when_a_layout_is_not_equal(run, gpt_neo, monkeypatch):
    from megasched.verify.parity import Outcome

    outcomes = {
        "tp2": Outcome("equal", {"loss": 1e-7, "logits": 2e-7, "gradient": 3e-7, "grad_norm": 0.0}),
        "pp2": Outcome("refused", {}, why="the layers return more"),
    }
    monkeypatch.setattr("megasched.verify.new_adapter.new_adapter.check_source", lambda *given: outcomes)
    status, out, _ = run("new-adapter", "--hf-model", gpt_neo)
    rows = [line.split(maxsplit=2) for line in out.splitlines() if line.startswith(("tp2", "pp2"))]
    assert [" ".join(row).rstrip() for row in rows] == [
        "tp2 equal 1e-07  2e-07   3e-07     0e+00",
        "pp2 refused the layers return more",
    ]
    assert status == 1


def test_new_adapter_asks_for_force_before_it_works(run, gpt_neo, tmp_path, monkeypatch):
    monkeypatch.setattr("megasched.verify.new_adapter.new_adapter.new_adapter", lambda *given, **options: 1 / 0)
    file = tmp_path / "there.py"
    file.touch()
    status, out, err = run("new-adapter", "--hf-model", gpt_neo, "--output", file)
    assert (status, out) == (1, "")
    assert err == f"megasched: error: --output {file}: the file exists; name another, or replace it with --force\n"


def test_new_adapter_without_a_check_replaces_a_file_when_forced(run, gpt_neo, tmp_path):
    file = tmp_path / "there.py"
    file.write_text("mine\n")
    status, out, err = run("new-adapter", "--hf-model", gpt_neo, "--output", file, "--force", "--no-check")
    assert status == 0
    assert file.read_text().startswith('"""gpt_neo: proposed by megasched new-adapter (transformers ')
    assert "small copy" not in out
    assert "checking" not in err
