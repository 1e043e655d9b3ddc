"""Context parallelism in a loop of one's own: whole sequences go in, whole logits and gradients come out."""

import copy

import pytest
import torch
from torch import nn
from transformers.masking_utils import find_packed_sequence_indices
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import megasched
from megasched.attributes import resolve
from megasched.language.parallel_dims import ParallelDims
from megasched.lowering.build import placements_of, plan_of
from megasched.transformers_names import PACKED
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, auto, tiny_model, token_ids
from tests.lowering.parity import compare_gradients, distance, scheduled_copy, too_far
from tests.tiny import FAMILIES


def _recomputed(sch):
    auto(sch)
    sch["model.layers.*"].checkpoint()


def _compared(model, fill=auto, *, sequence_parallel=False, **calls):
    """Distances of logits, loss and every gradient from the model's own; all CP ranks have the same ones."""
    from megatron.core import parallel_state

    built, plan, _ = scheduled_copy(model, fill, sequence_parallel=sequence_parallel)
    found = {}
    got, want = (each(**calls) for each in (built, model))
    for each in (got, want):
        each.loss.backward()
    found = {"output": distance(got.logits, want.logits), "loss": distance(got.loss, want.loss)}
    group = parallel_state.get_context_parallel_group()
    for name, parameter in built.named_parameters():
        every = [torch.empty_like(parameter) for _ in range(group.size())]
        torch.distributed.all_gather(every, parameter.grad.contiguous(), group=group)
        assert all(torch.equal(one, every[0]) for one in every), name
    return too_far(found | compare_gradients(built, plan, model))


FAST = ("phi3", "opt", "gpt_neox")  # and those below


def _families(families):
    init_megatron(cp=2)
    ids = token_ids()
    found = {family: _compared(tiny_model(family), input_ids=ids, labels=ids) for family in families}
    found["recomputed"] = _compared(tiny_model("mistral"), _recomputed, input_ids=ids, labels=ids)
    return {family: gaps for family, gaps in found.items() if gaps}


@pytest.mark.parametrize("families", [FAST, pytest.param(tuple(FAMILIES), marks=pytest.mark.slow)])
def test_logits_loss_and_every_gradient_at_cp2(ranks, families):
    assert ranks.run(2, _families, families) == [{}, {}]


def _cut_logits(model, given):
    """Distances of the loss and of every gradient, where a rank's logits are those of its columns."""
    sch = megasched.create_schedule(copy.deepcopy(model), name="auto", parallel_output=True)
    built = megasched.build(sch)
    got, want = (each(**given) for each in (built, model))
    assert got.logits.shape == (2, 16, 50)
    for each in (got, want):
        each.loss.backward()
    return too_far({"loss": distance(got.loss, want.loss)} | compare_gradients(built, plan_of(built), model))


def _with_tp():
    """Partial gradients over TP and CP at once, tied weights, windows; an auxiliary loss of all tokens."""
    init_megatron(tp=2, cp=2)
    ids = token_ids(length=16)
    given = {"input_ids": ids, "labels": ids}
    found = {
        f"{family}, SP {sp}": _compared(tiny_model(family), sequence_parallel=sp, **given)
        for family, sp in (("qwen3", False), ("gemma2", True), ("gpt2", True))
    }
    found["cut logits"] = _cut_logits(tiny_model("gpt2"), given)
    found["mixtral"] = _compared(tiny_model("mixtral", output_router_logits=True), sequence_parallel=True, **given)
    return {family: gaps for family, gaps in found.items() if gaps}


def test_with_tensor_and_sequence_parallelism(ranks):
    assert ranks.run(4, _with_tp) == [{}] * 4


def _experts():
    init_megatron(cp=2, ep=2)
    ids = token_ids()
    model = tiny_model("mixtral")
    built, _, _ = scheduled_copy(model, auto)
    for each in (built, model):
        each(input_ids=ids, labels=ids).loss.backward()
    whole, rank = dict(model.named_parameters()), torch.distributed.get_rank()
    placements = placements_of(built)
    assert {placement.group for placement in placements.values()} == {"tp", "ep"}
    gaps = {}
    for name, parameter in built.named_parameters():
        placement = placements[name]
        own = (rank, 2) if placement.group == "ep" else (0, 1)
        gaps[name] = distance(parameter.grad, placement.shard(whole[name].grad, *own))
    return too_far(gaps)


def test_experts_shared_out_over_the_ranks_of_a_sequence(ranks):
    assert ranks.run(2, _experts) == [{}, {}]


def _calls():
    """What a call may have, and what is refused; nothing is left of it."""
    init_megatron(cp=2)
    model, ids = tiny_model("llama"), token_ids()
    built, _, _ = scheduled_copy(model, auto)
    everything = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(12)[None]}
    same = [built(ids).logits, built(input_ids=ids, use_cache=False, **everything).logits]
    assert torch.equal(*same)
    assert resolve(PACKED) is find_packed_sequence_indices  # for other models of this process
    wrong = {
        "length": {"input_ids": ids[:, :10]},
        "mask": {"input_ids": ids, "attention_mask": torch.arange(12) > 2},
        "positions": {"input_ids": ids, "position_ids": torch.arange(12) // 2},
        "embeddings": {"inputs_embeds": torch.zeros(2, 12, 32)},
        "cache": {"input_ids": ids, "use_cache": True},
        "kept": {"input_ids": ids, "logits_to_keep": 1},
        "states": {"input_ids": ids, "output_hidden_states": True},
        "tuple": {"input_ids": ids, "return_dict": False},
    }
    words = {}
    for name, given in wrong.items():
        with pytest.raises(megasched.ConfigError) as raised:
            built(**given)
        words[name] = str(raised.value)
    return words


def test_calls_that_are_refused(ranks):
    for words in ranks.run(2, _calls):
        assert "cuts each sequence into 4 equal pieces, and here are 10 tokens" in words["length"]
        assert "leave the mask out, and give padding the label -100" in words["mask"]
        assert "one sequence a row, with positions 0, 1, 2, ..." in words["positions"]
        assert "inputs_embeds can't be used under context parallelism" in words["embeddings"]
        assert "use_cache can't be used under context parallelism" in words["cache"]
        assert "logits_to_keep can't be used under context parallelism" in words["kept"]
        assert "output_hidden_states can't be used under context parallelism" in words["states"]
        assert "a call returned a tuple" in words["tuple"]
        assert "leave return_dict=False out" in words["tuple"]


def _outputs():
    init_megatron(cp=2)
    model, ids = tiny_model("mixtral", output_router_logits=True, output_hidden_states=True), token_ids()
    built, _, _ = scheduled_copy(model, auto)
    got, want = (each(input_ids=ids, labels=ids) for each in (built, model))
    assert len(want.hidden_states) == 3
    assert len(want.router_logits) == 2
    assert all(distance(got[name], want[name]) < 1e-5 for name in ("logits", "loss", "aux_loss"))
    return tuple(got.keys())


def test_what_is_of_a_part_of_the_sequence_is_not_returned(ranks):
    assert ranks.run(2, _outputs) == [("loss", "aux_loss", "logits")] * 2


class Experts(nn.Module):
    """Of which each token goes through one, and none is called without tokens."""

    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 2)
        self.experts = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen, found = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                found = found + expert(x) * weights[..., number, None] * (chosen == number)[..., None]
        return found


def _uneven():
    init_megatron(cp=2)
    by_tokens = tiny_model("llama")
    by_tokens.model.layers[1].mlp = Experts(by_tokens.config)
    found = []
    for model in (by_tokens, tiny_model("opt", layerdrop=0.5)):
        with pytest.raises(megasched.ScheduleError) as raised:
            megasched.build(megasched.create_schedule(model))
        found.append(raised.value.problems[0])
    return found


def test_parameters_to_which_one_rank_may_have_no_gradient_are_refused(ranks):
    for by_tokens, by_chance in ranks.run(2, _uneven):
        assert "whether it gets a gradient goes by values" in by_tokens.what
        assert by_tokens.module.startswith("model.layers.1.mlp.")
        assert "layers may be skipped by chance" in by_chance.what


def _models():
    init_megatron(cp=2)
    with pytest.raises(megasched.ScheduleError) as raised:
        megasched.build(megasched.create_schedule(Mlp()), inputs={"x": torch.ones(1, 8)})
    return raised.value.problems[0].what


def test_other_models_are_refused(ranks):
    words = "context parallelism is of HF's causal language models, and this is a Mlp"
    assert ranks.run(2, _models) == [words] * 2


def _too_large(module, args, output):
    return output * 1.01


def test_verify_compares_it_and_finds_what_is_wrong(ranks):
    ids = token_ids()
    found = []
    for wrong in (False, True):
        sch = megasched.create_schedule(tiny_model("llama"), ParallelDims(context_parallel_size=2), name="auto")
        if wrong:
            sch["model.layers.1.mlp"].hook("fw_post", _too_large)
        found.append(megasched.verify(sch, inputs={"input_ids": ids, "labels": ids}, ranks=ranks))
    assert [one.verdict for one in found] == ["equal", "wrong"], [one.why for one in found]
    assert found[1].finding.where == "model.layers.1.mlp"
    assert found[1].finding.error == pytest.approx(0.01, rel=1e-3)


class Sums(nn.Module):
    """Sums over the tokens before each, of sequences that stand one behind the other: [b*s, h] -> [b*s, h]."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, tokens, batch):
        return self.proj(tokens.unflatten(0, (batch, -1)).cumsum(1).flatten(0, 1) / 8)


class Flattening(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sums = Sums()

    def forward(self, hidden_states, **kwargs):
        x = super().forward(hidden_states, **kwargs)
        return x + self.sums(x.flatten(0, 1), x.shape[0]).view_as(x)


def _recomputed_after_another_batch():
    init_megatron(cp=2)
    model = tiny_model("llama")
    torch.manual_seed(1)
    model.model.layers[0] = Flattening(model.config, 0)
    built, plan, _ = scheduled_copy(model, _recomputed)
    region = plan.cp_facts.regions["model.layers.0.sums"]
    assert all(along.outer > 1 for places in region for along in places.values())
    for each in (model, built):
        sum(each(input_ids=ids, labels=ids).loss for ids in (token_ids(4, 8), token_ids(2, 16))).backward()
    return too_far(compare_gradients(built, plan, model))


def test_a_batch_is_recomputed_after_another_was_called(ranks):
    assert ranks.run(2, _recomputed_after_another_batch) == [{}, {}]
