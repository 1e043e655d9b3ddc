"""LoRA at every layout against PEFT around the unscheduled HF model, in one process."""

from __future__ import annotations

import pytest
import torch

from megasched.verify.lora import telling_adapters
from megasched.verify.reference import hf_loss, hf_model, relative
from megasched.verify.trainer_run import batches_of, gather, logits_of, losses, train
from megasched.weights import lora as weights_lora
from tests import tiny
from tests.parity.cases import case, slow, spread
from tests.parity.test_resume import SAVE, keys_of

ITERATIONS = 2
SEED = 1234
SCHEDULE = """
from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout, dropout=0.0):
    auto(sch, layout)
    sch.role("qkv.*").adapt(rank=4, alpha=8, dropout=dropout)
    sch.role("attn.out").adapt(rank=4, alpha=8, dropout=dropout)
    sch.role("mlp.*").adapt(rank=2, alpha=3, dropout=dropout)


def first_layer(sch, layout):
    auto(sch, layout)
    sch["model.layers.0"].role("qkv.*").adapt(rank=4, alpha=8)


def ends(sch, layout):
    auto(sch, layout)
    sch["model.layers.0.self_attn.k_proj"].adapt(rank=4, alpha=8, use_rslora=True)
    sch["lm_head"].adapt(rank=4, alpha=8, use_rslora=True)
    sch["model.norm"].unfreeze()
"""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "attn.c_attn", "attn.c_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "mlp.c_fc", "mlp.c_proj")
DISTRIBUTED = "--use-distributed-optimizer"
WIDE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "one": (1, 1, ""),
    "tp2": (2, 2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, 1, f"--pipeline-model-parallel-size 2 {DISTRIBUTED}"),
    "dp2-tp2-sp": (4, 2, f"--tensor-model-parallel-size 2 --sequence-parallel {DISTRIBUTED}"),
    "tp2-sp-pp2-vpp2": (4, 2, f"{WIDE} --sequence-parallel {DISTRIBUTED}"),
}
CASES = [
    *(case("llama", layout, fast=layout == "tp2-sp") for layout in LAYOUTS),
    *spread(("qwen3", "phi3", "gpt2"), ("tp2", "tp2-sp-pp2-vpp2")),
]


@pytest.fixture
def schedule(tmp_path):
    path = tmp_path / "lora.py"
    path.write_text(SCHEDULE)
    return str(path)


def run(folder, flags, schedule, iterations=ITERATIONS):
    """In a rank: every gradient of the first step is one, those of ``lora_A``, too."""
    with telling_adapters():
        return train(folder, flags.split(), iterations=iterations, schedule=schedule)


def peft_model(folder):
    """PEFT's model of the adapters of ``schedule``."""
    model = hf_model(folder)
    known = [path for path, _ in model.named_modules()]
    targets = dict.fromkeys(ATTENTION, (4, 8)) | dict.fromkeys(MLP, (2, 3))
    targets = {name: sizes for name, sizes in targets.items() if any(path.endswith(name) for path in known)}
    return with_adapters(
        model,
        target_modules=list(targets),
        rank_pattern={name: rank for name, (rank, _) in targets.items()},
        alpha_pattern={name: alpha for name, (_, alpha) in targets.items()},
        fan_in_fan_out=any(path.endswith("c_attn") for path in known),
    )


def with_adapters(model, **settings):
    """PEFT's model around one of HF's, with the values that ours start with."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(**settings))
    with telling_adapters(), torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(weights_lora.initial_value(hf_name(name), tuple(parameter.shape), SEED))
    return made.train()


def hf_name(name):
    """HF's name of a parameter of PEFT's model."""
    for peft in ("base_model.model.", "default.", "base_layer.", "modules_to_save."):
        name = name.replace(peft, "")
    return name


def trained(model):
    return {hf_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_lora_equals_peft(ranks, tmp_path, schedule, family, layout):
    folder = tiny.save(family, tmp_path / "model")
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, run, folder, flags, schedule)
    assert_equals_peft(reports, tp, peft_model(folder))


def assert_equals_peft(reports, tp, model):
    """Losses, logits, gradients and their norm, and what the optimizer makes of them."""
    own = trained(model)
    groups = [[p for p in own.values() if (p.dim() == 1) is flat] for flat in (False, True)]
    groups = [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-5)
    gradients = gather(reports, "gradients", tp)
    for iteration in range(ITERATIONS):
        outcomes = [hf_loss(model, *batch) for batch in batches_of(reports, iteration)]
        optimizer.zero_grad()
        loss = sum(loss for loss, _ in outcomes) / len(outcomes)
        loss.backward()
        assert losses(reports)[iteration] == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(own.values(), 1e9).item()
        found = [report.grad_norms[iteration] for report in reports]
        assert found == pytest.approx([norm] * len(reports), rel=1e-5)
        if not iteration:
            for got, (_, logits) in zip(logits_of(reports), outcomes, strict=True):
                assert relative(got, logits.detach()) < 1e-5
            if not any(report.dp_rank for report in reports):  # of a distributed optimizer's each has a part
                assert {name for name, gradient in gradients.items() if gradient.any()} == set(own)
                for name, parameter in own.items():
                    assert relative(gradients[name], parameter.grad, 1e-6) < 2e-5, name
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        optimizer.step()
    expected = {hf_name(name): parameter.detach() for name, parameter in model.named_parameters()} | own
    for name, weight in gather(reports, "weights", tp).items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_only_the_first_stage_is_trained(ranks, tmp_path, schedule):
    """No chunk after the first has a trained parameter, and the optimizer of the last rank has nothing to do."""
    folder = tiny.save("llama", tmp_path / "model")
    flags = f"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {DISTRIBUTED}"
    reports = ranks.run(2, run, folder, flags, f"{schedule}:first_layer")
    targets = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    assert_equals_peft(reports, 1, with_adapters(hf_model(folder), r=4, lora_alpha=8, target_modules=targets))


@pytest.mark.parametrize("flags", ["", slow("--pipeline-model-parallel-size 2 --sequence-parallel")])
def test_a_replicated_head_the_vocabulary_and_a_norm(ranks, tmp_path, schedule, flags):
    """More TP ranks than heads of k; a head that is padded; a parameter trained beside the adapters."""
    folder = tiny.save("llama", tmp_path / "model", num_key_value_heads=1)
    flags = f"--tensor-model-parallel-size 2 {flags}"
    reports = ranks.run(4 if "pipeline" in flags else 2, run, folder, flags, f"{schedule}:ends")
    settings = {"r": 4, "lora_alpha": 8, "use_rslora": True, "modules_to_save": ["model.norm"]}
    settings["target_modules"] = ["model.layers.0.self_attn.k_proj", "lm_head"]
    assert_equals_peft(reports, 2, with_adapters(hf_model(folder, num_key_value_heads=1), **settings))


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def test_recompute_changes_no_bit_even_with_dropout(ranks, tmp_path, schedule):
    """The embedding is frozen, so that nothing which enters the first layer carries a gradient."""
    folder = tiny.save("llama", tmp_path / "model")
    world, _, flags = LAYOUTS["tp2-sp"]
    flags, options = flags.split(), {"iterations": ITERATIONS, "schedule": f"{schedule}:dropout=0.2"}
    plain = ranks.run(world, train, folder, flags, **options)
    again = ranks.run(world, train, folder, [*flags, *RECOMPUTE.split()], **options)
    assert losses(again) == losses(plain)
    for one, other in zip(plain, again, strict=True):
        assert any(gradient.any() for gradient, _ in one.gradients.values())
        for name, (gradient, _) in one.gradients.items():
            assert torch.equal(gradient, other.gradients[name][0]), name


def run_with_dropout(folder, flags, schedule, p):
    """In a rank; the start is that of ``run``."""
    from torch import nn

    from megasched.lowering import lora as adapting

    with telling_adapters():
        adapting.make_dropout = lambda lora: nn.Dropout(p)
        return train(folder, flags.split(), iterations=1, schedule=schedule)


def test_tp_ranks_drop_the_same_of_what_all_of_them_read(ranks, tmp_path, schedule):
    """The gradient of ``lora_A`` of a column is whole on each rank, so the ranks must have dropped the same."""
    folder = tiny.save("llama", tmp_path / "model")
    world, _, flags = LAYOUTS["tp2"]
    one, other = (report.gradients for report in ranks.run(world, run_with_dropout, folder, flags, schedule, 0.2))
    (still, _) = (report.gradients for report in ranks.run(world, run, folder, flags, schedule, 1))
    whole = [name for name in one if name.endswith("q_proj.lora_A.weight")]
    assert len(whole) == 4
    for name in whole:
        assert torch.equal(one[name][0], other[name][0]), name
        assert relative(one[name][0], still[name][0]) > 1e-2, name


def test_resume_at_another_layout(ranks, tmp_path, schedule):
    """Adapters, the frozen weights and the optimizer's states of the adapters alone."""
    folder, common = tiny.save("phi3", tmp_path / "model"), " ".join(SAVE)
    wide = f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {common}"
    whole = ranks.run(4, run, folder, wide, schedule, iterations=4)
    place = tmp_path / "ckpt"
    ranks.run(4, run, folder, f"{wide} --save {place} --save-interval 2", schedule, iterations=2)
    expected = gather(whole, "weights", 2)
    for world, tp, flags in ((1, 1, ""), (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel")):
        resumed = ranks.run(world, run, folder, f"{flags} {common} --load {place}", schedule, iterations=4)
        torch.testing.assert_close(losses(resumed), losses(whole)[2:], rtol=2e-6, atol=0)
        for name, weight in gather(resumed, "weights", tp).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    keys = keys_of(place / "iter_0000002")
    path = "model.layers.0.self_attn.qkv_proj"
    shapes = {"weight": [64, 32], "lora_A.weight": [4, 32], "lora_B.weight": [64, 4]}
    found = {name.removeprefix(f"{path}."): size for name, size in keys.items() if name.startswith(path)}
    assert found == shapes
    states = {key.rpartition("exp_avg.")[2] for key in keys if "exp_avg." in key}
    assert states == {name for name in expected if ".lora_" in name}
