"""HFFolder against what save_pretrained writes, and against weights that do not fit the definition."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from megasched.definition.build import build_definition
from megasched.errors import CheckpointError
from megasched.plan.placement import Placement
from megasched.weights.hf.folder import HFFolder
from megasched.weights.source import canonical_names, materialize

NAME = "model.layers.0.mlp.up_proj.weight"


def placements(full, name):
    """Whole, and cut along each axis: plain, packed, padded, transposed."""
    shape = tuple(full.shape)
    found = [Placement(name, shape)]
    for axis, length in enumerate(shape):
        found.append(Placement(name, shape, axis=axis))
        found.append(Placement(name, shape, axis=axis, components=(length // 2, length // 4, length // 4)))
        found.append(Placement(name, shape, axis=axis, padded=2 * length + 4))
        if len(shape) == 2:
            found.append(Placement(name, shape, axis=axis, transposed=True))
    return found


def assert_reads(source, model):
    params = dict(model.named_parameters())
    source.check(set(params))
    for name, full in params.items():
        for placement in placements(full, name):
            for rank in range(2 if placement.sharded else 1):
                size = 2 if placement.sharded else 1
                got = source.local(placement, rank, size)
                assert got.dtype == full.dtype
                assert tuple(got.shape) == placement.local_shape(size)
                assert torch.equal(got, placement.shard(full.detach(), rank, size)), placement


def rewrite(folder, change):
    """Replaces the tensors of a single-file folder by what ``change`` makes of them."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def llama(tiny, trained, tmp_path):
    """A saved tiny llama: (folder, definition, model)."""
    model = trained(tiny("llama"))
    model.save_pretrained(tmp_path)
    return tmp_path, build_definition(tiny("llama")), model


def test_round_trip(config, definition, trained, tmp_path):
    model = trained(config)
    model.save_pretrained(tmp_path)
    assert_reads(HFFolder(tmp_path, definition), model)


def test_round_trip_in_shards_and_bfloat16(config, definition, trained, tmp_path):
    model = trained(config, torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_reads(HFFolder(tmp_path, definition), model)


def test_a_folder_of_the_base_model(config, definition, trained, tmp_path):
    model = trained(config)
    model.base_model.save_pretrained(tmp_path)
    assert f"{model.base_model_prefix}." not in " ".join(load_file(tmp_path / "model.safetensors"))
    source = HFFolder(tmp_path, definition)
    names = set(canonical_names(definition).values())
    if config.tie_word_embeddings:
        assert_reads(source, model)
    else:
        with pytest.raises(CheckpointError, match=r"missing \(1\):\s+lm_head\.weight"):
            source.check(names)


def test_a_folder_with_a_head_read_by_the_base_model(config, trained, tmp_path):
    from megasched.definition.build import init_empty_weights

    model = trained(config)
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        base = AutoModel.from_config(config)
    source = HFFolder(tmp_path, base)
    for name, full in model.base_model.named_parameters():
        assert torch.equal(source.local(Placement(name, tuple(full.shape)), 0, 1), full), name
    if not config.tie_word_embeddings:
        with pytest.raises(CheckpointError, match=r"unexpected \(1\):"):
            source.check({name for name, _ in base.named_parameters()})


@pytest.mark.parametrize("stored", [["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]])
def test_a_tie_may_be_stored_under_any_of_its_names(tiny, trained, tmp_path, stored):
    model = trained(tiny("qwen2"))
    model.save_pretrained(tmp_path)

    def change(tensors):
        value = tensors.pop("model.embed_tokens.weight")
        return tensors | {name: value.clone() for name in stored}

    rewrite(tmp_path, change)
    assert_reads(HFFolder(tmp_path, build_definition(tiny("qwen2"))), model)


def test_a_tie_stored_twice_with_different_values_is_an_error(tiny, trained, tmp_path):
    trained(tiny("qwen2")).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    source = HFFolder(tmp_path, build_definition(tiny("qwen2")))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings=false"):
        source.local(Placement("model.embed_tokens.weight", (96, 32)), 0, 1)


def test_only_the_ranges_of_the_rank_are_read(llama, monkeypatch):
    import safetensors

    asked = []

    class Part:
        def __init__(self, part):
            self.part = part

        def __getattr__(self, name):
            return getattr(self.part, name)

        def __getitem__(self, index):
            asked.append(index)
            return self.part[index]

    class File:
        def __init__(self, *args, **kwargs):
            self.opened = real(*args, **kwargs)

        def __enter__(self):
            self.file = self.opened.__enter__()
            return self

        def __exit__(self, *exception):
            return self.opened.__exit__(*exception)

        def keys(self):
            return self.file.keys()

        def get_slice(self, key):
            return Part(self.file.get_slice(key))

    folder, definition, model = llama
    source = HFFolder(folder, definition)
    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", File)
    full = model.get_parameter(NAME).detach()
    packed = Placement(NAME, (64, 32), axis=0, components=(32, 32))
    assert torch.equal(source.local(packed, 1, 4), torch.cat([full[8:16], full[40:48]]))
    assert torch.equal(source.local(Placement(NAME, (64, 32), axis=1), 3, 4), full[:, 24:32])
    everything = slice(None)
    assert asked == [(slice(8, 16),), (slice(40, 48),), (everything, slice(24, 32))]


def test_files_are_closed_and_values_outlive_them(llama):
    folder, definition, model = llama
    source = HFFolder(folder, definition)
    held = [source.local(p, 0, 1) for p in (Placement(NAME, (64, 32)), Placement(NAME, (64, 32), axis=0))]
    path = str(folder / "model.safetensors")
    descriptors = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps:
        assert path not in maps.read()
    assert path not in descriptors
    (folder / "model.safetensors").write_bytes(b"\0" * os.path.getsize(path))
    assert all(torch.equal(value, model.get_parameter(NAME)) for value in held)


def test_names_left_over_on_both_sides_are_listed(llama):
    folder, definition, _ = llama

    def change(tensors):
        up = tensors.pop(NAME)
        del tensors["model.norm.weight"]
        return tensors | {"model.layers.0.mlp.extra.weight": up, "adapter.bias": torch.zeros(2)}

    rewrite(folder, change)
    source = HFFolder(folder, definition)
    with pytest.raises(CheckpointError) as caught:
        source.check(set(canonical_names(definition).values()))
    text = str(caught.value)
    assert str(folder) in text
    assert f"missing (2):\n    {NAME}\n    model.norm.weight\n" in text
    assert "unexpected (2):\n    adapter.bias\n    model.layers.0.mlp.extra.weight\n" in text
    with pytest.raises(CheckpointError, match=f"no tensor for the parameter {NAME}"):
        source.local(Placement(NAME, (64, 32)), 0, 1)


def test_wrong_shape_names_file_and_tensor(llama):
    folder, definition, _ = llama
    rewrite(folder, lambda tensors: tensors | {NAME: torch.zeros(48, 32)})
    source = HFFolder(folder, definition)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {NAME} .*\[48, 32\].*\[64, 32\]"):
        source.local(Placement(NAME, (64, 32), axis=0), 0, 2)


def test_buffers_that_older_releases_saved_are_passed_over(tiny, trained, tmp_path):
    cases = {
        "gpt2": "transformer.h.0.attn.bias",
        "gpt_neox": "gpt_neox.layers.0.attention.masked_bias",
        "llama": "model.layers.0.self_attn.rotary_emb.inv_freq",
    }
    for family, extra in cases.items():
        model = trained(tiny(family))
        model.save_pretrained(tmp_path / family)
        rewrite(tmp_path / family, lambda tensors, extra=extra: tensors | {extra: torch.zeros(4)})
        assert_reads(HFFolder(tmp_path / family, build_definition(tiny(family))), model)


def test_names_of_older_layouts_are_renamed_as_transformers_does(tiny, trained, tmp_path):
    model = trained(tiny("gpt_neox"))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed_out.weight" in stored
    assert "lm_head.weight" not in stored
    source = HFFolder(tmp_path, build_definition(tiny("gpt_neox")))
    assert torch.equal(source.local(Placement("lm_head.weight", (96, 32)), 0, 1), stored["embed_out.weight"])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("original", [True, False])
def test_experts_that_are_stored_one_by_one_or_merged(tiny, trained, tmp_path, family, original):
    """As their authors wrote them (experts in files of their own, sixteen of them: order is by number) and as the
    definition has them."""
    config = tiny(family)
    model = trained(config)
    model.save_pretrained(tmp_path, save_original_format=original, max_shard_size="12KB")
    names = list(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"])
    assert any(".experts.15." in name for name in names) is original
    assert_reads(HFFolder(tmp_path, build_definition(config)), model)


def test_only_the_experts_of_the_rank_are_read(tiny, trained, tmp_path, monkeypatch):
    from megasched.weights import lazy

    model = trained(tiny("mixtral"))
    model.save_pretrained(tmp_path)
    source = HFFolder(tmp_path, build_definition(tiny("mixtral")))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    full = model.get_parameter(name).detach()
    read = {}
    whole_read = lazy.Stored.read

    def counted(self, box):
        value = whole_read(self, box)
        read[self.key] = read.get(self.key, 0) + value.numel()
        return value

    monkeypatch.setattr(lazy.Stored, "read", counted)
    experts = Placement(name, tuple(full.shape), axis=0, group="ep")
    assert torch.equal(source.local(experts, 1, 4), full[4:8])
    kept = "model.layers.0.block_sparse_moe.experts.{}.w{}.weight"
    assert read == {kept.format(expert, which): 64 * 32 for expert in (4, 5, 6, 7) for which in (1, 3)}
    read.clear()
    half = Placement(name, tuple(full.shape), axis=1, components=(64, 64))
    assert torch.equal(source.local(half, 1, 2), torch.cat([full[:, 32:64], full[:, 96:128]], dim=1))
    assert sum(read.values()) == full.numel() // 2


def test_experts_left_out_or_added_are_named(tiny, trained, tmp_path):
    config = tiny("mixtral")
    trained(config).save_pretrained(tmp_path)
    kept = "model.layers.1.block_sparse_moe.experts.{}.w{}.weight"
    gone, added = kept.format(5, 3), kept.format(16, 2)

    def change(tensors):
        del tensors[gone]
        return tensors | {added: torch.zeros(32, 64)}

    rewrite(tmp_path, change)
    definition = build_definition(config)
    with pytest.raises(CheckpointError) as caught:
        HFFolder(tmp_path, definition).check(set(canonical_names(definition).values()))
    assert f"missing (1):\n    {gone}\n" in str(caught.value)
    assert f"unexpected (1):\n    {added}\n" in str(caught.value)


def test_an_expert_of_another_shape_is_named(tiny, trained, tmp_path):
    config = tiny("mixtral")
    trained(config).save_pretrained(tmp_path)
    other = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
    rewrite(tmp_path, lambda tensors: tensors | {other: torch.zeros(32, 60)})
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(CheckpointError, match=rf"tensor {other} has shape \[32, 60\]; .* has \[32, 64\]: "):
        HFFolder(tmp_path, build_definition(config)).local(Placement(name, (16, 32, 64)), 0, 1)


def test_a_conversion_without_boxes_is_transformers_own(tiny, trained, tmp_path, monkeypatch):
    from megasched.weights.traced_functions import _Notes

    model = trained(tiny("qwen3_moe"))
    model.save_pretrained(tmp_path)
    monkeypatch.delattr(_Notes, "_stack")
    assert_reads(HFFolder(tmp_path, build_definition(tiny("qwen3_moe"))), model)


def test_nan_is_refused_with_file_and_tensor(llama):
    folder, definition, _ = llama

    def change(tensors):
        tensors[NAME][63, 31] = float("nan")
        return tensors

    rewrite(folder, change)
    source = HFFolder(folder, definition)
    source.local(Placement(NAME, (64, 32), axis=0), 0, 2)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {NAME} has NaN in it"):
        source.local(Placement(NAME, (64, 32), axis=0), 1, 2)


def test_persistent_buffers_are_read_and_filled(llama):
    folder, definition, _ = llama
    rewrite(folder, lambda tensors: tensors | {"model.balance": torch.arange(4.0)})
    definition.model.register_buffer("balance", torch.zeros(4))
    definition.model.register_buffer("absent", torch.ones(2))
    source = HFFolder(folder, definition)
    assert source.buffer("model.balance").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert source.buffer("model.absent") is None
    assert source.buffer("model.norm.weight") is None
    materialize(definition, source)
    assert definition.model.balance.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert definition.model.absent.tolist() == [1.0, 1.0]
    definition.model.register_buffer("balance", torch.zeros(5))
    with pytest.raises(CheckpointError, match=r"model\.balance has shape \[4\], the definition has \[5\]"):
        HFFolder(folder, definition).buffer("model.balance")
