"""Replacements that are refused, which leave the model as it was."""

import pytest
import torch
from torch import nn

from tests.language.replacing import FUSED, Fused, Scale, X, built, refused
from tests.lowering.models import tiny_model


class Other(nn.Module):
    def forward(self, hidden, mask):
        return hidden


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(8))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        return x


def raising(old):
    raise RuntimeError("no GPU")


@pytest.mark.parametrize(
    ("path", "factory", "more", "what"),
    [
        ("0.norm", lambda old: Scale(8), {}, "no weights for gain"),
        ("0.norm", lambda old: nn.Identity(), {}, "weights of the old module are lost: weight"),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "bias": "up.bias"}},
            "no parameter of the new module: bias",
        ),
        ("0.mlp", lambda old: Fused(), {"weights": {"weights": FUSED["weights"]}}, "no weights for biases"),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "biases": lambda old: torch.zeros(24)}},
            "weights of the old module are lost: up.bias, down.bias",
        ),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "biases": lambda old: old["bias"]}},
            "raised KeyError",
        ),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "biases": lambda old: old["up.bias"]}},
            "biases has shape [24]",
        ),
        ("0.mlp.up", lambda old: nn.Linear(8, 15), {}, "weight has shape [15, 8], its weights [16, 8]"),
        (
            "0.norm",
            lambda old: nn.Identity(),
            {"drop": ("weight", "bias")},
            "drop names nothing of the old module: bias",
        ),
        ("0.batch", lambda old: nn.Identity(), {}, "are lost: running_mean, running_var, num_batches_tracked"),
        ("0.batch", lambda old: Buffered(), {}, "buffer running_mean has shape [3], its values [8]"),
        (
            "0.norm",
            lambda old: Other(),
            {"drop": ("weight",)},
            "Other.forward can't take its parent's call: missing",
        ),
        ("0.norm", lambda old: 3, {}, "the factory returned int, not a module"),
        ("0.norm", raising, {}, "the factory raised RuntimeError: no GPU"),
        ("", lambda old: nn.Identity(), {}, "the whole model can't be replaced"),
    ],
)
def test_refused(model, path, factory, more, what):
    problems = refused(model, lambda sch: sch[path].replace(factory, **more))
    assert any(what in problem.what for problem in problems), problems
    assert {problem.module for problem in problems} == {path}


def test_dropped_by_name(model):
    built(
        model,
        lambda sch: [
            sch["0.norm"].replace(lambda old: nn.Identity(), drop=("weight",)),
            sch["0.batch"].replace(
                lambda old: nn.Identity(), drop=("running_mean", "running_var", "num_batches_tracked")
            ),
        ],
    )
    assert "0.norm.weight" not in dict(model.named_parameters())
    assert not dict(model[0].named_buffers())


def test_the_same_instance_twice(model):
    scale = Scale(8)
    (problem,) = refused(model, lambda sch: sch["*.norm"].replace(scale, weights={"gain": "weight"}))
    assert problem.what == "the same module instance already stands at 0.norm"
    assert problem.module == "1.norm"
    (problem,) = refused(model, lambda sch: sch["1.norm"].replace(model[0].norm))
    assert problem.what == "the same module instance already stands at 0.norm"


def test_one_module_twice_or_inside_one_that_is_gone(model):
    def twice(sch):
        sch["0.norm"].replace(lambda old: nn.LayerNorm(8, bias=False))
        sch["0.norm"].replace(lambda old: nn.LayerNorm(8, bias=False))

    (problem,) = refused(model, twice)
    assert problem.what == f"is replaced twice: at {__file__}:{twice.__code__.co_firstlineno + 1}, and again"

    def inside(sch):
        sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)
        sch["0.mlp.act"].replace(lambda old: nn.ReLU())

    (problem,) = refused(model, inside)
    assert problem.module == "0.mlp.act"
    assert "there is no such module any more" in problem.what


def test_the_inner_one_first_is_fine(model):
    def fill(sch):
        sch["0.mlp.up"].replace(lambda old: nn.Linear(8, 16))
        sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)

    assert type(built(model, fill)[0].mlp) is Fused


def test_one_bad_replacement_takes_the_good_ones_back(model):
    def fill(sch):
        sch["0.norm"].replace(lambda old: Scale(8), weights={"gain": "weight"})
        sch["1.norm"].replace(lambda old: Scale(8))
        sch["1.mlp"].replace(lambda old: nn.Identity())

    problems = refused(model, fill)
    assert [p.module for p in problems] == ["1.norm", "1.mlp"]


def test_a_later_refusal_takes_replacements_back(model):
    def fill(sch):
        sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)
        sch["0.mlp.up"].checkpoint()

    (problem,) = refused(model, fill)
    assert problem.what == "checkpoint: there is no such module any more after the replacements"
    assert problem.module == "0.mlp.up"


def test_the_call_that_the_parent_makes_is_known_from_example_inputs():
    """Optional in the old signature, used by the parent, absent in the new one."""

    class Masked(nn.Module):
        def forward(self, x, mask=None, **more):
            return x

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked()

        def forward(self, x):
            return self.inner(x, mask=x > 0)

    fill = lambda sch: sch["inner"].replace(lambda old: nn.Identity())  # noqa: E731
    (problem,) = refused(Parent(), fill, inputs={"x": X})
    assert (
        problem.what == "Identity.forward can't take its parent's call: got an unexpected keyword argument 'mask'"
    )
    assert "(x, mask=None, **more)" in problem.remedy
    built(Parent(), fill)  # nobody can know


def test_an_hf_models_calls_are_known_without_inputs():
    model = tiny_model("llama")

    class Attention(nn.Module):
        def __init__(self, old):
            super().__init__()
            self.inner = old

        def forward(self, hidden_states, attention_mask=None):
            return self.inner(hidden_states, None, attention_mask)

    problems = refused(model, lambda sch: sch["**.self_attn"].replace(Attention))
    assert len(problems) == 2
    assert "got an unexpected keyword argument" in problems[0].what


def test_a_new_module_that_fails_inside_is_named():
    (problem,) = refused(
        nn.Sequential(nn.Linear(8, 8)),
        lambda sch: sch["0"].replace(
            lambda old: nn.Sequential(nn.Flatten(), nn.Linear(8, 8)),
            weights={"1.weight": "weight", "1.bias": "bias"},
        ),
        inputs={"input": torch.zeros(2, 3, 8)},
    )
    assert problem.what.startswith("the forward fails in a trial call on the meta device: RuntimeError")
    assert problem.module == "0.1"


def test_a_function_of_a_tied_parameter_would_untie_it():
    model = tiny_model("llama", tie_word_embeddings=True)
    weight, make = model.lm_head.weight, lambda old: nn.Embedding(*old.weight.shape)

    def fill(value):
        return lambda sch: sch["model.embed_tokens"].replace(make, weights={"weight": value})

    for value in (lambda old: 2 * old["weight"], lambda old: old["weight"].clone()):
        (problem,) = refused(model, fill(value))
        assert problem.what == (
            "a function makes weight of a tied parameter (model.embed_tokens.weight and lm_head.weight), "
            "which would be two then"
        )
    built(model, fill(lambda old: old["weight"]))
    assert model.lm_head.weight is model.model.embed_tokens.weight is weight


def test_a_refusal_leaves_every_mode_as_it_was():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    model[0][1].eval()

    def fill(sch):
        sch["0"].replace(lambda old: nn.Sequential(old))
        sch["0.0"].shard("weights", axis=0)

    refused(model, fill, inputs={"input": X})
    assert [module.training for module in model.modules()] == [True, True, True, False]


def test_torchscript_holds_its_weights_itself():
    model = nn.Sequential(nn.Linear(8, 8))
    (problem,) = refused(model, lambda sch: sch["0"].replace(torch.jit.script))
    assert "RecursiveScriptModule, a module of TorchScript: its weights can't be exchanged" in problem.what
