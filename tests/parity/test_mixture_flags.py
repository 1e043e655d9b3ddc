"""Megatron's flags of small_models, on layers that are its own; what they add is added to the HF model, too."""

from __future__ import annotations

import pytest
import torch

from megasched.definition.small_models.shrink import TOKENS
from megasched.verify.parity import CheckedLayout, compare
from megasched.verify.ranks.pool import RankError
from megasched.verify.reference import HfStep, hf_loss, hf_model
from megasched.verify.trainer_run import batches_of, train
from tests.parity.cases import slow
from tests.parity.instances import instances_of
from tests.parity.mixtures import LAYOUTS
from tests.parity.steps import RUN, run

COEFFICIENT = 0.1
Z_COEFFICIENT = 0.01
RATE = 0.05


def _scores(logits, kind):
    if kind == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)


def _shares(scores, chosen):
    """Of the choices, each expert's."""
    counts = torch.nn.functional.one_hot(scores.topk(chosen).indices, scores.shape[-1]).sum((0, 1))
    return counts / (chosen * len(scores))


def _balance(logits, kind, chosen, shares=None):
    """Experts times the sum over them of their share of the choices and their mean score (arXiv 2101.03961)."""
    scores = _scores(logits, kind)
    shares = _shares(scores, chosen) if shares is None else shares
    return scores.shape[-1] * (shares * scores.mean(0)).sum()


def _by_sequence(logits, kind, chosen, sequences):
    return torch.stack([_balance(part, kind, chosen) for part in logits.chunk(sequences)]).mean()


def _reference(folder, batches, kind, added):
    """The unscheduled model's step with losses of its routers added; and how often each expert is chosen."""
    model = hf_model(folder, random_init=False)
    routed: list[tuple] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for gate in gates:
        gate.register_forward_hook(lambda module, args, output: routed.append(output))
    losses, seen, total = [], [], 0.0
    counts, shares = torch.zeros(len(gates), 4), torch.zeros(len(gates), 4)
    for number, (tokens, labels) in enumerate(batches, start=1):
        routed.clear()
        loss, logits_of_model = hf_loss(model, tokens, labels)
        losses.append(loss.item())
        seen.append(logits_of_model.detach())
        for layer, output in enumerate(routed):
            logits, chosen = output[0].float(), output[2]
            counts[layer] += torch.nn.functional.one_hot(chosen, 4).sum((0, 1))
            if "aux_loss" in added:
                loss = loss + COEFFICIENT * _balance(logits, kind, chosen.shape[-1])
            if "seq_aux_loss" in added:
                loss = loss + COEFFICIENT * _by_sequence(logits, kind, chosen.shape[-1], len(tokens))
            if "global_aux_loss" in added:  # by the shares in all micro-batches so far
                shares[layer] += _shares(_scores(logits.detach(), kind), chosen.shape[-1])
                loss = loss + COEFFICIENT * _balance(logits, kind, chosen.shape[-1], shares[layer] / number)
            if "z_loss" in added:
                loss = loss + Z_COEFFICIENT * logits.logsumexp(-1).square().mean()
        total = total + loss / len(batches)
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return HfStep(sum(losses) / len(losses), seen, gradients, norm), counts


AUX = f"--moe-aux-loss-coeff {COEFFICIENT} --moe-router-load-balancing-type"
ADDED = {
    "aux_loss": f"{AUX} aux_loss",
    "seq_aux_loss": f"{AUX} seq_aux_loss",
    "global_aux_loss": f"{AUX} global_aux_loss",
    "aux_loss and z_loss": f"{AUX} aux_loss --moe-z-loss-coeff {Z_COEFFICIENT}",
}


@pytest.mark.parametrize(
    ("model_type", "name", "added"),
    [("mixtral", "one", added) for added in ("seq_aux_loss", "global_aux_loss")]
    + [slow("mixtral", "one", added) for added in ("aux_loss", "aux_loss and z_loss")]
    + [("mixtral", name, "aux_loss and z_loss") for name in ("ep2-tp2-sp-dp2", "ep2-cp2")]
    + [slow("mixtral", "ep2-pp2", "aux_loss and z_loss")]
    + [slow("glm4_moe", "one", "aux_loss"), ("glm4_moe", "ep2-tp2-sp", "aux_loss")]
    # mixtures in layers that stay HF's
    + [slow("olmoe", name, "aux_loss and z_loss") for name in ("one", "ep2-pp2", "ep2-tp2-sp-dp2")]
    + [slow("olmoe", "ep2-tp2-sp", "aux_loss and z_loss"), ("olmoe", "one", "seq_aux_loss")]
    + [slow("minimax_m2", "ep2-tp2-sp", "aux_loss")],
)
def test_losses_of_routers_are_added(ranks, small_models, model_type, name, added):
    """Every gradient and the norm; the loss that is reported is the model's alone, as in Megatron."""
    layout, folder = LAYOUTS[name], small_models(model_type)
    reports = run(ranks, folder, layout, *ADDED[added].split())
    kind = "sigmoid" if model_type in ("glm4_moe", "minimax_m2") else "softmax"
    ((expected, _),) = ranks.run(1, _reference, folder, batches_of(reports), kind, added.split(" and "))
    outcome = compare(reports, expected, layout.tp)
    assert outcome.verdict == "equal", outcome.why
    plain = run(ranks, folder, layout)
    assert compare(plain, expected, layout.tp).verdict == "wrong"  # without them, it is another step


def _biases_of_run(folder, flags, schedule, iterations):
    """The persistent buffers that this rank has after a run."""
    from megasched.trainer.scheduled_model import ScheduledModel

    options = {"schedule": schedule, "random_init": False, "tokens": TOKENS}
    with instances_of(ScheduledModel) as models:
        report = train(folder, [*flags, *RUN], iterations=iterations, **options)
    return report, {
        name: value.clone() for model in models for name, value in model._buffers_saved.values().items()
    }


# Where a model has its routers' biases.
BIASES = {
    "glm4_moe": "model.layers.{}.mlp.gate.e_score_correction_bias",
    "minimax_m2": "model.layers.{}.mlp.e_score_correction_bias",
}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        slow("glm4_moe", "one"),
        slow("glm4_moe", "ep2-tp2-sp-dp2"),
        slow("glm4_moe", "tp2-sp-pp2-vpp2"),
        ("minimax_m2", "ep2-tp2-sp-dp2"),
        slow("minimax_m2", "tp2-sp-pp2-vpp2"),
    ],
)
def test_routers_are_balanced_by_their_bias(ranks, small_models, model_type, name):
    """By HF's name of the buffer. What is chosen too seldom is chosen sooner (arXiv 2408.15664), all tokens of the
    batch counted; the step itself is the definition's."""
    layout, folder = LAYOUTS[name], small_models(model_type)
    flags = [*layout.flags.split(), "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", str(RATE)]
    found = ranks.run(layout.world_size, _biases_of_run, folder, flags, "auto", 1)
    reports = [report for report, _ in found]
    ((expected, counts),) = ranks.run(1, _reference, folder, batches_of(reports), "sigmoid", [])
    assert compare(reports, expected, layout.tp).verdict == "equal"
    before = torch.linspace(-0.3, 0.3, 4)
    wanted = {
        BIASES[model_type].format(layer): before + RATE * (own.mean() - own).sign()
        for layer, own in enumerate(counts, start=4 - len(counts))
    }
    assert len(wanted) == (3 if model_type == "glm4_moe" else 4)
    held = [buffers for _, buffers in found]
    assert set().union(*held) == wanted.keys()
    for buffers in held:
        for key, value in buffers.items():
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-7, msg=key)


def test_without_the_flag_a_bias_stays(ranks, small_models, block):
    ((_, buffers),) = ranks.run(1, _biases_of_run, small_models("glm4_moe"), [], block(), 2)
    assert len(buffers) == 3
    for value in buffers.values():
        assert value.dtype == torch.float32
        assert torch.equal(value, torch.linspace(-0.3, 0.3, 4))


@pytest.mark.parametrize("level", ["fused", slow("block")])
def test_a_bias_is_saved_under_its_name_in_hf(ranks, small_models, block, tmp_path, level):
    """What one run has balanced, another goes on with, at whatever level."""
    folder, keep = small_models("glm4_moe"), ["--save", str(tmp_path), "--save-interval", "1"]
    balanced = ["--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", str(RATE)]
    ((_, saved),) = ranks.run(1, _biases_of_run, folder, [*balanced, *keep], block(), 1)
    flags = [*LAYOUTS["ep2-tp2-sp"].flags.split(), "--load", str(tmp_path), "--no-load-optim", "--no-load-rng"]
    found = ranks.run(2, _biases_of_run, folder, flags, block(level=level), 2)
    for _, buffers in found:
        assert buffers.keys() == saved.keys()
        assert all(torch.equal(buffers[name], value) for name, value in saved.items())


def _logged(folder, flags, schedule):
    """A run of one step, and the losses of routers that Megatron logs, by name."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    logged, clear = {}, MoEMetricsTracker.clear

    def cleared(tracker):
        logged.update({name: entry.values.clone() for name, entry in tracker.metrics.items()})
        clear(tracker)

    patch = pytest.MonkeyPatch()
    patch.setattr(MoEMetricsTracker, "clear", cleared)
    options = {"iterations": 1, "schedule": schedule, "random_init": False, "tokens": TOKENS}
    try:
        return train(folder, [*flags, *RUN], **options), logged
    finally:
        patch.undo()


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def test_a_recompute_neither_counts_nor_logs_what_a_router_does_again(ranks, small_models, block):
    """A stage runs forwards before the backward of the first: a loss of the shares so far is by those of then."""
    flags = f"--pipeline-model-parallel-size 2 {ADDED['global_aux_loss']} --moe-z-loss-coeff {Z_COEFFICIENT}"
    folder = small_models("mixtral")
    plain = ranks.run(2, _logged, folder, flags.split(), block())
    again = ranks.run(2, _logged, folder, [*flags.split(), *FULL.split()], block())
    for (one, logged), (other, logged_again) in zip(plain, again, strict=True):
        assert {"global_load_balancing_loss", "z_loss"} <= logged.keys()
        assert all(torch.equal(logged_again[name], value) for name, value in logged.items())
        for key, (gradient, _) in one.gradients.items():
            assert torch.equal(gradient, other.gradients[key][0]), key


def test_shared_experts_overlap(ranks, small_models, block):
    """They are computed while tokens are on their way; the same bits come out."""
    layout, folder = LAYOUTS["ep2-tp2-sp"], small_models("glm4_moe")
    flags = ["--moe-shared-expert-overlap", "--moe-token-dispatcher-type", "alltoall"]
    plain, other = (
        run(ranks, folder, layout, schedule=block()),
        run(ranks, folder, layout, *flags, schedule=block()),
    )
    assert other[0].losses == plain[0].losses
    for one, same in zip(plain, other, strict=True):
        for key, (gradient, _) in one.gradients.items():
            torch.testing.assert_close(same.gradients[key][0], gradient, rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize(
    ("model_type", "flags", "level", "reason"),
    [
        (
            "mixtral",
            "--moe-aux-loss-coeff 0.1",
            "fused",
            "--moe-aux-loss-coeff: Megatron's own mixtures .* not this",
        ),
        ("jamba", "--moe-z-loss-coeff 0.1", "fused", "layers.1.feed_forward.*"),
        ("mixtral", "--moe-router-enable-expert-bias", "block", "the definition's routers choose without a bias"),
        ("mixtral", "--moe-router-load-balancing-type sinkhorn", "block", "it chooses other experts"),
        ("mixtral", "--moe-router-topk 3", "block", "this part of the model is what the HF definition makes it"),
        ("llama", "--moe-z-loss-coeff 0.1", "block", "the model has none of the form that HF gives experts"),
    ],
)
def test_flags_that_say_nothing_here_are_refused(ranks, small_models, block, model_type, flags, level, reason):
    with pytest.raises(RankError, match=reason):
        run(ranks, small_models(model_type), CheckedLayout(1, 1, flags), schedule=block(level=level))
