"""What a definition changes around the modules that it calls is refused by name: those of a run do not follow."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.definition.build import init_empty_weights
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule import create_schedule
from megasched.plan.make import make_plan
from megasched.verify.parity import LAYOUTS
from tests import remote, tiny
from tests.parity.steps import assert_equal, step_of_own_code
from tests.ways import mlp


class Halving(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output / 2 if func is F.linear else output


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def llama(around):
    """One whose MLPs run in what ``around`` gives; on the meta device."""

    class Mlp(LlamaMLP):
        def forward(self, x):
            with around(self):
                return super().forward(x)

    with init_empty_weights():
        model = LlamaForCausalLM._from_config(tiny.config("llama"))
        for layer in model.model.layers:
            layer.mlp = Mlp(model.config)
    return model


def doubled(self, x):
    return 2 * F.silu(x)


def of_instance(mlp):
    return mock.patch.object(mlp.down_proj, "forward", partial(F.linear, weight=mlp.down_proj.weight))


CASES = {
    "autocast": (lambda mlp: torch.autocast("cpu", torch.bfloat16), "gate_proj", "called under torch.autocast"),
    "functions": (lambda mlp: Halving(), "gate_proj", "called under a Halving"),
    "operations": (lambda mlp: Counting(), "gate_proj", "called under a Counting"),
    "a class's forward": (
        lambda mlp: mock.patch.object(type(mlp.act_fn), "forward", doubled),
        "act_fn",
        "another function in the place",
    ),
    "an instance's": (of_instance, "down_proj", "another function in the place"),
}


@pytest.mark.parametrize(("around", "name", "what"), CASES.values(), ids=CASES)
def test_it_is_refused_where_a_module_is_called(around, name, what):
    with pytest.raises(ScheduleError, match=what) as raised:
        find_layer_stack(llama(around))
    assert raised.value.problems[0].module == f"model.layers.0.mlp.{name}"


@pytest.mark.parametrize(
    "around",
    [
        lambda mlp: torch.autocast("cpu", torch.bfloat16, enabled=False),
        lambda mlp: torch.device("meta"),
        lambda mlp: torch.enable_grad(),
    ],
)
def test_what_changes_nothing_is_let_through(around):
    assert find_layer_stack(llama(around)).layers == "model.layers"


def test_a_mode_that_was_there_before():
    with Counting():
        assert find_layer_stack(llama(lambda mlp: torch.enable_grad())).layers == "model.layers"


def on_all(module, args, output):
    return None


def test_hooks_on_all_modules_of_the_process_are_refused():
    schedule = create_schedule(nn.Linear(4, 4), ParallelDims())
    handle = nn.modules.module.register_module_forward_hook(on_all)
    try:
        with pytest.raises(ScheduleError, match=r"a hook on all modules of the process is registered \(on_all\)"):
            make_plan(schedule)
    finally:
        handle.remove()
    make_plan(schedule)


CALLED = """
class Linear(nn.Linear):
    def __call__(self, x):
        return super().__call__(x).tanh()


class TripledRMSNorm(LlamaRMSNorm):
    def __call__(self, x):
        return 3 * super().__call__(x)


class Embedding(nn.Embedding):
    def __call__(self, ids):
        return super().__call__(ids) / 2


class Mine(Mine):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        for layer in self.model.layers:
            layer.input_layernorm = TripledRMSNorm(config.hidden_size)
            layer.mlp.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
"""


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_calls_that_a_class_has_of_its_own_stay(ranks, tmp_path, layout):
    """What stands in for a module stands in for its forward alone."""
    imports = "from torch import nn\nfrom transformers.models.llama.modeling_llama import LlamaRMSNorm\n"
    folder = remote.write(tmp_path / "called", mlp("") + imports + CALLED)
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))
