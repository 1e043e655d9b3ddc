"""From an HF folder to a checkpoint and back: the same bits, whatever the family, the dtype and the layout."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megasched.cli.weights import print_exported, print_imported
from megasched.errors import CheckpointError, ConfigError
from megasched.json_output import print_json
from megasched.reading.tracker import RELEASE, TRACKER
from megasched.weights.exporting import export_weights, without_absent_layers
from megasched.weights.hf import files as hf_files
from megasched.weights.hf.files import config_of_export, copy_hf_files
from megasched.weights.importing import import_weights
from megasched.weights.inspection import inspect_checkpoint
from megasched.weights.lazy import whole
from megasched.weights.torch_dist.reader import TorchDist
from megasched.weights.torch_dist.writer import TorchDistWriter
from tests.weights.conftest import COMMON, tiny_config
from tests.weights.test_traced_functions import InMemory

GIGABYTE = 10**9


def quiet(total):
    return nullcontext(lambda count: None)


def stored(folder):
    """All tensors in the files of an HF folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_bits(folder, other):
    first, second = stored(folder), stored(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def export(load, output, **options):
    return export_weights(load, output, progress=quiet, **{"max_shard_size": GIGABYTE, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_import_and_export_keep_every_bit(config, trained, tmp_path, dtype):
    trained(config, dtype).save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    imported = import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet)
    exported = export(tmp_path / "ckpt", tmp_path / "back", max_shard_size=40_000)
    assert_same_bits(tmp_path / "hf", tmp_path / "back")
    size = sum(value.nbytes for value in stored(tmp_path / "hf").values())
    assert exported.bytes == imported.bytes == size
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "torch."
    )
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(told.values()), told


SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4}
OTHERS = {
    "masked_lm": ("AutoModelForMaskedLM", "bert", SMALL),
    "seq2seq_lm": (
        "AutoModelForSeq2SeqLM",
        "t5",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    ),
    "image_classification": (
        "AutoModelForImageClassification",
        "vit",
        SMALL | {"image_size": 32, "patch_size": 16},
    ),
}


@pytest.mark.parametrize("objective", OTHERS)
def test_models_of_other_objectives(tmp_path, objective):
    auto_class, family, sizes = OTHERS[objective]
    auto_class = getattr(transformers, auto_class)
    model = auto_class.from_config(transformers.AutoConfig.for_model(family, **sizes))
    model.save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet, objective=objective)
    export(tmp_path / "ckpt", tmp_path / "back", objective=objective)
    assert_same_bits(tmp_path / "hf", tmp_path / "back")
    found, told = auto_class.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(told.values()), told
    assert type(found) is type(model)


def test_what_lies_beside_the_weights_comes_along(tiny, trained, tmp_path):
    hf = tmp_path / "hf"
    trained(tiny("llama")).save_pretrained(hf)
    beside = {"tokenizer.json", "chat_template.jinja", "merges.txt", "tekken.json", "LICENSE", "modeling_own.py"}
    beside |= {"additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "voices/v2/first.npy"}
    weights = {"training_args.bin", "model.safetensors.index.json", "original/params.json", "original/one.pth"}
    other = {
        "README.md",
        ".gitattributes",
        ".cache/huggingface/x.json",
        "hf_quant_config.json",
        "__pycache__/a.pyc",
    }
    for name in beside | weights | other:
        (hf / name).parent.mkdir(parents=True, exist_ok=True)
        (hf / name).write_text(name)
    import_weights(hf, tmp_path / "ckpt", progress=quiet)
    shutil.rmtree(hf)
    export(tmp_path / "ckpt", tmp_path / "back")
    files = [path for path in (tmp_path / "back").rglob("*") if path.is_file()]
    found = {str(path.relative_to(tmp_path / "back")) for path in files}
    assert found == beside | {"config.json", "generation_config.json", "model.safetensors"}
    assert (tmp_path / "back" / "voices/v2/first.npy").read_text() == "voices/v2/first.npy"
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_omni"])
def test_configs_in_the_config_have_the_dtype_of_the_weights(family):
    config = transformers.AutoConfig.for_model(family, dtype="bfloat16")
    parts = list(hf_files.with_nested(config))
    assert len(parts) >= 3
    for part in parts:
        part.dtype, part.quantization_config = torch.bfloat16, {"quant_method": "fp8"}
    written = json.loads(config_of_export(config, "Any", torch.float32).to_json_string(use_diff=False))
    assert written["architectures"] == ["Any"]
    for part in configs_in(written):
        assert part["dtype"] == "float32"
        assert "quantization_config" not in part


def configs_in(config):
    """A config as a dictionary, and those in it."""
    yield config
    for value in config.values():
        if isinstance(value, dict) and "model_type" in value:
            yield from configs_in(value)


def test_layers_for_later_tokens_that_the_class_leaves_aside_are_told_and_not_counted(tmp_path, trained):
    sizes = {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1}
    config = transformers.AutoConfig.for_model("glm4_moe", **COMMON, **sizes)
    trained(config).save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    later = {f"model.layers.46.{name}.weight" for name in ("eh_proj", "enorm", "mlp.experts.0.gate_proj", "hnorm")}
    weights |= {name: torch.ones(2, 2) for name in later}
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    imported = import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet)
    assert set(imported.passed_over) == later
    exported = export(tmp_path / "ckpt", tmp_path / "back")
    assert exported.absent == ("num_nextn_predict_layers = 1",)
    assert stored(tmp_path / "back").keys() == weights.keys() - later
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    print_imported(imported, console := Console(file=StringIO(), width=200))
    print_exported(exported, console)
    said = console.file.getvalue()
    assert "not taken, as Glm4MoeForCausalLM does not take them: model.layers.46." in said
    assert " and 1 more; no checkpoint of a run has them, and no export" in said
    assert "num_nextn_predict_layers = 1 in the config is 0 in the exported one: Glm4MoeForCausalLM has no" in said
    assert f'\nGlm4MoeForCausalLM.from_pretrained("{tmp_path / "back"}") loads it\n' in said
    print_exported(replace(exported, auto_class="AutoModelForCausalLM"), console)
    line = f'\nAutoModelForCausalLM.from_pretrained("{tmp_path / "back"}", trust_remote_code=True) loads it\n'
    assert line in console.file.getvalue()


def test_counts_of_layers_that_the_class_has_stay():
    """A definition of someone's own may have them, under the same name."""
    config = tiny_config("llama", num_nextn_predict_layers=2)

    def build(config):
        return torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(config.num_nextn_predict_layers))

    assert without_absent_layers(config, build(config), build) == (config, ())


def test_a_checkpoint_inside_of_the_models_folder_does_not_copy_itself(tmp_path):
    (tmp_path / "saved" / "logs").mkdir(parents=True)
    (tmp_path / "saved" / "logs" / "first.txt").touch()
    (tmp_path / "vocab.txt").touch()
    target = tmp_path / "saved" / "iter_0000001" / "hf_model"
    target.mkdir(parents=True)
    copy_hf_files(tmp_path, target)
    assert [path.name for path in target.iterdir()] == ["vocab.txt"]


def test_beside_a_config_alone_no_folder_is_looked_into(tmp_path):
    (tmp_path / "hf" / "more").mkdir(parents=True)
    for name in ("config.json", "vocab.txt", "more/vocab.txt"):
        (tmp_path / "hf" / name).touch()
    (tmp_path / "copied").mkdir()
    copy_hf_files(tmp_path / "hf" / "config.json", tmp_path / "copied")
    assert [path.name for path in (tmp_path / "copied").rglob("*")] == ["vocab.txt"]


def test_parameters_are_cast_and_what_transformers_keeps_in_float32_is_not(tiny, trained, tmp_path):
    model = trained(tiny("deepseek_v3"))
    model.save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet, dtype=torch.bfloat16)
    assert {group.dtype for group in inspect_checkpoint(tmp_path / "ckpt").tensors} == {"bfloat16", "float32"}
    export(tmp_path / "ckpt", tmp_path / "back", dtype=torch.float16)
    before, after = stored(tmp_path / "hf"), stored(tmp_path / "back")
    kept = {f"model.layers.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")}
    assert {name for name, value in after.items() if value.dtype == torch.float32} == kept
    for name, value in before.items():
        expected = value if name in kept else value.bfloat16().half()
        assert torch.equal(after[name], expected), name


def test_imported_weights_are_inspected(tiny, trained, tmp_path):
    trained(tiny("mixtral")).save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet)
    found = inspect_checkpoint(tmp_path / "ckpt")
    assert (found.folder, found.iteration, found.layout) == (tmp_path / "ckpt" / RELEASE, 0, {})
    assert (found.model_type, found.optimizer, found.problems) == ("mixtral", {}, [])
    experts = next(group for group in found.tensors if group.name.endswith("experts.gate_up_proj"))
    assert (experts.name, experts.count) == ("model.layers.*.mlp.experts.gate_up_proj", 2)
    assert experts.shape == (16, 128, 32)
    assert found.bytes == sum(value.nbytes for value in stored(tmp_path / "hf").values())
    print_json(asdict(found))


@pytest.fixture
def checkpoint(tiny, trained, tmp_path):
    """Of a tiny llama."""
    trained(tiny("llama")).save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet)
    return tmp_path / "ckpt"


def rewritten(checkpoint, change, **common):
    """The checkpoint with other tensors, and more in its common state."""
    model = TorchDist(checkpoint / RELEASE).model
    held = {key: tensor.read(whole(tensor.shape)) for key, tensor in model.items()}
    beside = checkpoint / RELEASE / "hf_model"
    files = {path.name: path.read_bytes() for path in beside.iterdir()}
    shutil.rmtree(checkpoint / RELEASE)
    beside.mkdir(parents=True)
    for name, content in files.items():
        (beside / name).write_bytes(content)
    writer = TorchDistWriter(checkpoint / RELEASE, lambda count: None)
    for key, value in change(held).items():
        writer.add(key, InMemory(value, []), value.dtype)
    writer.finish({"iteration": 0, **common})


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def test_names_that_do_not_fit_are_listed_and_nothing_is_written(checkpoint, tmp_path):
    def change(held):
        del held[NORM]
        return held | {"model.extra.weight": torch.zeros(2), "model.layers.7.bias": torch.zeros(2)}

    rewritten(checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        export(checkpoint, tmp_path / "back")
    assert f"missing (1):\n    {NORM}\n" in str(caught.value)
    assert "unexpected (2):\n    model.extra.weight\n    model.layers.7.bias\n" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]


def test_shapes_that_do_not_fit_are_listed(checkpoint, tmp_path):
    rewritten(checkpoint, lambda held: held | {UP: torch.zeros(60, 32), NORM: torch.zeros(33)})
    with pytest.raises(CheckpointError) as caught:
        export(checkpoint, tmp_path / "back")
    assert f"    {UP}: [60, 32], the config makes it [64, 32]" in str(caught.value)
    assert f"    {NORM}: [33], the config makes it [32]" in str(caught.value)


def test_a_padded_vocabulary_is_cut(checkpoint, tmp_path):
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    args = Namespace(make_vocab_size_divisible_by=64, tensor_model_parallel_size=2)
    rewritten(
        checkpoint, lambda held: held | {n: torch.cat([held[n], torch.zeros(32, 32)]) for n in ends}, args=args
    )
    export(checkpoint, tmp_path / "back")
    assert_same_bits(tmp_path / "hf", tmp_path / "back")


def test_what_is_there_is_left_alone(checkpoint, tmp_path):
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "precious").write_text("")
    with pytest.raises(ConfigError, match="back: there is something already"):
        export(checkpoint, tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["precious"]
    with pytest.raises(ConfigError, match=f"ckpt: it has checkpoints already .{TRACKER}."):
        import_weights(tmp_path / "hf", checkpoint, progress=quiet)


def test_an_empty_folder_is_filled_by_whatever_name(checkpoint, tmp_path, monkeypatch):
    for name in ("linked", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("linked")
    export(checkpoint, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same_bits(tmp_path / "hf", tmp_path / "linked")
    monkeypatch.chdir(tmp_path / "here")
    export(checkpoint, Path())
    assert_same_bits(tmp_path / "hf", tmp_path / "here")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_mount_is_refused_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    """No rename replaces it, which was told when all was written."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"disk: a file system is mounted there, .*; name a folder in it"):
        export_weights(
            checkpoint, tmp_path / "disk", progress=lambda size: pytest.fail("written"), max_shard_size=1
        )


def test_a_folder_that_does_not_fit_its_config_is_not_imported(tiny, trained, tmp_path):
    trained(tiny("llama")).save_pretrained(tmp_path / "hf")
    save_file(stored(tmp_path / "hf") | {UP: torch.zeros(60, 32)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {UP} has shape \[60, 32\], the definition has \[64, 32\]"):
        import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet)
    assert not (tmp_path / "ckpt").exists()


def test_a_checkpoint_without_a_config_asks_for_one(checkpoint, tmp_path):
    shutil.rmtree(checkpoint / RELEASE / "hf_model")
    with pytest.raises(ConfigError, match="no HF config was kept in it; name its HF folder with --hf-model"):
        export(checkpoint, tmp_path / "back")
    export(checkpoint, tmp_path / "back", hf_model=tmp_path / "hf")
    assert_same_bits(tmp_path / "hf", tmp_path / "back")


def test_a_buffer_that_the_folder_lacks_is_what_the_class_makes_it(tiny, trained, tmp_path):
    """As in a run that starts from the folder; BART's older folders lack one."""
    given = trained(tiny("deepseek_v3")).state_dict()
    trained(tiny("deepseek_v3")).save_pretrained(tmp_path / "hf")
    bias = next(name for name in given if name.endswith("e_score_correction_bias"))
    less = {name: value for name, value in stored(tmp_path / "hf").items() if name != bias}
    save_file(less, tmp_path / "hf" / "model.safetensors")
    imported = import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet, dtype=torch.bfloat16)
    held = TorchDist(imported.checkpoint / RELEASE).model[bias]
    assert torch.equal(held.read(whole(held.shape)), torch.zeros(16))
    export(imported.checkpoint, tmp_path / "back")
    assert stored(tmp_path / "back").keys() == {*less, bias}


def test_a_value_that_a_dtype_does_not_hold_is_named(checkpoint, tmp_path):
    """It was written as infinity."""
    held = stored(tmp_path / "hf")
    held[NORM][3] = 1e5
    save_file(held, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    why = f"{NORM} has 100000 in it, and the largest value of float16 is 65504: choose another dtype"
    with pytest.raises(CheckpointError, match=why):
        import_weights(tmp_path / "hf", tmp_path / "half", progress=quiet, dtype=torch.float16)
    import_weights(tmp_path / "hf", tmp_path / "whole", progress=quiet)
    with pytest.raises(CheckpointError, match=why):
        export(tmp_path / "whole", tmp_path / "back", dtype=torch.float16)
    assert not (tmp_path / "back").exists()
    export(tmp_path / "whole", tmp_path / "back", dtype=torch.bfloat16)


def test_import_in_another_dtype_keeps_what_transformers_keeps(tmp_path):
    from megasched.definition.small_models.small_models import small_config

    AutoModelForCausalLM.from_config(small_config("ernie4_5_moe"), dtype=torch.float32).save_pretrained(
        tmp_path / "hf"
    )
    imported = import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).state_dict()
    found = TorchDist(imported.checkpoint / RELEASE).model
    assert {tensor.dtype for tensor in found.values()} == {torch.float32, torch.bfloat16}
    for name, tensor in found.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.read(whole(tensor.shape)), theirs[name]), name
