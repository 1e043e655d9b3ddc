"""What verify makes of models as they are: dropouts, code of one's own, and what no batch reaches."""

import json

import torch
from transformers import GPT2Config, MistralConfig

from megasched.definition.small_models.small_models import small_config, write_model, write_small_model
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.batches import IGNORED, unreached_windows
from megasched.verify.plain.runs import Batches, PlainModel
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
