"""Resume with torch's AdamW: each fault is there without the patch, and gone with it.

When one of these fails because the fault is gone, that part of the patch is no longer needed.
"""

import pytest
import torch

from megasched.patches import adamw_resume, apply, undo
from megasched.verify.ranks.pool import init_megatron
from tests.patches.optimizer_case import adam_steps, build, inner, resume, train


def fresh_state_dict():
    init_megatron()
    undo("adamw_resume")
    _, optimizer = build()
    with pytest.raises(AssertionError):
        inner(optimizer).state_dict()
    assert apply("adamw_resume")
    _, optimizer = build()
    return [group["step"] for group in inner(optimizer).state_dict()["optimizer"]["param_groups"]]


def step_is_not_in_the_checkpoint():
    init_megatron()
    undo("adamw_resume")
    ddp, optimizer = build()
    train(ddp, optimizer, 1)
    dist = inner(optimizer)
    param = next(param for param in ddp.parameters() if param in dist.model_param_group_index_map)
    loaded = {key: value + 1 for key, value in dist._get_main_param_and_optimizer_states(param).items()}
    loaded["step"] = torch.tensor(99.0)
    without_step = {key: value for key, value in loaded.items() if key != "step"}
    with torch.no_grad(), pytest.raises(KeyError, match="step"):
        dist._set_main_param_and_optimizer_states(param, without_step)
    assert apply("adamw_resume")
    with torch.no_grad():
        dist._set_main_param_and_optimizer_states(param, without_step)
        dist._set_main_param_and_optimizer_states(param, loaded)
    now = dist._get_main_param_and_optimizer_states(param)
    assert all(torch.equal(now[key], loaded[key]) for key in without_step)
    return now["step"].item()


def shared_step():
    counts = []
    init_megatron()
    for patched in (False, True):
        (apply if patched else undo)("adamw_resume")
        ddp, optimizer = build()
        train(ddp, optimizer, 1)
        dist = inner(optimizer)
        dist.load_state_dict(dist.state_dict())
        train(ddp, optimizer, 1, first=1)
        counts.append(set(adam_steps(optimizer)))
    return counts


def test_a_fresh_optimizer_has_a_state_dict(ranks):
    assert ranks.run(1, fresh_state_dict) == [[0.0, 0.0]]


def test_the_step_of_the_parameter_groups_stays(ranks):
    assert ranks.run(1, step_is_not_in_the_checkpoint) == [1.0]


def test_each_parameter_counts_its_own_steps(ranks):
    # Four parameters share the tensor: 1 + 4 instead of 2.
    assert ranks.run(1, shared_step) == [[{5.0}, {2.0}]]


@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(ranks, tmp_path, kind, bf16):
    for weights, resumed, steps, resumed_steps in ranks.run(2, resume, str(tmp_path / "checkpoint"), kind, bf16):
        assert torch.equal(weights, resumed)
        assert set(steps) == set(resumed_steps) == {5.0}


def test_an_optimizer_of_te_or_apex_does_not_need_it(monkeypatch):
    from megatron.core.optimizer import distrib_optimizer

    assert adamw_resume._unneeded() is None
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    assert "provides Adam" in adamw_resume._unneeded()
