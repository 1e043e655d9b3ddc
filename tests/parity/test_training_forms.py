"""Optimizer, recompute, dropout, precision and stages: what else a run can be made of, against the plain form."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megasched.verify.ranks.pool import RankError
from megasched.verify.reference import hf_loss, hf_model, relative
from megasched.verify.trainer_run import batches_of, gather, losses, train
from tests import remote, tiny
from tests.parity.cases import slow, spread
from tests.parity.steps import assert_same_losses, one_rank, unscheduled

TP2_SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
TP2_PP2 = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]


def test_three_steps_equal_plain_adamw(ranks, tmp_path):
    """Megatron's optimizer on scheduled shards against torch's AdamW on the HF model: all weights."""
    folder = tiny.save("qwen3", tmp_path)
    flags = [*TP2_PP2, "--clip-grad", "0.5", "--weight-decay", "0.1", "--adam-beta2", "0.95"]
    reports = ranks.run(4, train, folder, flags, iterations=3)
    model = hf_model(folder)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)
    for iteration in range(3):
        batches = batches_of(reports, iteration)
        optimizer.zero_grad()
        for tokens, labels in batches:
            (hf_loss(model, tokens, labels)[0] / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    weights = gather(reports, "weights", 2)
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=2e-5, atol=2e-6, msg=name)


RECOMPUTE = {
    "full-uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "full-block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "core-attn": "--recompute-granularity selective",
    "mlp": "--recompute-granularity selective --recompute-modules mlp core_attn",
}


@pytest.mark.parametrize(
    ("family", "sp"), [("gpt2", True), slow("gpt2", False), slow("opt", True), slow("opt", False)]
)
def test_recompute_by_flags_changes_no_bit_even_with_dropout(ranks, tmp_path, family, sp):
    dropout = (
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
        if family == "gpt2"
        else {"dropout": 0.1, "attention_dropout": 0.1}
    )
    folder = tiny.save(family, tmp_path, **dropout)
    layout = TP2_SP if sp else ["--tensor-model-parallel-size", "2"]
    plain = ranks.run(2, train, folder, layout, iterations=2)
    for name, flags in RECOMPUTE.items():
        if family == "opt" and name == "mlp":
            continue  # OPT has no MLP module of its own; that this is refused is tested below
        again = ranks.run(2, train, folder, [*layout, *flags.split()], iterations=2)
        assert losses(again) == losses(plain), name
        for one, other in zip(plain, again, strict=True):
            assert one.grad_norms == other.grad_norms, name
            for key, (gradient, _) in one.gradients.items():
                assert torch.equal(gradient, other.gradients[key][0]), (name, key)


def test_recompute_of_what_a_definition_has_not_is_refused(ranks, tmp_path):
    folder = tiny.save("opt", tmp_path)
    flags = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    with pytest.raises(RankError, match="OPTDecoderLayer has no MLP module of its own"):
        ranks.run(1, train, folder, flags, iterations=1)


def test_dropout_differs_between_tensor_parallel_ranks_only_where_activations_are_sharded(ranks, tmp_path):
    """Replicated weights stay replicated: their gradients agree on both ranks, bit for bit, without SP."""
    folder = tiny.save("gpt2", tmp_path, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    first, second = ranks.run(2, train, folder, ["--tensor-model-parallel-size", "2"], iterations=1)
    replicated = [name for name, (_, placement) in first.gradients.items() if not placement.sharded]
    assert "transformer.h.0.ln_1.weight" in replicated
    for name in replicated:
        assert torch.equal(first.gradients[name][0], second.gradients[name][0]), name
    plain = ranks.run(1, train, tiny.save("gpt2", tmp_path / "plain"), [], iterations=1)
    assert losses([first, second])[0] != losses(plain)[0]


@pytest.mark.parametrize(
    ("world", "flags"), [slow(1, []), slow(2, TP2_SP), (2, [*TP2_SP, "--use-distributed-optimizer"])]
)
def test_bf16_stays_near_float32(ranks, tmp_path, world, flags):
    folder = tiny.save("llama", tmp_path)
    exact = one_rank(ranks, folder, iterations=3)
    reports = ranks.run(world, train, folder, [*flags, "--bf16"], iterations=3)
    torch.testing.assert_close(losses(reports), losses(exact), rtol=2e-2, atol=0)


def test_fp16_with_dynamic_loss_scale_stays_near_float32(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    exact = one_rank(ranks, folder, iterations=3)
    flags = ["--tensor-model-parallel-size", "2", "--fp16", "--initial-loss-scale", "1024"]
    reports = ranks.run(2, train, folder, flags, iterations=3)
    torch.testing.assert_close(losses(reports), losses(exact), rtol=2e-2, atol=0)


def _seen_by_the_wrapper(folder: str) -> dict[str, object]:
    """A run's rotary table before Megatron casts the model to bf16, and after; dtypes of the weights after."""
    from megatron.core.transformer.module import Float16Module

    seen: dict[str, object] = {}
    wrap = Float16Module.__init__

    def watched(wrapper, config, module):
        seen["before"] = module.definition.model.rotary_emb.inv_freq.clone()
        wrap(wrapper, config, module)
        seen["after"] = module.definition.model.rotary_emb.inv_freq.clone()
        seen["weights"] = {parameter.dtype for parameter in module.parameters()}

    with mock.patch.object(Float16Module, "__init__", watched):
        train(folder, ["--bf16"], iterations=1)
    return seen


def test_float16_wrapper_casts_weights_but_no_rotary_table(ranks, tmp_path):
    (seen,) = ranks.run(1, _seen_by_the_wrapper, tiny.save("llama", tmp_path))
    assert seen["weights"] == {torch.bfloat16}
    assert seen["after"].dtype == torch.float32
    assert torch.equal(seen["after"], seen["before"])
    assert not torch.equal(seen["after"].bfloat16().float(), seen["after"])


STAGES = {
    "uneven": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
    "empty-stage": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett||tt|L",
    "loss-alone": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|L",
    "embedding-and-loss-alone": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|tt|tt|L",
}


OF_STAGES = [("gpt2", False), ("qwen3", True), ("qwen3", False), ("gpt2", True)]


@pytest.mark.parametrize(("name", "model"), spread(STAGES, OF_STAGES))
def test_every_form_of_stage(ranks, tmp_path, name, model):
    family, sp = model
    folder = tiny.save(family, tmp_path / family)
    flags = [*STAGES[name].split(), *(TP2_SP if sp else [])]
    reports = ranks.run(4 if sp else 2, train, folder, flags, iterations=2)
    assert_same_losses(reports, one_rank(ranks, folder))


def test_cuts_of_the_schedule_are_honoured(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    schedule = tmp_path / "cut.py"
    schedule.write_text('def schedule(sch, layout):\n    sch["model.layers.0"].cut_pipeline_stage()\n')
    flags = ["--pipeline-model-parallel-size", "2"]
    reports = ranks.run(2, train, folder, flags, iterations=2, schedule=str(schedule))
    assert_same_losses(reports, one_rank(ranks, folder))
    layers = {r.pp_rank: {n.split(".")[2] for n in r.gradients if n.startswith("model.layers")} for r in reports}
    assert layers == {0: {"0"}, 1: {"1", "2", "3"}}


@pytest.mark.parametrize(("family", "sp"), spread(["llama", "qwen3"], [False, True]))
def test_kv_heads_fewer_than_ranks_are_replicated_exactly(ranks, tmp_path, family, sp):
    """4 TP ranks share 2 KV heads; gradients of the whole projection come out right."""
    folder = tiny.save(family, tmp_path)
    flags = ["--tensor-model-parallel-size", "4", *(["--sequence-parallel"] if sp else [])]
    reports = ranks.run(4, train, folder, flags, iterations=2)
    expected = unscheduled(ranks, folder, reports, random_init=True)
    assert reports[0].grad_norms[0] == pytest.approx(expected.grad_norm, rel=1e-5)
    gradients = gather(reports, "gradients", 4)
    for name, wanted in expected.gradients.items():
        assert relative(gradients[name], wanted) < 1e-5, name


DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


def test_overlapped_communication_gives_the_same(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    flags = ["--tensor-model-parallel-size", "2", *DISTRIBUTED]
    reports = ranks.run(4, train, folder, flags, iterations=3)
    assert_same_losses(reports, one_rank(ranks, folder, iterations=3))


def test_a_product_waits_for_all_of_its_parameters(ranks, tmp_path):
    """Each parameter is in a bucket of its own, which is gathered when a module that has it is called."""
    folder = tiny.save("llama", tmp_path)
    reports = ranks.run(2, train, folder, [*DISTRIBUTED, "--ddp-bucket-size", "1"], iterations=3)
    assert_same_losses(reports, one_rank(ranks, folder, iterations=3))


# Reads the weight of a linear that it doesn't call.
READS = """
class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.read = nn.Conv1d(config.hidden_size, 1, 1, bias=False)

    def forward(self, x):
        return self.up(x) * self.read.weight[0, :, 0]
"""


def test_code_waits_for_weights_that_it_reads_without_a_call(ranks, tmp_path):
    folder = remote.write(tmp_path / "model", READS)
    flags = ["--trust-remote-code", "--lr", "0.01"]
    reports = ranks.run(2, train, folder, [*flags, *DISTRIBUTED, "--ddp-bucket-size", "1"], iterations=3)
    assert_same_losses(reports, ranks.run(1, train, folder, flags, iterations=3))


def _products(folder, flags):
    """Products of joint columns in a run, and those that each column did on its own."""
    from tests.layers.test_fused_columns import Counted

    with Counted() as counted:
        report = train(folder, flags, iterations=2)
    return report, counted.done, counted.left


@pytest.mark.parametrize(
    ("family", "flags", "shared"),
    [
        slow("llama", [], True),
        ("llama", DISTRIBUTED, True),
        slow("llama", ["--bf16", *DISTRIBUTED], True),
        # The distributed optimizer's buffers hold each bias between two weights.
        ("opt", DISTRIBUTED, False),
    ],
)
def test_columns_stay_joined_in_megatrons_buffers(ranks, tmp_path, family, flags, shared):
    folder = tiny.save(family, tmp_path)
    found = ranks.run(4, _products, folder, ["--tensor-model-parallel-size", "2", *flags])
    for _, done, left in found:
        assert (done > 0, left == 0) == (shared, shared)
    if "--bf16" not in flags:
        plain = ranks.run(2, train, folder, ["--tensor-model-parallel-size", "2"], iterations=2)
        torch.testing.assert_close(losses([report for report, _, _ in found]), losses(plain), rtol=2e-6, atol=0)
