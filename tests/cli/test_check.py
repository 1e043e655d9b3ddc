"""``megasched verify`` and ``new-adapter`` from the command line: what they print and write, how they end."""

import json

import pytest


def test_verify_prints_writes_and_ends_with_its_verdict(run, llama, tmp_path, monkeypatch):
    from megasched.language.parallel_dims import ParallelDims
    from megasched.verify.compare_step import Check
    from megasched.verify.locate.locate import Finding
    from megasched.verify.report.verification import Verification

    call = ("model.norm", "model.norm: hook(mode='fw_post')", "mine.py:3")
    finding = Finding("forward", "model.norm", "what it gives", (1,), 0.5, "twice", "a cause", (call,), (call,))
    checks = [Check("loss", 2e-3, 1e-5, equal=False), Check("dropout masks", None, 0.0)]
    layout = ParallelDims(tensor_model_parallel_size=2)
    found = Verification(
        "auto", str(llama), layout, "Llama", True, 4, "wrong", "loss differs", checks, finding, 7.0
    )
    asked = {}
    monkeypatch.setattr("megasched.verify.verify.verify_schedule", lambda *given, **o: asked.update(o) or found)
    file = tmp_path / "certificate.json"
    words = (
        "verify",
        "--model-schedule",
        "auto",
        "--hf-model",
        llama,
        "--tp",
        "2",
        "--layers",
        "6",
        "--certificate",
        file,
    )
    status, out, _ = run(*words)
    assert (status, asked["layers"]) == (1, 6)
    assert "where it goes wrong first: forward, model.norm" in out
    assert "what it gives is off by 5.0e-01 on rank 1" in out
    assert out.count("model.norm: hook(mode='fw_post')  (mine.py:3)") == 2
    assert json.loads(file.read_text())["found"]["verdict"] == "wrong"
    found.verdict, found.finding = "equal", None
    status, out, _ = run(*words, "--json")
    assert (status, json.loads(out)["verdict"]) == (0, "equal")


def test_a_certificate_that_can_not_be_written_is_refused_before_the_steps(run, llama, tmp_path):
    status, _, err = run("verify", "--hf-model", llama, "--certificate", tmp_path)
    assert (status, err) == (
        1,
        f"megasched: error: --certificate {tmp_path}: it is a folder; the name of a file is due\n",
    )


def test_no_certificate_is_made_in_bf16(run, llama, tmp_path):
    file = tmp_path / "certificate.json"
    status, _, err = run("verify", "--hf-model", llama, "--bf16", "--certificate", file)
    assert status == 1
    assert "made without --bf16 speaks for runs in bf16, too" in err
    assert not file.exists()


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
