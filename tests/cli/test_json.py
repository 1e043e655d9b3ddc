"""``--json``: every command has it, and prints one object and nothing else to standard output."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer

from megasched.cli import main
from megasched.json_output import print_json
from megasched.launch.quickstart import command as quickstart
from megasched.launch.quickstart import run_plan
from megasched.launch.quickstart.corpus import Corpus, write_tokenizer
from tests.launch.status.test_training_log import line

# Command -> why it has no --json.
WITHOUT: dict[str, str] = {}

# A schedule and a space are other people's code, and may print.
SCHEDULE = "def schedule(sch, layout):\n    print('a schedule that prints')\n"
SPACE = 'print("a space that prints")\n\n\ndef space(space):\n    space.choice("micro_batch_size", [1, 2])\n'
TRAINER = str(Path(__file__).parents[1] / "tuner" / "trainer.py")
TRAINED = line(1, 900.0, 5.6) + line(2, 700.0, 5.5)

# name of a case -> its words, and keys of the object that it prints.
CASES = {
    "primitives": (["primitives"], {"primitives"}),
    "primitives NAME": (["primitives", "shard"], {"name", "aliases", "call", "summary", "documentation"}),
    "show": (
        ["show", "--model-schedule", "printing.py", "--hf-model", "llama"],
        {"layout", "modules", "stages", "records"},
    ),
    "show --diff": (
        ["show", "--model-schedule", "printing.py", "--hf-model", "llama", "--diff", "auto", "--tp", "2"],
        {"first", "second", "calls_of_first", "calls_of_second", "changes", "stages", "same"},
    ),
    "explain": (
        ["explain", "--model-schedule", "printing.py", "--hf-model", "llama"],
        {"model", "layout", "decisions", "context"},
    ),
    "verify": (
        ["verify", "--model-schedule", "printing.py", "--hf-model", "llama"],
        {"verdict", "right", "checks", "finding"},
    ),
    "new-adapter": (
        ["new-adapter", "--hf-model", "llama", "--no-check"],
        {"model", "source", "proposal", "still_open", "outcomes", "right", "output"},
    ),
    "archs": (["archs"], {"versions", "types", "older"}),
    "archs NAME": (["archs", "llama"], {"tp2", "facts"}),
    "plan": (
        ["plan", "--hf-model", "llama", "--gpus", "1", "--seq-length", "64", "--global-batch-size", "1"],
        {"layouts"},
    ),
    "tune": (["tune", "printing_space.py", "--trials", "1"], {"points", "best", "trials", "plots"}),
    "import": (
        ["import", "--hf-model", "weights", "--save", "imported"],
        {"hf_model", "checkpoint", "architecture", "tensors", "bytes"},
    ),
    "export": (
        ["export", "--load", "ckpt", "--output", "exported"],
        {"checkpoint", "output", "iteration", "architecture", "dtype", "tensors", "bytes", "adapter"},
    ),
    "inspect": (["inspect", "ckpt"], {"iteration", "layout", "tensors", "optimizer", "files", "problems", "args"}),
    "status": (["status", "run"], {"state", "iteration", "loss", "tokens_per_second", "saved", "slurm", "error"}),
    "launch slurm": (
        ["launch", "slurm", "--nodes", "1", "--no-check", "--dry-run", "--", "pretrain_gpt.py"],
        {"facts", "warnings", "script"},
    ),
    "launch torchrun": (
        ["launch", "torchrun", "--hosts", "a,b", "--no-check", "--dry-run", "--", "pretrain_gpt.py"],
        {"facts", "warnings", "script"},
    ),
    "launch local": (
        [
            *("launch", "local", "--ranks", "1", "--no-check", "--", "./trains_nothing.py"),
            *("--model-schedule", "auto", "--hf-model", "llama"),
        ],
        {"facts", "warnings", "run_folder", "log", "status"},
    ),
    "tokenize": (
        ["tokenize", "corpus.jsonl", "--tokenizer-model", "tokenizer", "--output", "tokens"],
        {"prefix", "tokenizer_model", "documents", "tokens", "empty"},
    ),
    "doctor": (["doctor"], {"runnable", "packages", "devices", "patches", "problems"}),
    "quickstart": (["quickstart", "--dir", "q"], {"machine", "script", "last_loss", "checkpoints", "next"}),
    "quickstart --dry-run": (["quickstart", "--dir", "q", "--dry-run"], {"machine", "layout", "script"}),
}


def commands():
    """Name -> command; of groups those in it, e.g. ``launch slurm``."""
    found = {}
    for name, command in typer.main.get_command(main.app).commands.items():
        below = getattr(command, "commands", None)
        found |= {name: command} if below is None else {f"{name} {own}": one for own, one in below.items()}
    return found


def flags(name):
    """The options of a command; the quickstart parses its own."""
    parsed = [option for parameter in commands()[name].params for option in parameter.opts]
    own = [option for action in quickstart._parser()._actions for option in action.option_strings]
    return {*parsed, *(own if name == "quickstart" else [])}


@pytest.mark.parametrize("name", commands())
def test_every_command_has_it_or_a_reason(name):
    assert ("--json" in flags(name)) != bool(WITHOUT.get(name)), "give it --json, or say in WITHOUT why not"
    assert name in WITHOUT or name in CASES, "a command with --json needs a case here"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run: a model, a schedule and a space."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from megasched.weights.importing import import_weights

    folder = tmp_path_factory.mktemp("json")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    config.save_pretrained(folder / "llama")
    LlamaForCausalLM(config).save_pretrained(folder / "weights")
    import_weights(folder / "weights", folder / "ckpt", progress=lambda total: nullcontext(lambda count: None))
    (folder / "empty").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "train.log").write_text(TRAINED)
    (folder / "trains_nothing.py").touch()
    write_tokenizer(folder / "tokenizer")
    (folder / "corpus.jsonl").write_text('{"text": "a"}\n')
    (folder / "printing.py").write_text(SCHEDULE)
    (folder / "printing_space.py").write_text(SPACE)
    return folder


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """Runs a command in this process: exit status, stdout, stderr, those of its children as well."""
    monkeypatch.chdir(folder)
    corpus = Corpus(folder=folder / "corpus", documents=3, tokens=1000)
    monkeypatch.setattr(quickstart, "prepare_corpus", lambda folder: corpus)
    training = [sys.executable, "-c", f"print({TRAINED!r})"]
    monkeypatch.setattr(run_plan, "training_command", lambda plan, **options: training)

    def run(*words):
        with pytest.raises(SystemExit) as stop:
            main.main([*words, *(["--", sys.executable, TRAINER] if words[0] == "tune" else [])])
        return stop.value.code or 0, *capfd.readouterr()

    return run


def with_json(words):
    """With the flag among the command's own, before what is handed on."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], "--json", *words[at:]]


@pytest.mark.parametrize("case", CASES)
def test_one_object_and_nothing_else(case, run, request):
    if case == "verify":
        request.getfixturevalue("ranks_of_commands")
    words, keys = CASES[case]
    status, out, err = run(*with_json(words))
    found = json.loads(out)
    assert status == 0
    assert keys <= set(found), set(found)
    assert ("that prints" in err) == ("printing" in " ".join(words))


@pytest.mark.parametrize(
    "words",
    [
        ["primitives", "shrad"],
        ["show", "--model-schedule", "absent.py", "--hf-model", "llama"],
        ["show", "--model-schedule", "auto", "--hf-model", "llama", "--diff", "absent.py"],
        ["explain", "--model-schedule", "absent.py", "--hf-model", "llama"],
        ["verify", "--model-schedule", "auto", "--hf-model", "empty"],
        ["new-adapter", "--hf-model", "empty", "--no-check"],
        ["archs", "shrad"],
        ["plan", "--hf-model", "empty", "--gpus", "1", "--seq-length", "64", "--global-batch-size", "1"],
        ["tune", "absent.py"],
        ["status", "empty"],
        ["import", "--hf-model", "empty", "--save", "nowhere"],
        ["export", "--load", "empty", "--output", "nowhere"],
        ["export", "--load", "ckpt", "--output", "nowhere", "--dtype", "int4"],
        ["export", "--load", "ckpt", "--output", "nowhere", "--max-shard-size", "much"],
        ["inspect", "empty"],
    ],
    ids=" ".join,
)
def test_an_error_is_no_object(words, run):
    """It goes to standard error with its exit status, as without ``--json``."""
    status, out, err = run(*words, "--json")
    assert (status, out) == (1, "")
    assert "megasched: error: " in err


def test_a_training_that_fails_is_no_object(run, monkeypatch):
    failing = [sys.executable, "-c", "import sys; print('out of memory'); sys.exit(7)"]
    monkeypatch.setattr(run_plan, "training_command", lambda plan, **options: failing)
    status, out, err = run("quickstart", "--dir", "q", "--json")
    assert (status, out) == (7, "")
    assert "out of memory" in err
    assert "exit code 7" in err


def test_a_number_that_is_none_is_null(capsys):
    print_json({"loss": float("nan"), "errors": (float("inf"), 1.0)})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "errors": [None, 1.0]}
