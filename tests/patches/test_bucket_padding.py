"""Several padded buckets: masters and moments are bit for bit what they were, wherever a checkpoint is resumed."""

from types import SimpleNamespace

import pytest
import torch

from megasched.attributes import set_attribute
from megasched.errors import ConfigError
from megasched.patches import bucket_padding, registry
from tests.patches.mended import fault_is_there
from tests.patches.optimizer_states import STATES, TORCH, joined, loaded, saved

FULLY = "fully_reshardable"
FORMS = {
    "fully-reshardable": (FULLY, {}),
    "fully-reshardable-mem-efficient": (FULLY, {"distrib_optim_fully_reshardable_mem_efficient": True}),
    "dp-reshardable": ("dp_reshardable", {}),
    "gathered": ("dp_zero_gather_scatter", {}),
    "torch": (TORCH, {}),
}
PARAMETERS = ["module.down.bias", "module.down.weight", "module.up.bias", "module.up.weight"]


def other_than(before, after):
    assert sorted(before) == sorted(after) == sorted((name, key) for name in PARAMETERS for key in STATES)
    return {of for of in before if not torch.equal(before[of], after[of])}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_what_three_ranks_saved_comes_back_on_three_two_and_one(ranks, tmp_path, form, bf16):
    folder, (kind, metadata) = str(tmp_path / "checkpoint"), FORMS[form]
    before = joined(ranks.run(3, saved, folder, kind, bf16, **metadata))
    for world in (3, 2, 1):
        after = joined(ranks.run(world, loaded, folder, kind, bf16))
        assert other_than(before, after) == set(), world


def test_the_fault_is_still_there_without_the_patch(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    before = joined(ranks.run(3, saved, folder, FULLY, patched=False))
    after = joined(ranks.run(3, loaded, folder, FULLY))
    wrong = {(name, key) for name in PARAMETERS[2:] for key in STATES}
    assert other_than(before, after) == (wrong if fault_is_there("bucket_padding") else set())


@pytest.fixture
def megatron_writes(monkeypatch):
    """Puts another function in the place of Megatron's; returns what applies the patch then."""
    monkeypatch.setattr(registry, "_undos", {})
    undos = []

    def applied(function):
        undos.append(set_attribute(bucket_padding._TARGET, function))
        return registry.apply("bucket_padding")

    yield applied
    registry.undo("bucket_padding")
    undos.pop()()


def test_it_is_applied_where_the_fault_is_and_mends_it(monkeypatch):
    monkeypatch.setattr(registry, "_undos", {})
    unpatched = 0 if fault_is_there("bucket_padding") else 2
    assert bucket_padding.written_of_a_second_bucket() == unpatched
    assert registry.apply("bucket_padding") is (unpatched == 0)
    assert bucket_padding.written_of_a_second_bucket() == 2
    registry.undo("bucket_padding")
    assert bucket_padding.written_of_a_second_bucket() == unpatched


def test_it_steps_aside_where_megatron_has_mended_it(megatron_writes):
    def mended(self, model_sharded_state_dict, is_loading=False, metadata=None):
        (gathered,) = self.get_parameter_state_dp_zero()
        of_first, of_second = gathered["float32"]["param"][:2]
        return {0: {"param": SimpleNamespace(data=of_first)}, 1: {"param": SimpleNamespace(data=of_second)}}

    assert megatron_writes(mended) is False
    assert registry.active() == []


def test_it_refuses_what_it_does_not_know(megatron_writes):
    def other(self, model_sharded_state_dict, is_loading=False, metadata=None):
        return self.unknown

    with pytest.raises(ConfigError, match=r"can't tell .* right.*failed on two small buckets \(AttributeError"):
        megatron_writes(other)
