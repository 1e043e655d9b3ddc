"""The plain reference: a process that can't import what it judges, and what it computes."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from megasched.definition.small_models.small_models import small_config, write_small_model
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.batches import IGNORED, make_batches
from megasched.verify.plain.draws import MeanDraws
from megasched.verify.plain.runs import OPTIMIZER, PlainError, PlainModel
from megasched.verify.plain.watching import Watch
from tests import remote

ONE = ParallelDims()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_small_model("llama", tmp_path_factory.mktemp("llama"))


def plain(folder):
    return PlainModel(str(folder), f"{folder}/model.safetensors")


def test_it_trains_as_torch_does(ranks, llama):
    batches = make_batches(small_config("llama"), ONE)
    run = ranks.plain.run(plain(llama), batches, look=(1, 2))
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).train()
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=OPTIMIZER["eps"], weight_decay=0.1)
    for step, (tokens, labels) in enumerate(zip(batches.inputs["input_ids"], batches.labels, strict=True)):
        losses = [
            F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), wanted.flatten())
            for ids, wanted in zip(tokens, labels, strict=True)
        ]
        torch.stack(losses).mean().backward()
        counts = (labels != IGNORED).sum((1, 2))
        told = float((torch.stack(losses).detach() * counts).sum() / counts.sum())
        assert run.losses[step] == pytest.approx(told, rel=1e-6)
        if step == 1:
            torch.testing.assert_close(run.gradients["lm_head.weight"], model.lm_head.weight.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert run.grad_norms[step] == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.weights[name], parameter.detach())
    assert run.sightings.order[0] == ("model.embed_tokens", "out")
    assert run.unreached == []


@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda: torch.rand(3), 0.5),
        (lambda: torch.rand_like(torch.ones(3)), 0.5),
        (lambda: torch.randn(3), 0.0),
        (lambda: torch.randn_like(torch.ones(3)), 0.0),
        (lambda: torch.bernoulli(torch.tensor([0.2, 0.2])), 0.2),
        (lambda: torch.bernoulli(torch.ones(2), p=0.3), 0.3),
        (lambda: torch.empty(3).bernoulli_(0.7), 0.7),
        (lambda: torch.empty(2).bernoulli_(torch.tensor([0.4, 0.4])), 0.4),
        (lambda: torch.empty(3).uniform_(0.5, 2.0), 1.25),
        (lambda: torch.empty(3).uniform_(), 0.5),
        (lambda: torch.empty(3).normal_(0.25, 2.0), 0.25),
        (lambda: torch.empty(3).exponential_(), 1.0),
        (lambda: torch.empty(3).exponential_(4.0), 0.25),
        (lambda: F.dropout(torch.full((3,), 0.75), 0.5), 0.75),
        (lambda: torch.native_dropout(torch.full((3,), 0.75), 0.5, True)[0], 0.75),
    ],
)
def test_what_is_drawn_is_the_mean_of_its_distribution(draw, mean):
    with MeanDraws() as mode:
        assert torch.equal(draw(), torch.full_like(draw(), mean))
        assert mode.drawn


def test_nothing_is_drawn_where_no_dropout_is_on():
    value = torch.rand(3)
    with MeanDraws() as mode:
        assert torch.equal(F.dropout(value, 0.5, training=False), value)
        assert torch.equal(torch.native_dropout(value, 0.5, False)[0], value)
        assert not mode.drawn


MINE = """
import {module}
from transformers import LlamaConfig, LlamaForCausalLM


class MyConfig(LlamaConfig):
    model_type = "my"


class My(LlamaForCausalLM):
    config_class = MyConfig
"""


TABLES = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)
        self.register_buffer("order", torch.tensor([1, 0]), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False]), persistent=False)
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scale[self.order][self.flags]
        return output
"""


def test_buffers_that_a_constructor_computes(ranks, tmp_path):
    """``from_pretrained`` makes them on meta, and leaves them whatever its memory holds."""
    folder = remote.write_whole(tmp_path / "model", TABLES)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    model.save_pretrained(folder)
    batches = make_batches(config, ONE)
    run = ranks.plain.run(replace(plain(folder), trust_remote_code=True), batches, look=(0, 0))
    with torch.no_grad():
        expected = model(input_ids=batches.inputs["input_ids"][0, 0]).logits
    torch.testing.assert_close(run.logits[0][0], expected)


@pytest.mark.parametrize("module", ["megasched", "megatron.core"])
def test_what_is_judged_cannot_be_imported_there(ranks, llama, tmp_path, module):
    config = small_config("llama")
    config.auto_map = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.My"}
    config.model_type = "my"
    (tmp_path / "mine.py").write_text(MINE.format(module=module))
    config.save_pretrained(tmp_path)
    given = PlainModel(str(tmp_path), f"{llama}/model.safetensors", trust_remote_code=True)
    with pytest.raises(PlainError, match=f"must not import {module.partition('.')[0]}"):
        ranks.plain.run(given, make_batches(small_config("llama"), ONE, steps=1))


def test_ids_span_the_vocabulary_and_batches_change():
    config = small_config("llama")
    batches = make_batches(config, ParallelDims(data_parallel_size=2, pipeline_model_parallel_size=2))
    tokens = batches.inputs["input_ids"]
    assert tokens.shape == (3, 4, 2, 32)
    assert set(tokens.flatten().tolist()) == set(range(config.vocab_size))
    first = tokens[0, 0]
    assert int(first.min()) < 10
    assert int(first.max()) > config.vocab_size - 10
    assert not torch.equal(tokens[0], tokens[1])
    counted = (batches.labels != IGNORED).sum((2, 3))
    assert counted[0].tolist() == [62, 46, 40, 62]  # no label at the end; padding; a third masked
    assert not bool((batches.labels[..., -1] != IGNORED).any())


def test_an_id_that_stands_for_a_picture_is_left_out():
    config = small_config("llama")
    config.image_token_id = 77
    assert 77 not in make_batches(config, ONE).inputs["input_ids"]


@pytest.mark.parametrize("model_type", ["mixtral", "llama4_text", "longcat_flash"])
def test_nothing_is_seen_inside_of_experts(model_type):
    """A rank has some of them, and tokens of other ranks."""
    model = AutoModelForCausalLM.from_config(small_config(model_type))
    watch = Watch(model, dict(model.named_modules()))
    model(input_ids=torch.arange(8)[None])
    seen = {path for path, _ in watch.close().order}
    assert any(path.endswith(".experts") for path in seen)
    assert not any(".experts." in path for path in seen)
