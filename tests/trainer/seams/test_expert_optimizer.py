"""What one optimizer has written is handed to two, and the other way; see also tests/parity/test_resume.py."""

from __future__ import annotations

import pytest

from megasched.trainer.seams.expert_optimizer import as_for

FORMAT = {"param_state_sharding_type": "fully_reshardable"}


def groups(*of_experts):
    return {"param_groups": [{"wd_mult": 1.0, "step": 3, "is_expert_parallel": one} for one in of_experts]}


ONE = {"optimizer": groups(False), "grad_scaler": {"scale": 8.0}, **FORMAT}
TWO = {number: {"optimizer": groups(bool(number)), **FORMAT} for number in (0, 1)}
BOTH = sorted([False, True])


def kinds(one):
    return sorted({group["is_expert_parallel"] for group in one["optimizer"]["param_groups"]})


def test_two_get_what_one_has_written_each_with_its_own_states():
    found = as_for(2, {**ONE, 0: {"param_state": "dense"}, 1: {"param_state": "experts"}})
    assert [found[number]["param_state"] for number in found] == ["dense", "experts"]
    assert [kinds(one) for one in found.values()] == [BOTH, BOTH]
    assert all(one["grad_scaler"] == ONE["grad_scaler"] for one in found.values())


def test_one_that_is_empty_on_a_stage_gets_groups_alone():
    found = as_for(2, {**ONE, 0: {"param_state": "dense"}})
    assert "param_state" not in found[1]
    assert kinds(found[1]) == BOTH


def test_one_gets_what_two_have_written():
    found = as_for(1, {**TWO, "param_state": "all"})
    assert found["param_state"] == "all"
    assert kinds(found) == BOTH
    assert {group["step"] for group in found["optimizer"]["param_groups"]} == {3}


@pytest.mark.parametrize(
    ("count", "loaded"),
    [
        pytest.param(1, {**ONE, "param_state": "all"}, id="one"),
        pytest.param(2, TWO, id="two"),
        pytest.param(2, {"state": {}, "param_groups": []}, id="plain"),
        pytest.param(2, {"optimizer": groups(False), "param_state_sharding_type": "dp_reshardable"}, id="bound"),
    ],
)
def test_all_else_stays_as_it_was_loaded(count, loaded):
    assert as_for(count, loaded) is loaded
