"""A model in half precision with a parameter in float32: its optimizer's states come back from a checkpoint."""

from pathlib import Path

import pytest
import torch

from megasched.attributes import set_attribute
from megasched.errors import ConfigError
from megasched.patches import apply, float32_numbers, registry, undo
from megasched.verify.ranks.pool import init_megatron
from tests.patches.mended import fault_is_there
from tests.patches.optimizer_case import build, checkpoint, inner, train, weights

FORMS = {"float32_numbers": False, "float32_places": True}  # patch -> whether the optimizer is distributed
KIND = "fully_reshardable"


def resumed(name, folder, patched):
    """Moments and weights after 2 + 1 steps, without and with a checkpoint between."""
    init_megatron()
    (apply if patched else undo)(name)
    options = {"bf16": True, "distributed": FORMS[name], "float32": "down.bias"}
    ddp, optimizer = build(**options)
    train(ddp, optimizer, 2)
    Path(folder).mkdir()
    checkpoint(ddp, optimizer, folder, KIND, is_loading=False)
    before = {key: value.clone() for key, value in ddp.module.state_dict().items() if value is not None}

    again, fresh = build(**options)
    again.module.load_state_dict(before, strict=False)
    fresh.reload_model_params()
    checkpoint(again, fresh, folder, KIND, is_loading=True)
    for model, its in ((ddp, optimizer), (again, fresh)):
        train(model, its, 1, first=2)
    return weights(ddp), weights(again), _moments(optimizer), _moments(fresh)


def _moments(optimizer):
    return torch.cat([state["exp_avg"].flatten() for state in inner(optimizer).optimizer.state.values()])


@pytest.mark.parametrize("name", FORMS)
def test_states_come_back(ranks, tmp_path, name):
    ((whole, again, moments, loaded),) = ranks.run(1, resumed, name, str(tmp_path / "checkpoint"), True)
    assert torch.equal(whole, again)
    assert torch.equal(moments, loaded)


def resumed_unpatched(name, folder):
    """Whether it came to another end than without a checkpoint."""
    try:
        whole, again, *_ = resumed(name, folder, patched=False)
    except (KeyError, ValueError, RuntimeError):  # there is no state for it, or that of one of another size
        return True
    return not torch.equal(whole, again)


@pytest.mark.parametrize("name", FORMS)
def test_the_fault_is_still_there_without_the_patch(ranks, tmp_path, name):
    assert ranks.run(1, resumed_unpatched, name, str(tmp_path / "checkpoint")) == [fault_is_there(name)]


def test_it_steps_aside_where_megatron_numbers_all():
    """As core 0.20 does: the state of each number is that of the inner optimizer's parameter."""
    registry.undo("float32_numbers")
    if not fault_is_there("float32_numbers"):
        assert "numbers the parameters in float32" in float32_numbers._unneeded()
        return
    assert float32_numbers._unneeded() is None
    unpatched = registry.resolve(float32_numbers._SHARDED)

    def mended(self, model, is_loading=False, metadata=None):
        with float32_numbers._float32_is_its_own_main(self):
            return unpatched(self, model)

    undo_it = set_attribute(float32_numbers._SHARDED, mended)
    try:
        assert "numbers the parameters in float32" in float32_numbers._unneeded()
    finally:
        undo_it()


def test_an_optimizer_of_another_form_is_named():
    undo_it = set_attribute(float32_numbers._SHARDED, lambda self, model: self.something_new)
    try:
        with pytest.raises(ConfigError, match=r"can't tell whether .*something_new.*Versions known to work"):
            float32_numbers._unneeded()
    finally:
        undo_it()
