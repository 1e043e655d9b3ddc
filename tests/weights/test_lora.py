"""Adapters in files: PEFT loads what is written, merged weights compute the same, and every rank starts alike."""

import copy
import json
import math

import pytest
import torch

import megasched
from megasched import CheckpointError, ParallelDims
from megasched.language.lora import Lora, adapter_names
from megasched.plan.placement import Placement
from megasched.weights.lazy import blocks
from megasched.weights.lora import (
    CONFIG,
    WEIGHTS,
    AdaptedSource,
    adapter_config,
    initial_value,
    merge,
    merged,
    read_adapter_config,
    save_adapter,
)
from tests.lowering.models import randomize, tiny_model, token_ids
from tests.weights.test_traced_functions import InMemory


def adapt_llama(sch):
    sch["**.q_proj"].adapt(rank=4, alpha=8, dropout=0.1)
    sch["**.down_proj"].adapt(rank=2, alpha=3, dropout=0.1)
    sch["lm_head"].unfreeze()
    sch["model.norm"].unfreeze()


def adapt_phi3(sch):
    sch["**.qkv_proj"].adapt(rank=4, alpha=2, use_rslora=True)
    sch["**.gate_up_proj"].unfreeze()
    sch["model.layers.1.mlp"].unfreeze()  # one of those is in it


ADAPT = {
    "llama": adapt_llama,
    "phi3": adapt_phi3,
    "gpt2": lambda sch: sch["transformer.h.*"]["**.c_*"].adapt(rank=3),
}


def lazy(tensors):
    return {name: InMemory(value, []) for name, value in tensors.items()}


def real(tensors):
    """Put together of boxes of at most 300 bytes."""
    found = {}
    for name, tensor in tensors.items():
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        for box in blocks(tensor.shape, tensor.dtype.itemsize, 300):
            found[name][tuple(slice(start, stop) for start, stop in box)] = tensor.read(box)
    return found


@pytest.fixture(params=ADAPT)
def trained(request):
    """The model as it was; whole tensors of the adapted one after it has been trained; its logits; the config."""
    model = tiny_model(request.param)
    before = copy.deepcopy(model)
    sch = megasched.create_schedule(model, ParallelDims())
    ADAPT[request.param](sch)
    config = adapter_config(sch, "base/folder")
    megasched.build(sch)
    changed = {name: p for name, p in model.named_parameters() if p.requires_grad}
    randomize(torch.nn.ParameterList(changed.values()), seed=3)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    return before.eval(), tensors, model.eval()(input_ids=token_ids()).logits.detach(), config


def test_peft_loads_the_folder(trained, tmp_path):
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    before, tensors, logits, config = trained
    save_adapter(tmp_path, lazy(tensors), json.loads(json.dumps(config)))
    loaded = PeftModel.from_pretrained(before, tmp_path).eval()
    # None is missing and none unexpected, which PEFT itself would only warn of.
    assert get_peft_model_state_dict(loaded).keys() == load_file(tmp_path / WEIGHTS).keys()
    torch.testing.assert_close(loaded(input_ids=token_ids()).logits, logits, rtol=1e-5, atol=1e-5)
    assert loaded.peft_config["default"].base_model_name_or_path == "base/folder"
    assert loaded.peft_config["default"].task_type == "CAUSAL_LM"
    assert json.loads((tmp_path / CONFIG).read_text()) == config


def test_merged_computes_the_same_without_adapters(trained):
    before, tensors, logits, config = trained
    found = real(merged(lazy(tensors), read_adapter_config(config)))
    assert found.keys() == dict(before.named_parameters()).keys()
    before.load_state_dict(found, strict=False)
    torch.testing.assert_close(before(input_ids=token_ids()).logits, logits, rtol=1e-5, atol=1e-5)


def test_merged_equals_pefts_merge(trained, tmp_path):
    from peft import PeftModel

    before, tensors, _, config = trained
    save_adapter(tmp_path, lazy(tensors), config)
    theirs = PeftModel.from_pretrained(before, tmp_path).merge_and_unload().state_dict()
    for name, tensor in real(merged(lazy(tensors), read_adapter_config(config))).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


def test_merging_adds_in_float32():
    lora = Lora(rank=1, alpha=2.0**-9)
    weight, one = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    assert merge(weight, one, one, lora).dtype == torch.bfloat16
    many = [merge(weight, torch.full((1, 1), 3.0), one, lora), merge(weight, one, one, lora)]
    assert [float(value) for value in many] == [1.0078125, 1.0]  # 1 + 3/512 rounds up, 1 + 1/512 down


def test_missing_adapters_are_refused(trained, tmp_path):
    _, tensors, _, config = trained
    name = adapter_names(config["target_modules"])[1]
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    for attempt in (
        lambda: save_adapter(tmp_path, lazy(rest), config),
        lambda: merged(lazy(rest), read_adapter_config(config)),
    ):
        with pytest.raises(CheckpointError, match=name):
            attempt()
    assert not list(tmp_path.iterdir())


def test_nothing_adapted_has_no_config():
    assert adapter_config(megasched.create_schedule(tiny_model("llama"), ParallelDims()), "x") is None


def test_a_starts_as_pefts_and_b_with_zeros():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 96)), LoraConfig(r=16, target_modules=["0"]))
    theirs = {
        name.partition(".lora_")[2][0]: p.detach() for name, p in model.named_parameters() if "lora_" in name
    }
    a = initial_value("x.lora_A.weight", (16, 64), seed=5)
    bound = 1 / math.sqrt(64)
    for start in (a, theirs["A"]):
        assert 0.98 * bound < start.abs().max() <= bound
        assert start.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not theirs["B"].any()
    assert not initial_value("x.lora_B.weight", (96, 16), seed=5).any()
    assert torch.equal(a, initial_value("x.lora_A.weight", (16, 64), seed=5))
    assert not torch.equal(a, initial_value("y.lora_A.weight", (16, 64), seed=5))
    assert not torch.equal(a, initial_value("x.lora_A.weight", (16, 64), seed=6))


class Base:
    """A source that has one weight."""

    def local(self, placement, rank, size):
        return torch.full(placement.local_shape(size), 7.0)

    def buffer(self, name):
        return torch.ones(1)

    def check(self, names):
        if set(names) != {"x.weight"}:
            raise CheckpointError(f"missing {sorted(set(names) - {'x.weight'})}")


def test_a_source_has_the_adapters_and_asks_for_the_rest():
    source = AdaptedSource(Base(), adapter_names(["x"]), seed=5)
    source.check(["x.weight", "x.lora_A.weight", "x.lora_B.weight"])
    with pytest.raises(CheckpointError, match=r"missing \['y.weight'\]"):
        source.check(["x.weight", "y.weight", "x.lora_A.weight", "x.lora_B.weight"])
    assert source.local(Placement("x.weight", (4, 8), axis=0), 0, 2).tolist() == [[7.0] * 8] * 2
    assert source.buffer("b").tolist() == [1.0]
    cut = Placement("x.lora_A.weight", (4, 8), axis=1)
    pieces = [source.local(cut, rank, 2) for rank in range(2)]
    assert torch.equal(cut.unshard(pieces), initial_value("x.lora_A.weight", (4, 8), seed=5))
    assert all(piece.untyped_storage().nbytes() == 4 * piece.numel() for piece in pieces)
