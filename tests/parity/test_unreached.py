"""Parameters that have no part in the loss: as plain HF and AdamW leave them, at every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import batches_of, gather, losses, train
from tests.parity.cases import slow
from tests.parity.steps import RUN, SAVE
from tests.parity.test_resume import keys_of

STEPS = 3
TOWER = "model.vision_tower."
LAYOUTS = {
    "overlap": (2, 1, "--overlap-grad-reduce --use-distributed-optimizer"),
    "pp2": (2, 1, "--pipeline-model-parallel-size 2"),
    "tp2": (2, 2, "--tensor-model-parallel-size 2"),
    "one-rank": (1, 1, ""),
}


def hf_steps(folder: str, batches: list[Any]) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Losses, weights and the names of what has no gradient: the HF model alone with torch's AdamW, as Megatron's
    flags have it by default."""
    from megasched.trainer.weight_decay import spared_names
    from megasched.verify.reference import hf_loss, hf_model

    model, seen = hf_model(folder), []
    spared = spared_names(model)
    plain = [p for name, p in model.named_parameters() if p.dim() == 1 or name in spared]
    others = [p for p in model.parameters() if all(p is not one for one in plain)]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-5)
    for step in batches:
        optimizer.zero_grad()
        found = [hf_loss(model, *batch)[0] for batch in step]
        (sum(found) / len(found)).backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(float(sum(found).detach()) / len(found))
    return seen, {name: p.detach() for name, p in model.named_parameters()}, unused


@pytest.mark.parametrize("layout", ["overlap", slow("pp2"), slow("tp2"), slow("one-rank")])
def test_a_tower_that_gets_no_images_stays_as_it_is(ranks, small_models, layout):
    """Decayed by Megatron, it would be another one; waited for, the second step would fail. Two stages are in the
    next test, too."""
    folder, (world, tp, flags) = small_models("gemma3"), LAYOUTS[layout]
    reports = ranks.run(world, train, folder, [*flags.split(), *RUN], iterations=STEPS)
    batches = [batches_of(reports, step) for step in range(STEPS)]
    ((expected, weights, unused),) = ranks.run(1, hf_steps, folder, batches)
    assert len(unused) == 50
    assert {name for name in unused if not name.startswith(TOWER)} == {
        "model.multi_modal_projector.mm_input_projection_weight",
        "model.multi_modal_projector.mm_soft_emb_norm.weight",
    }
    torch.testing.assert_close(losses(reports), expected, rtol=1e-5, atol=0)
    found = gather(reports, "weights", tp)
    assert found.keys() >= weights.keys()
    for name, wanted in weights.items():
        if name in unused:
            assert torch.equal(found[name], wanted), name
        else:
            torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_checkpoints_have_its_weights_and_no_optimizer_state(ranks, small_models, tmp_path):
    """Written at one layout, resumed at another, and exported."""
    from tests.faults.checkpoints import exported

    folder, save = small_models("gemma3"), tmp_path / "ckpt"
    saving = [*LAYOUTS["pp2"][2].split(), *RUN, *SAVE]
    whole = ranks.run(2, train, folder, saving, iterations=2)
    ranks.run(2, train, folder, [*saving, "--save", str(save), "--save-interval", "1"], iterations=1)
    keys = keys_of(save / "iter_0000001")
    tower = [name for name in keys if name.startswith(TOWER)]
    assert len(tower) == 48
    states = [name for name in keys if name.startswith("optimizer.")]
    assert any("language_model" in name for name in states)
    assert not any(TOWER in name for name in states)
    resumed = ranks.run(1, train, folder, [*RUN, *SAVE, "--load", str(save)], iterations=2)
    torch.testing.assert_close(losses(resumed), losses(whole)[1:], rtol=2e-6, atol=0)
    out = exported(save, tmp_path / "out", folder)
    ((weights),) = ranks.run(1, hf_weights, str(out))
    trained = gather(resumed, "weights", 1)
    for name in tower:
        assert torch.equal(weights[name], trained[name]), name


def hf_weights(folder: str) -> dict[str, torch.Tensor]:
    from megasched.verify.reference import hf_model

    return {name: p.detach() for name, p in hf_model(folder, random_init=False).named_parameters()}


def train_all(*given: Any, **options: Any) -> Any:
    """A run that trains what it does not reach, as all did once."""
    from unittest.mock import patch

    from megasched.trainer.session import Session

    with patch.object(Session, "freeze_unreached"):
        return train(*given, **options)


def test_a_checkpoint_with_optimizer_states_of_all(ranks, small_models, tmp_path):
    """What is not trained any more is passed over."""
    folder, flags, save = small_models("gemma3"), [*RUN, *SAVE], tmp_path / "ckpt"
    ranks.run(2, train_all, folder, [*flags, "--save", str(save), "--save-interval", "1"], iterations=1)
    whole = ranks.run(2, train_all, folder, flags, iterations=2)
    resumed = ranks.run(2, train, folder, [*flags, "--load", str(save)], iterations=2)
    torch.testing.assert_close(losses(resumed), losses(whole)[1:], rtol=2e-6, atol=0)


@pytest.mark.slow
def test_states_that_lie_as_gradients_did_are_refused_with_the_remedy(ranks, small_models, tmp_path):
    flags, save = [*RUN, "--use-distributed-optimizer", "--ckpt-format", "torch_dist"], tmp_path / "ckpt"
    flags += ["--override-opt-param-scheduler"]
    folder = small_models("gemma3")
    ranks.run(2, train_all, folder, [*flags, "--save", str(save), "--save-interval", "1"], iterations=1)
    with pytest.raises(RankError, match=r"the same trained parameters alone\. Resume it with --no-load-optim"):
        ranks.run(2, train, folder, [*flags, "--load", str(save)], iterations=2)
    (report, _) = ranks.run(2, train, folder, [*flags, "--load", str(save), "--no-load-optim"], iterations=2)
    assert report.iterations == 1
