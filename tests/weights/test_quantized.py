"""Folders in 8 and 4 bits: the values are those that transformers makes of them, whatever part is read."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megasched.definition.build import build_definition, load_config
from megasched.errors import CheckpointError
from megasched.plan.placement import Placement
from megasched.weights.exporting import export_weights
from megasched.weights.hf.folder import HFFolder
from megasched.weights.hf.quantized import Fp8, Mxfp4
from megasched.weights.importing import import_weights
from megasched.weights.lazy import whole
from tests.weights.test_traced_functions import InMemory

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 16]}
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize(weight, rows, columns):
    """8-bit floats and a scale for each block, the last blocks smaller."""
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[place].abs().max() / LARGEST
            stored[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def write_quantized(folder, model_type, **changes):
    """A folder as DeepSeek-V3's is published: linears of layers in 8 bits, the rest in bf16."""
    from megasched.definition.small_models.small_models import small_config

    config = small_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, value in list(tensors.items()):
        if name.endswith("_proj.weight") or name.endswith("_proj_with_mqa.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(value.float(), *FP8["weight_block_size"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return tensors


def source_of(folder):
    return HFFolder(folder, build_definition(load_config(folder)))


def dense(tensors, name):
    """A stored weight with its scales, value by value."""
    weight, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
    rows, columns = FP8["weight_block_size"]
    factor = scale[torch.arange(weight.shape[0]) // rows][:, torch.arange(weight.shape[1]) // columns]
    return (weight * factor).to(torch.bfloat16)


@given(st.data())
def test_any_part_of_8_bits_is_that_part_of_the_whole(data):
    rows, columns, a, b = (data.draw(st.integers(1, 12)) for _ in range(4))
    stored, scale = quantize(torch.randn(rows, columns), a, b)
    lazy = Fp8(InMemory(stored, []), InMemory(scale, []), (a, b))
    wanted = dense_of(stored, scale, a, b)
    assert torch.equal(lazy.read(whole(lazy.shape)), wanted)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (rows, columns)]
    if all(start < stop for start, stop in ends):
        (i, j), (k, m) = ends
        assert torch.equal(lazy.read(((i, j), (k, m))), wanted[i:j, k:m])


def dense_of(stored, scale, rows, columns):
    factor = scale[torch.arange(stored.shape[0]) // rows][:, torch.arange(stored.shape[1]) // columns]
    return (stored.float() * factor).to(torch.bfloat16)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_8_bits_are_what_transformers_makes_of_them(scale_dtype):
    weight = torch.randn(16, 48).to(torch.float8_e4m3fn)
    if scale_dtype == torch.uint8:
        scale = torch.randint(120, 134, (2, 3), dtype=torch.uint8)
    else:
        scale = (2.0 ** torch.arange(-3, 3)).reshape(2, 3).to(scale_dtype)
    lazy = Fp8(InMemory(weight, []), InMemory(scale, []), (8, 16))
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(lazy.read(whole(lazy.shape)), wanted)


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 2, 1), (3, 2, 5)])
def test_blocks_that_the_config_does_not_name_follow_from_the_scales(shape):
    """As of experts that are stored in one tensor."""
    weight, scale = torch.randn(3, 6, 10).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    lazy = Fp8(InMemory(weight, []), InMemory(scale, []), None)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(lazy.read(whole(lazy.shape)), wanted)
    assert torch.equal(lazy.read(((1, 3), (2, 5), (0, 7))), wanted[1:3, 2:5, :7])
    with pytest.raises(CheckpointError, match="not one scale for each of the equal blocks"):
        Fp8(InMemory(weight, []), InMemory(scale[..., :1].expand(3, shape[1], 3), []), None).read(
            whole((3, 6, 10))
        )


def test_a_byte_that_is_no_number_is_refused_in_4_bits():
    packed = torch.zeros(2, 3, 1, 16, dtype=torch.uint8)
    scales = torch.full((2, 3, 1), 127, dtype=torch.uint8)
    lazy = Mxfp4(InMemory(packed, []), InMemory(scales, []))
    assert not lazy.read(whole(lazy.shape)).any()
    scales[1, 2, 0] = 255
    with pytest.raises(CheckpointError, match=r"has a scale that is no number \(byte 255\)"):
        lazy.read(whole(lazy.shape))


def test_one_scale_for_all():
    weight = torch.randn(6, 10).to(torch.float8_e4m3fn)
    for scale in (torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.25]])):
        lazy = Fp8(InMemory(weight, []), InMemory(scale, []), None)
        assert torch.equal(lazy.read(((2, 5), (1, 4))), (weight.float() / 4).bfloat16()[2:5, 1:4])


@pytest.mark.parametrize("box", [((0, 3), (0, 5), (0, 64)), ((1, 2), (2, 4), (7, 50)), ((0, 3), (4, 5), (32, 33))])
def test_4_bits_are_what_transformers_makes_of_them(box):
    packed = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 5, 2), dtype=torch.uint8)
    lazy = Mxfp4(InMemory(packed, []), InMemory(scales, []))
    wanted = convert_moe_packed_tensors(packed, scales).transpose(1, 2)
    assert lazy.shape == tuple(wanted.shape)
    assert torch.equal(lazy.read(box), wanted[tuple(slice(*ends) for ends in box)])


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_a_folder_in_8_bits_is_imported_as_transformers_loads_it(tmp_path, model_type):
    """Experts of DeepSeek-V3 are stored one by one, and are one tensor in the definition."""
    tensors = write_quantized(tmp_path / "hf", model_type)
    import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet)
    export_weights(tmp_path / "ckpt", tmp_path / "back", max_shard_size=10**9, progress=quiet)
    found = load_file(tmp_path / "back" / "model.safetensors")
    quantized = {name for name in tensors if f"{name}_scale_inv" in tensors}
    assert len(quantized) > 20
    assert found.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name, value in found.items():
        assert torch.equal(value, dense(tensors, name) if name in quantized else tensors[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    for name, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_static_scales_of_activations_are_left_out(tmp_path, scale_dtype):
    """One scale for a weight and one for what it is multiplied with, in float32 or as exponents."""
    tensors = write_quantized(tmp_path, "qwen3")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = torch.tensor(0.25).to(scale_dtype)
        tensors[name.replace("weight_scale_inv", "activation_scale")] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {**FP8, "weight_block_size": None, "activation_scheme": "static"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = source_of(tmp_path)
    definition = build_definition(load_config(tmp_path))
    source.check({name for name, _ in definition.named_parameters()})
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    found = source.local(Placement(name, tuple(tensors[name].shape)), 0, 1)
    assert torch.equal(found, (tensors[name].float() / 4).bfloat16())


def test_nothing_says_that_what_is_exported_is_quantized(tmp_path):
    """Where the decoder has a config of its own, transformers copies this into it."""
    write_quantized(tmp_path / "hf", "qwen3_5")
    import_weights(tmp_path / "hf", tmp_path / "ckpt", progress=quiet)
    export_weights(tmp_path / "ckpt", tmp_path / "back", max_shard_size=10**9, progress=quiet)
    assert "quantization" not in (tmp_path / "back" / "config.json").read_text()


def quiet(total):
    return nullcontext(lambda count: None)


def test_a_rank_has_its_part_of_a_folder_in_4_bits(tmp_path):
    config = AutoConfig.for_model(
        "gpt_oss",
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=96,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    wanted = {}
    for each in (name, name.replace("gate_up", "down")):
        experts, inputs, outputs = tensors.pop(each).shape
        packed = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{each}_blocks": packed, f"{each}_scales": scales}
        wanted[each] = convert_moe_packed_tensors(packed, scales)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (tmp_path / "config.json").write_text(json.dumps(written))
    source = source_of(tmp_path)
    source.check(set(dict(model.named_parameters())))
    for each, value in wanted.items():
        assert torch.equal(source.local(Placement(each, tuple(value.shape)), 0, 1), value)
        half = source.local(Placement(each, tuple(value.shape), axis=0), 1, 2)
        assert torch.equal(half, value[2:])


def test_what_is_not_right_is_refused(tmp_path):
    tensors = write_quantized(tmp_path, "qwen3")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    shape = tuple(tensors[name].shape)

    def refused(changed, message):
        kept = {key: value for key, value in {**tensors, **changed}.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            source_of(tmp_path).local(Placement(name, shape), 0, 1)

    refused({f"{name}_scale_inv": None}, rf"{name} is in torch.float8_e4m3fn, and has no scale {name}_scale_inv$")
    other = name.removesuffix("weight") + "qscale_weight"
    renamed = {f"{name}_scale_inv": None, other: tensors[f"{name}_scale_inv"]}
    refused(renamed, rf"has no scale {name}_scale_inv; there is {other}$")
    refused(
        {f"{name}_scale_inv": torch.ones(2, 2)}, rf"{name}_scale_inv has shape \[2, 2\], which is not one scale"
    )
    no_number = torch.full(tensors[f"{name}_scale_inv"].shape, 255, dtype=torch.uint8)
    refused({f"{name}_scale_inv": no_number}, rf"{name}_scale_inv has a scale that is no number")
    refused({name: torch.zeros(shape, dtype=torch.int8)}, rf"{name} has scales and is in torch.int8")
    nan = tensors[f"{name}_scale_inv"].clone()
    nan[0, 0] = float("nan")
    refused({f"{name}_scale_inv": nan}, rf"{name}_scale_inv has NaN in it")


def test_another_way_to_quantize_is_refused(tmp_path):
    write_quantized(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quant_method gptq; fp8 and mxfp4 are read"):
        source_of(tmp_path)
