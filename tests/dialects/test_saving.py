"""A built model's weights, put together again: each number is that of the model which was built, bit by bit."""

import copy
import json
import os

import pytest
import torch
from torch import nn

import megasched
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import adamw
from tests.dialects.test_torch import fsdp2
from tests.dialects.test_zero import zero_config
from tests.lowering.models import Mlp, tiny_model


def _differences(found, model):
    """Names whose tensors are not those of a model; on ranks but the first there is nothing."""
    if torch.distributed.get_rank() > 0:
        return list(found)
    wanted = model.state_dict()
    assert list(found) == list(wanted)
    assert all(tensor.is_contiguous() for tensor in found.values())
    return [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]


def _built(model, level=None, **asked):
    sch = megasched.create_schedule(copy.deepcopy(model), name="auto", **asked)
    if level is not None:
        sch.level(level)
    return megasched.build(sch)


def _over_tp():
    """Packed and transposed projections, padded and tied vocabularies, heads that ranks share."""
    init_megatron(tp=2)
    models = [
        tiny_model("gpt2"),
        tiny_model("phi3"),
        tiny_model("qwen3"),
        tiny_model("llama", num_key_value_heads=1),
    ]
    return [_differences(megasched.full_state_dict(_built(each)), each) for each in models]


def test_what_tp_cuts(ranks):
    assert ranks.run(2, _over_tp) == [[[]] * 4] * 2


def _over_dp():
    """FSDP2 over what TP has left, and experts over EP."""
    from megatron.core import parallel_state

    init_megatron(tp=2)
    llama = tiny_model("llama")
    sharded = fsdp2(_built(llama, "leaf"), parallel_state.get_data_parallel_group())
    found = [_differences(megasched.full_state_dict(sharded), llama)]
    parallel_state.destroy_model_parallel()
    init_megatron(ep=2)
    mixtral = tiny_model("mixtral")
    return [*found, _differences(megasched.full_state_dict(_built(mixtral)), mixtral)]


def test_what_fsdp2_and_ep_share_out(ranks):
    assert ranks.run(4, _over_dp) == [[[], []]] * 4


def _folder(folder):
    """transformers has Mixtral's experts in one tensor, and its folders each by itself."""
    from transformers import AutoModelForCausalLM

    init_megatron(tp=2)
    model = tiny_model("mixtral")
    megasched.save_pretrained(_built(model), folder, max_shard_size="20KB")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    return [
        name for name, tensor in model.state_dict().items() if not torch.equal(loaded.state_dict()[name], tensor)
    ]


def test_a_folder_that_transformers_loads(ranks, tmp_path):
    assert ranks.run(2, _folder, str(tmp_path / "saved")) == [[], []]
    names = os.listdir(tmp_path / "saved")
    assert "model.safetensors.index.json" in names
    assert os.listdir(tmp_path) == ["saved"]


def _recomputed(folder, staged):
    init_megatron(tp=1 if staged else 2, pp=2 if staged else 1)
    sch = megasched.create_schedule(tiny_model("llama"), name="auto")
    sch["model.layers.0"].checkpoint()
    built = megasched.build_stage(sch) if staged else megasched.build(sch)
    megasched.save_pretrained(built, folder)
    return sch.mod.config.use_cache


@pytest.mark.parametrize("staged", [False, True])
def test_a_saved_config_is_the_definitions(ranks, tmp_path, staged):
    """A build switches the cache off, with which whoever loads the folder generates."""
    built, plain = tmp_path / "built", tmp_path / "plain"
    assert ranks.run(2, _recomputed, str(built), staged) == [False, False]
    tiny_model("llama").save_pretrained(plain)
    found, wanted = (json.loads((folder / "config.json").read_text()) for folder in (built, plain))
    assert found["use_cache"] is True
    assert found == wanted


def _stages(folder, interleaved):
    from transformers import GPT2LMHeadModel

    init_megatron(tp=1 if interleaved else 2, pp=2)
    model, rank = tiny_model("gpt2", n_layer=4), torch.distributed.get_rank()
    numbers, count = ([rank, rank + 2], 4) if interleaved else ([rank // 2], 2)
    schedules = [megasched.create_schedule(copy.deepcopy(model), name="auto") for _ in numbers]
    stages = [megasched.build_stage(sch, number, count) for sch, number in zip(schedules, numbers, strict=True)]
    megasched.save_pretrained(stages, folder)
    loaded = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    return [name for name, tensor in model.state_dict().items() if not torch.equal(loaded[name], tensor)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_stages(ranks, tmp_path, interleaved):
    size = 2 if interleaved else 4
    assert ranks.run(size, _stages, str(tmp_path / "saved"), interleaved) == [[]] * size


def _under_zero(stage):
    init_megatron(tp=2)
    model = tiny_model("qwen3")
    sch = megasched.create_schedule(copy.deepcopy(model), name="auto")
    engine, _ = megasched.build(sch, target="deepspeed", config=zero_config(stage), optimizer=adamw)
    try:
        return _differences(megasched.full_state_dict(engine.module), model)
    finally:
        engine.destroy()


def test_an_engine_of_deepspeed(deepspeed_ranks):
    assert deepspeed_ranks.run(4, _under_zero, 2) == [[]] * 4
    with pytest.raises(
        AssertionError, match="DeepSpeed's ZeRO-3 has the weights: save a checkpoint by the engine"
    ):
        deepspeed_ranks.run(2, _under_zero, 3)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def normed():
    """A model with statistics that TP cuts with the weights; what was built of its copy; pictures."""
    init_megatron(tp=2)
    torch.manual_seed(0)
    model, pictures = Normed(), torch.randn(2, 3, 8, 8)
    sch = megasched.create_schedule(copy.deepcopy(model))
    sch["first"].shard("weight", axis=0)
    sch["second"].shard("weight", axis=1)
    return model, megasched.build(sch, inputs={"x": pictures}), pictures


def _statistics():
    model, built, pictures = normed()
    for each in (model, built):
        each(pictures)
    found = megasched.full_state_dict(built)
    if found:
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    return len(found), tuple(built.norm.running_mean.shape)


def test_statistics_of_batch_norms_that_tp_cuts(ranks):
    assert ranks.run(2, _statistics) == [(9, (4,)), (0, (4,))]


def _with_another(built):
    built.model.another = nn.Parameter(torch.zeros(2))
    return built


def _refused(folder, there):
    init_megatron(tp=2)
    model = tiny_model("llama")
    sch = megasched.create_schedule(Mlp())
    built, words = _built(model), []
    for save in (
        lambda: megasched.full_state_dict(model),
        lambda: megasched.save_pretrained(megasched.build(sch), folder),
        lambda: megasched.save_pretrained(built, there),
        lambda: megasched.save_pretrained(built, folder, max_shard_size="much"),
        lambda: megasched.full_state_dict(_with_another(built)),
    ):
        with pytest.raises((megasched.ConfigError, ValueError)) as raised:
            save()
        words.append(str(raised.value))
    return words


def test_what_can_not_be_saved_is_said_on_all_ranks(ranks, tmp_path):
    there, folder = tmp_path / "there", tmp_path / "new"
    there.mkdir()
    (there / "config.json").write_text("{}")
    for plain, mlp, taken, option, another in ranks.run(2, _refused, str(folder), str(there)):
        assert "this LlamaForCausalLM was not built by megasched, or is a copy" in plain
        assert "a Mlp is no model of transformers" in mlp
        assert f"{there}: there is something already" in taken
        assert "much" in option or "size" in option
        assert "model.another: it is not of the model that was built" in another
    assert os.listdir(tmp_path) == ["there"]
