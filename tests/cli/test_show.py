"""``megasched show`` from the command line: what it prints, writes and refuses."""

import json
import re

import pytest

from megasched.language.records import load_records
from megasched.trace.chrome_trace import RankCoordinates, read_trace
from tests.cli.conftest import SCHEDULE


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


def test_show_as_json(run, schedule, llama):
    status, out, _ = run(
        *(
            "show",
            "--model-schedule",
            schedule,
            "--hf-model",
            llama,
            "--tp",
            2,
            "--sp",
            "--pp",
            2,
            "--vp",
            2,
            "--json",
        )
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
    status, out, _ = run("show", "--model-schedule", schedule, "--hf-model", llama, *flags, *overrides)
    found = json.loads(out)
    assert status == 0
    assert len(found["stages"]) == 6
    embedding = next(m for m in found["modules"] if m["path"] == "model.embed_tokens")
    assert embedding["parameters"][0]["shape"] == [100, 32]
    assert embedding["parameters"][0]["local_shape"] == [128, 32]


def test_an_override_before_the_schedule(run, schedule, llama):
    status, out, _ = run(
        "show", "--hf-override", "num_hidden_layers=2", "--model-schedule", schedule, "--hf-model", llama, "--json"
    )
    assert status == 0
    assert json.loads(out)["stages"][0]["stop"] == 2


@pytest.mark.parametrize(
    "command", [["show"], ["explain"], ["plan", "--gpus", "2", "--seq-length", "8", "--global-batch-size", "2"]]
)
def test_options_of_a_schedule_are_given_as_to_a_run(run, llama, tmp_path, command):
    (tmp_path / "two.py").write_text(
        """
def schedule(sch, layout, first=0, last=0):
    raise ValueError(f"{first} and {last}")
"""
    )
    options = ["--schedule-option", "first=3", "last=5", "--model-schedule", tmp_path / "two.py:first=1"]
    status, _, err = run(*command, *options, "--hf-model", llama)
    assert status == 1
    assert "the schedule raised ValueError: 3 and 5" in err


def test_show_prints_a_folded_tree_of_100_columns(run, schedule, llama, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    status, out, _ = run("show", "--model-schedule", schedule, "--hf-model", llama, "--tp", 2)
    assert status == 0
    assert "layers.0-3  ×4  LlamaDecoderLayer" in out
    assert "q_proj  Linear → ColumnParallelLinear  weight [32, 32] → [16, 32]  mysched.py:5" in out
    assert max(map(len, out.splitlines())) <= 100


def test_show_diff_as_json_and_as_a_page(run, schedule, llama):
    words = ("show", "--model-schedule", "auto", "--hf-model", llama, "--tp", 2, "--diff", schedule)
    status, out, _ = run(*words, "--json")
    assert (status, json.loads(out)["changes"]) == (0, [])
    status, out, _ = run(*words)
    assert (status, out.splitlines()[-1]) == (0, "both do the same to every module")


def test_show_writes_a_page(run, schedule, llama, tmp_path):
    path = tmp_path / "page.html"
    words = ("show", "--model-schedule", schedule, "--hf-model", llama, "--tp", 2, "--pp", 2, "--html", path)
    assert run(*words, "--global-batch-size", 6)[:2] == (0, f"wrote {path}\n")
    text = path.read_text()
    assert "<dt>Micro-batches in a step</dt><dd>6</dd>" in text
    assert "mysched.py:2" in text
    status, _, err = run(*words, "--trace", schedule)
    assert (status, "mysched.py: line 1, column 1: it is no JSON" in err) == (1, True)
    assert path.read_text() == text


def test_a_step_is_predicted_on_named_hardware(run, schedule, llama, tmp_path):
    words = ("show", "--model-schedule", schedule, "--hf-model", llama, "--dp", 2, "--use-distributed-optimizer")
    words += ("--gpu", "h100-80gb", "--global-batch-size", 8)
    status, out, _ = run(*words)
    assert status == 0
    assert "reduce_scatter" in out
    line = " ".join(out.split()).partition("predicted on ")[2]
    assert re.match(r"H100 SXM 80 GB: step [\d.]+ ms \(4 micro-batches\), 0% of it waiting, [\d,]+ tokens", line)
    path = tmp_path / "predicted.json"
    report = json.loads(run(*words, "--json", "--predicted-trace", path)[1])
    recorded = read_trace(path)
    assert recorded.places == {0: RankCoordinates(0, 0, 0)}
    assert [span.kind for span in recorded.iterations[1]] == ["forward", "backward"] * 4
    step = report["step"]
    assert step["tokens_per_second_per_gpu"] == pytest.approx(4 * 4096 / step["step_seconds"])
    assert max(span.end for span in recorded.iterations[1]) <= step["step_seconds"]
    assert step["memory_bytes"][0]["total"] < step["usable_bytes"]
    assert [(one["op"], one["values"]) for one in report["communication"]] == [
        (op, report["stages"][0]["parameters"]) for op in ("reduce_scatter", "all_gather")
    ]


def own_figures(report):
    """The figures of a layout from what its own ``show --json`` says."""
    step, count = report["step"], report["step"]["microbatches"]
    found = {"Micro-batches in a step": count, "Step time": step["step_seconds"]}
    found["Pipeline bubble"] = step["seconds"]["waiting"] / step["step_seconds"]
    found["Tokens/s per GPU"] = step["tokens_per_second_per_gpu"]
    found["Peak memory of a GPU"] = max(rank["total"] for rank in step["memory_bytes"])
    found["of the 75.1 GiB for tensors"] = found["Peak memory of a GPU"] / step["usable_bytes"]
    for one in report["communication"]:
        name = f"Sent over {one['group']}, {one['op']}"
        found[name] = found.get(name, 0) + one["bytes"] * (1 if one["phase"] == "step" else count)
    return found


def test_two_layouts_have_the_figures_of_each(run, schedule, llama):
    """Of as many sequences in a step, which both can run: 4 micro-batches of 2 for each of two pipeline ranks."""
    words = ("show", "--model-schedule", schedule, "--hf-model", llama, "--gpu", "h100-80gb")
    layouts = (
        ["--tp", 2, "--pp", 2, "--micro-batch-size", 2],
        ["--tp", 4, "--sp", "--dp", 3, "--use-distributed-optimizer"],
    )
    diff = ("--diff", " ".join(map(str, layouts[1])))
    found = json.loads(run(*words, *layouts[0], *diff, "--json")[1])
    assert (found["first"], found["second"]) == (
        "TP2 x PP2 --micro-batch-size 2",
        "TP4 x SP x DP3 --micro-batch-size 1 --use-distributed-optimizer",
    )
    assert found["global_batch_size"] == 48
    figures = {one["name"]: one for one in found["figures"]}
    first, second = (
        own_figures(json.loads(run(*words, *layout, "--global-batch-size", 48, "--json")[1])) for layout in layouts
    )
    assert figures.pop("GPUs") == {"name": "GPUs", "unit": "count", "first": 4, "second": 12, "difference": 8}
    assert figures.keys() == first.keys() | second.keys()
    for name, figure in figures.items():
        own = first.get(name, 0), second.get(name, 0)
        assert (figure["first"], figure["second"]) == own, name
        assert figure["difference"] == own[1] - own[0], name


def test_a_page_has_both(run, schedule, llama, tmp_path):
    path = tmp_path / "page.html"
    words = ("show", "--model-schedule", schedule, "--hf-model", llama, "--pp", 2, "--diff", "auto")
    assert run(*words, "--html", path)[:2] == (0, f"wrote {path}\n")
    (text,) = re.findall(r'<section id="compared".*?</section>', path.read_text(), re.DOTALL)
    assert '<th scope="row">Pipeline bubble</th>' in text
    assert re.findall(r"<h3>Memory of a rank, (.*)</h3>", text) == [str(schedule), "auto"]


@pytest.mark.parametrize(
    ("diff", "words"),
    [
        ("--tp 4 --gpu h100-80gb", "No such option: --gpu"),
        ("--tp four", "Invalid value for '--tp'"),
        ("--tp 4 here", "unexpected extra argument(s) (here)"),
        ("--tp '4", "No closing quotation"),
    ],
)
def test_a_layout_is_described_by_its_own_flags(diff, words, run, schedule, llama):
    status, _, err = run("show", "--model-schedule", schedule, "--hf-model", llama, "--diff", diff)
    assert (status, words in err) == (2, True), err


@pytest.mark.parametrize(
    "argv",
    [
        ("--predicted-trace", "x.json"),
        ("--global-batch-size", 8),
        ("--trace", "x.json"),
        ("--trace", "x.json", "--html", "x", "--diff", "--tp 2"),
        ("--global-batch-size", 8, "--diff", "auto"),
        ("--html", "x", "--json"),
    ],
)
def test_options_that_need_others_say_so(argv, run, schedule, llama):
    status, _, err = run("show", "--model-schedule", schedule, "--hf-model", llama, *argv)
    assert (status, argv[0] in err) == (2, True)


def test_records_are_saved(run, schedule, llama, tmp_path):
    path = tmp_path / "records.json"
    assert run("show", "--model-schedule", schedule, "--hf-model", llama, "--records", path)[0] == 0
    records = load_records(path)
    assert len(records) == 2 + 4 * 7
    assert str(records[0]) == "model.embed_tokens: shard(param='weight', axis=0)"
    assert records[0].source == f"{schedule}:2"


def test_an_invalid_schedule_is_reported_in_full(run, schedule, llama):
    schedule.write_text(
        SCHEDULE + '    sch["model.norm"].shard("weight", axis=3)\n    sch["lm_head"].annotate("x", "k", 1)\n'
    )
    status, out, err = run("show", "--model-schedule", schedule, "--hf-model", llama, "--tp", 2)
    assert (status, out) == (1, "")
    assert err.startswith("megasched: error: the schedule has 2 problems")
    assert f"asked for at: {schedule}:11" in err
    assert f"asked for at: {schedule}:12" in err
    assert "Traceback" not in err


def test_the_traceback_is_there_when_asked_for(run, llama, monkeypatch):
    monkeypatch.setenv("MEGASCHED_TRACEBACK", "1")
    status, _, err = run("show", "--model-schedule", "nowhere.py", "--hf-model", llama)
    assert status == 1
    assert "Traceback" in err
    assert err.splitlines()[-1] == "megasched: error: --model-schedule nowhere.py: no such file"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cp", "2", "--seq-length", "62"], "--seq-length 62 is no multiple of 4: CP2 cuts each sequence into"),
        (["--tp", "2", "--sp", "--seq-length", "63"], "--seq-length 63 is no multiple of 2: TP2 x SP cuts"),
        (["--recompute-method", "block"], "--recompute-num-layers are for --recompute-granularity full"),
        (
            ["--diff", "--recompute-granularity selective --recompute-num-layers 2"],
            "--recompute-num-layers are for --recompute-granularity full",
        ),
        (["--recompute-granularity", "full", "--recompute-method", "block"], "belong together"),
        (["--ep", "2"], "--ep 2 does not divide the 1 ranks of a pipeline stage"),
        (["--dp", "2", "--diff", "--ep 2 --dp 3"], "--ep 2 does not divide the 3 ranks of a pipeline stage"),
        (["--tp", "0"], "tensor_model_parallel_size is 0"),
        (["--gpu", "h100"], "--gpu h100: known are a100-80gb"),
        (["--vp", "2"], "need pipeline_model_parallel_size"),
        (["--hf-override", "nonsense=1"], "no field 'nonsense'"),
        (["--html", "."], "--html .: it is a folder; the name of a file is due"),
        (["--gpu", "h100-80gb", "--predicted-trace", "absent/step"], "--predicted-trace absent/step: there is no"),
        (["--diff", "absent.py"], "--diff absent.py: no such file"),
        (["--diff", "tp 4"], "or flags of a layout, e.g. --diff ' --tp 4 --sp'"),
        (["--diff", ""], "--diff '': no such file"),
        (["--schedule-option", "a=1", "b=2"], "the schedule has no option a, b"),
        (
            ["--html", "absent/page.html"],
            "--html absent/page.html: there is no folder absent that can be written to",
        ),
        (
            ["--html", "x.html", "--global-batch-size", "3", "--dp", "2"],
            "--global-batch-size 3 is no multiple of 2",
        ),
    ],
)
def test_flags_that_can_not_be_used(argv, words, run, schedule, llama):
    status, _, err = run("show", "--model-schedule", schedule, "--hf-model", llama, *argv)
    assert status == 1
    assert words in err
