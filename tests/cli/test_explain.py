"""``megasched explain``: a decision for every parameter, folded over layers."""

import inspect
import json
import re

import pytest
from transformers.models.llama.modeling_llama import LlamaMLP

from megasched.cli.main import main
from megasched.cli.show.explain import explain_schedule
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.plan.decisions import Decision, fold_decisions, fold_paths
from megasched.printing.shell_command import shell_command
from tests import tiny


def decision(parameter, **changes):
    return Decision(**{**dict.fromkeys(Decision.__annotations__, ""), "parameter": parameter, **changes})


def printed(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_layers_that_are_decided_alike_are_one():
    found = fold_decisions(
        [decision(f"h.{index}.w", placement="whole" if index == 2 else "cut") for index in range(5)]
        + [decision("norm.w"), decision("h.0.experts.3.w")]
    )
    assert [(d.parameter, d.placement) for d in found] == [
        ("h.0-1,3-4.w", "cut"),
        ("h.2.w", "whole"),
        ("norm.w", ""),
        ("h.0.experts.3.w", ""),
    ]


def test_modules_of_ten_layers_and_more_are_in_the_order_of_numbers():
    assert fold_paths({f"h.{index}.attn" for index in range(12)} | {"norm"}) == ["h.0-11.attn", "norm"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_it_is_total(family, tmp_path):
    """No parameter without a decision: unfolded, there are as many as the definition has names."""
    from megasched.definition.build import build_definition, load_config

    folder = tiny.save(family, tmp_path)
    model = build_definition(load_config(folder))
    explanation = explain_schedule("auto", folder, ParallelDims(tensor_model_parallel_size=2))
    layers = model.config.num_hidden_layers
    count = sum(layers if "-" in d.parameter else 1 for d in explanation.decisions)
    assert count == len(dict(model.named_parameters(remove_duplicate=False)))
    assert all(d.decided_by and d.placement and d.gradient for d in explanation.decisions)


def test_what_it_says_of_qwen3(tmp_path):
    folder = tiny.save("qwen3", tmp_path)
    explanation = explain_schedule("auto", folder, ParallelDims(tensor_model_parallel_size=2))
    found = {d.parameter: d for d in explanation.decisions}
    q = found["model.layers.0-3.self_attn.q_proj.weight"]
    assert (q.shape, q.local_shape, q.placement) == ((64, 32), (32, 32), "cut along axis 0")
    assert q.decided_by == "HF's plan: layers.*.self_attn.q_proj is colwise".replace("layers", "model.layers")
    assert q.gradient == "of its part"
    norm = found["model.layers.0-3.self_attn.q_norm.weight"]
    assert (norm.placement, norm.gradient, norm.decided_by) == (
        "whole",
        "partial, summed over TP",
        "nothing asks for a cut",
    )
    assert found["lm_head.weight"].decided_by == "tied to model.embed_tokens.weight"


@pytest.mark.parametrize(("size", "words"), [(512, ""), (300, ", padded to 512")])
def test_only_what_is_padded_is_said_to_be(tmp_path, size, words):
    folder, layout = tiny.save("llama", tmp_path), ParallelDims(tensor_model_parallel_size=2)
    found = explain_schedule("auto", folder, layout, only="lm_head.weight", overrides=[f"vocab_size={size}"])
    assert [one.placement for one in found.decisions] == [f"cut along axis 0{words}"]


def test_the_users_own_lines_are_named(tmp_path):
    folder = tiny.save("llama", tmp_path)
    file = tmp_path / "mine.py"
    file.write_text('def schedule(sch, layout):\n    sch["lm_head"].shard("weight", axis=0)\n')
    explanation = explain_schedule(str(file), folder, ParallelDims(tensor_model_parallel_size=2))
    found = {d.parameter: d.decided_by for d in explanation.decisions}
    assert found["lm_head.weight"] == f"schedule, {file}:2"
    assert found["model.layers.0-3.self_attn.q_proj.weight"] == "nothing asks for a cut"


def test_why_an_output_is_gathered_is_said_with_the_line_of_the_code(tmp_path, capsys):
    folder = tiny.save("llama", tmp_path)
    file = tmp_path / "mine.py"
    file.write_text('def schedule(sch, layout):\n    sch["**.up_proj"].shard("weight", axis=0)\n')
    command = [
        "explain",
        "--model-schedule",
        str(file),
        "--hf-model",
        folder,
        "--tp",
        "2",
        "--parameter",
        "**.mlp.up_proj.weight",
    ]
    (decision,) = json.loads(printed(capsys, *command, "--json"))["decisions"]
    assert decision["parameter"] == "model.layers.0-3.mlp.up_proj.weight"
    code, first = inspect.getsourcelines(LlamaMLP.forward)
    line = first + next(number for number, text in enumerate(code) if "self.up_proj" in text)
    assert decision["gathered"] == f"aten.mul.Tensor (modeling_llama.py:{line}) needs the whole"
    assert f"its output is gathered: {decision['gathered']}" in " ".join(printed(capsys, *command).split())


@pytest.mark.parametrize(
    ("only", "told"),
    [
        ("lm_haed.weight", r"no parameter .* there is lm_head\.weight"),
        ("lm_head*", r"it matches none .* look like lm_head\.weight, .*model\.layers\.0-3\.[^ ]*weight"),
        ("mlp", "it matches none "),
    ],
)
def test_a_glob_without_a_match_names_what_there_is(tmp_path, only, told):
    folder = tiny.save("llama", tmp_path)
    with pytest.raises(ConfigError, match=rf"--parameter {re.escape(only)}: {told}"):
        explain_schedule("auto", folder, ParallelDims(tensor_model_parallel_size=2), only=only)


def test_the_command_prints_text_and_json(tmp_path, capsys):
    folder = tiny.save("llama", tmp_path)
    text = printed(capsys, "explain", "--hf-model", folder, "--tp", "2")
    assert "LlamaForCausalLM on TP2" in text
    assert "model.layers.0-3.mlp.down_proj.weight  [32, 48] → [32, 24]" in text
    data = json.loads(printed(capsys, "explain", "--hf-model", folder, "--tp", "2", "--json"))
    assert data["model"] == "LlamaForCausalLM"
    assert {"parameter", "decided_by", "gradient", "declined"} <= data["decisions"][0].keys()


def test_what_context_parallelism_does_is_told(tmp_path, capsys):
    from megasched.definition.small_models.small_models import small_config

    small_config("lfm2").save_pretrained(tmp_path)
    found = explain_schedule("auto", str(tmp_path), ParallelDims(context_parallel_size=2))
    assert found.context == (
        "each CP rank runs the definition on 2 of 4 pieces of a sequence",
        "queries meet the keys of all CP ranks: model.layers.1,3.self_attn",
        "run on whole sequences by each CP rank: model.layers.0,2.conv",
    )
    said = printed(
        capsys, "explain", "--model-schedule", "auto", "--hf-model", str(tmp_path), "--tp", "1", "--cp", "2"
    )
    assert "run on whole sequences by each CP rank: model.layers.0,2.conv" in said
    said = printed(capsys, "show", "--model-schedule", "auto", "--hf-model", str(tmp_path), "--cp", "2")
    assert "whole sequences, on each of 2 CP ranks" in said
    assert "queries of a CP rank, keys and values of all 2" in said


def test_options_that_were_not_checked_are_told(tmp_path, capsys):
    folder = tiny.save("llama", tmp_path, attention_bias=True)
    told = explain_schedule("auto", folder, ParallelDims())
    assert "attention_bias=True" in told.unchecked_options
    assert told.check == shell_command("verify", "--model-schedule", "auto", "--hf-model", folder)
    text = " ".join(printed(capsys, "explain", "--model-schedule", "auto", "--hf-model", folder).split())
    assert "not checked with these options: attention_bias=True" in text


def test_the_adapter_that_is_given_decides_and_goes_into_the_commands(tmp_path, capsys):
    folder = tiny.save("llama", tmp_path / "llama")
    file = tmp_path / "mine.py"
    file.write_text(
        "from megasched.model_adapters.registry import Adapter\n"
        'ADAPTER = Adapter(("llama",), roles={"*.mlp.up_proj": "mlp.up", "*.mlp.down_proj": "mlp.down"})\n'
    )
    words = ["--hf-model", folder, "--adapter", str(file)]
    out = printed(capsys, "explain", *words, "--json")
    decided = {one["parameter"]: one["decided_by"] for one in json.loads(out)["decisions"]}
    up = next(name for name in decided if name.endswith("mlp.up_proj.weight"))
    assert decided[up].startswith("adapter: *.mlp.up_proj is mlp.up")
    assert f"--adapter {file}" in json.loads(out)["check"]
    shown = json.loads(printed(capsys, "show", *words, "--tp", "2", "--json"))
    assert {record["call"].partition(":")[0].rpartition(".")[2] for record in shown["records"]} == {
        "up_proj",
        "down_proj",
    }
    sizes = ["--gpus", "1", "--seq-length", "64", "--global-batch-size", "1"]
    assert f"--adapter {file}" in printed(capsys, "plan", *words, *sizes, "--hf-override", "num_hidden_layers=2")


def test_what_is_wrong_with_an_adapter_is_one_error(tmp_path, capsys):
    folder = tiny.save("llama", tmp_path / "llama")
    file = tmp_path / "mine.py"
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--hf-model", folder, "--adapter", str(file)])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"megasched: error: --adapter {file}:1: the adapter file fails: ModuleNotFoundError: "
        "No module named 'nothing_of_this_name'\n"
    )
