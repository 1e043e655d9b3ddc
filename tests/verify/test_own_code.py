"""What verify makes of models as they are: dropouts, code of one's own, and what no batch reaches."""

import json

import pytest
import torch
from transformers import GPT2Config, MistralConfig

from megasched.definition.small_models.small_models import small_config, write_model, write_small_model
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.batches import IGNORED, unreached_windows
from megasched.verify.plain.draws import NOTE
from megasched.verify.plain.runs import Batches, PlainModel
from megasched.verify.steps import make_subject
from megasched.verify.verify import verify_schedule

TP2 = ParallelDims(tensor_model_parallel_size=2)


def test_at_full_size_dropouts_are_off_but_for_the_masks(ranks, tmp_path):
    config = GPT2Config(**{**small_config("gpt2").to_dict(), "resid_pdrop": 0.1, "embd_pdrop": 0.1})
    write_model(config, tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    found = verify_schedule("auto", str(tmp_path), TP2, full_size=True, ranks=ranks)
    assert (found.verdict, found.why) == ("equal", "")
    assert found.notes == ["dropouts are off on both sides: resid_pdrop, embd_pdrop"]
    assert found.checks[-1].name == "dropout masks"
    assert (tmp_path / "config.json").read_bytes() == before


def test_what_only_a_run_with_dropout_refuses(ranks, tmp_path):
    """Nothing is cut, so that each rank draws for whole activations between layers that are cut by length."""
    (tmp_path / "nothing.py").write_text("def schedule(sch, layout):\n    pass\n")
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)

    def verified(rate):
        config = GPT2Config(**{**small_config("gpt2").to_dict(), "resid_pdrop": rate})
        config.save_pretrained(tmp_path / "model")
        return verify_schedule(f"{tmp_path}/nothing.py", str(tmp_path / "model"), layout, ranks=ranks)

    refusal = "the schedule has a problem:\n  - draws random numbers for activations that are whole"
    without, with_it = verified(0.0), verified(0.1)
    assert (without.verdict, without.finding) == ("equal", None)
    assert without.why.startswith(f"with a dropout above 0 a run of it is refused: {refusal}")
    assert (with_it.verdict, with_it.checks) == ("refused", [])
    assert with_it.why.startswith(refusal)
    assert "remedy: switch this dropout off" in with_it.why


MINE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


class MyConfig(LlamaConfig):
    model_type = "mine"


class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(self.inner(x) * self.scale)


class My(LlamaForCausalLM):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm = Scaled(self.model.norm)
        self.more = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=size)
            loss = loss + 0.3 * self.loss_function(logits=self.more(hidden), labels=labels, vocab_size=size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


def test_a_class_with_a_scalar_a_dropout_and_two_losses_of_its_own(ranks, tmp_path):
    config = small_config("llama").to_dict() | {"model_type": "mine"}
    config["auto_map"] = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.My"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(MINE)
    found = verify_schedule("auto", str(tmp_path), ParallelDims(), trust_remote_code=True, ranks=ranks)
    assert (found.verdict, found.why) == ("equal", "")
    assert found.notes == ["dropouts that stand in the code are off on both sides: model.norm.dropout"]


def test_a_router_that_draws_its_experts_is_given_the_mean_of_what_it_draws(ranks, tmp_path):
    """The ranks of a pipeline, and those that share out tokens, draw other numbers than one process does."""
    folder = write_small_model("phimoe", tmp_path)
    for layout in (
        ParallelDims(pipeline_model_parallel_size=2),
        ParallelDims(expert_model_parallel_size=2, data_parallel_size=2),
    ):
        found = verify_schedule("auto", folder, layout, ranks=ranks)
        assert (found.verdict, found.why) == ("equal", "")
        assert NOTE in found.notes


def test_experts_that_no_token_reached_are_named(ranks, tmp_path):
    folder = write_small_model("qwen3_moe", tmp_path)
    tokens = torch.tensor([[[[3, 400]]]])
    labels = torch.tensor([[[[400, IGNORED]]]])
    run = ranks.plain.run(
        PlainModel(folder, f"{folder}/model.safetensors"), Batches({"input_ids": tokens}, labels)
    )
    zero = [
        f"{name}[{index}]"
        for name, gradient in run.gradients.items()
        if gradient.dim() == 3
        for index, part in enumerate(gradient)
        if not part.any()
    ]
    assert zero
    assert sorted(name for name in run.unreached if name.endswith("]")) == sorted(zero)


def test_a_window_that_no_sequence_is_longer_than_is_named():
    assert unreached_windows(small_config("mistral"), TP2) == {}
    assert unreached_windows(MistralConfig(sliding_window=4096), TP2) == {"sliding_window": 4096}


HYBRID = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class HybridConfig(LlamaConfig):
    model_type = "hybrid"

    def __init__(self, period=2, **more):
        self.period = period
        super().__init__(**more)


class Mean(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, **more):
        return self.out(hidden_states.cumsum(1) / hidden_states.shape[1]), None


class Hybrid(LlamaForCausalLM):
    config_class = HybridConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            if (index + 1) % config.period:
                layer.self_attn = Mean(config)
        self.post_init()
"""
HYBRID_LACKS = ["model.layers.5 (self_attn: LlamaAttention)"]


def hybrid(folder):
    config = small_config("llama").to_dict() | {"model_type": "hybrid", "period": 6, "num_hidden_layers": 8}
    config["auto_map"] = {"AutoConfig": "hybrid.HybridConfig", "AutoModelForCausalLM": "hybrid.Hybrid"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hybrid.py").write_text(HYBRID)
    return str(folder)


@pytest.mark.parametrize(
    ("layers", "layout", "depth", "lacks"),
    [
        (None, ParallelDims(), 6, []),
        (None, ParallelDims(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 8, []),
        (4, ParallelDims(), 4, HYBRID_LACKS),
    ],
)
def test_a_copy_is_as_deep_as_it_takes_to_have_every_kind_of_layer(tmp_path, layers, layout, depth, lacks):
    """Which layer is of which kind stands in the code, and the values of a config in its file."""
    options = {"full_size": False, "layers": layers, "overrides": (), "trust_remote_code": True}
    subject = make_subject(hybrid(tmp_path), tmp_path / "model", layout, **options)
    assert (subject.layers, [str(lack) for lack in subject.lacks]) == (depth, lacks)
    assert subject.notes[:1] == tuple(
        f"no layer of the copy is like {lack}: --layers or --full-size gives it one" for lack in lacks
    )


def test_a_small_copy_that_lacks_a_layer_says_so(ranks, tmp_path):
    options = {"trust_remote_code": True, "ranks": ranks, "layers": 4}
    found = verify_schedule("auto", hybrid(tmp_path), ParallelDims(), **options)
    assert (found.verdict, found.why) == ("equal", "")
    assert found.to_dict()["lacks"] == HYBRID_LACKS
    assert found.notes == [f"no layer of the copy is like {HYBRID_LACKS[0]}: --layers or --full-size gives it one"]


def test_what_only_a_validation_computes_otherwise_is_wrong(ranks, tmp_path):
    write_small_model("llama", tmp_path / "model")
    (tmp_path / "twice.py").write_text(
        "def twice(module, args, output):\n    return output if module.training else 2 * output\n\n"
        'def schedule(sch, layout):\n    sch["model.layers.1.mlp"].hook("fw_post", twice)\n'
    )
    layout = ParallelDims(pipeline_model_parallel_size=2)
    found = verify_schedule(f"{tmp_path}/twice.py", str(tmp_path / "model"), layout, ranks=ranks)
    assert (found.verdict, found.why) == ("wrong", "validation loss: beyond the tolerance")
    assert [check.name for check in found.checks if not check.equal] == ["validation loss"]
