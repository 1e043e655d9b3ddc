"""Adapters: found by model type, refused when the definition has moved on or when there are two."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from torch import nn

from megasched.definition.build import build_definition
from megasched.errors import ConfigError, Declined
from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from megasched.language.roles import Roles
from megasched.model_adapters import generic, registry
from megasched.model_adapters.registry import Adapter, AttentionFacts, find_adapter, has_roles, roles_of
from tests import tiny

MINE = Adapter(
    model_types=("llama", "mine"),
    roles={"model.layers.*.mlp.up_proj": "mlp.up", "model.layers.*.self_attn.q_proj": "qkv.q"},
    packed={"mlp.up": lambda config: (config.intermediate_size,)},
    local_attributes={"model.layers.*.mlp": ("intermediate_size",)},
    layer=lambda model: "not tried",
)
MORE = [Adapter(model_types=("other",), roles={"*": "norm"})]


@pytest.fixture
def points(monkeypatch):
    """Installed packages' entry points, instead of the real ones."""

    def install(*values):
        found = [EntryPoint(f"point{i}", value, registry.GROUP) for i, value in enumerate(values)]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.GROUP else [])
        registry._installed.cache_clear()

    yield install
    registry._installed.cache_clear()


@pytest.fixture
def llama():
    return build_definition(tiny.config("llama", num_hidden_layers=2))


def test_an_installed_adapter_comes_before_hfs_plan(points, llama):
    points(f"{__name__}:MINE", f"{__name__}:MORE")
    assert find_adapter("mine") is find_adapter("llama") is MINE
    assert find_adapter("other") is MORE[0]
    assert find_adapter("nobodys") is None
    assert [has_roles(one) for one in ("mine", "other", "qwen3", "gpt2", "nobodys")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert roles_of(llama) == Roles(
        role={
            "model.layers.0.mlp.up_proj": "mlp.up",
            "model.layers.1.mlp.up_proj": "mlp.up",
            "model.layers.0.self_attn.q_proj": "qkv.q",
            "model.layers.1.self_attn.q_proj": "qkv.q",
        },
        heads={"model.layers.0.self_attn.q_proj": 4, "model.layers.1.self_attn.q_proj": 4},
        components={"model.layers.0.mlp.up_proj": (48,), "model.layers.1.mlp.up_proj": (48,)},
        local_attributes={
            "model.layers.0.mlp": ("intermediate_size",),
            "model.layers.1.mlp": ("intermediate_size",),
        },
        origin={
            f"model.layers.{index}.{name}": f"adapter: model.layers.*.{name} is {role}"
            for index in range(2)
            for name, role in (("mlp.up_proj", "mlp.up"), ("self_attn.q_proj", "qkv.q"))
        },
        layer=Declined("not tried"),
        attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8),
        moe=Declined("no mixture is known for model type 'llama'"),
        mlps={f"model.layers.{index}.mlp": MlpSpec() for index in range(2)},
    )


@pytest.mark.parametrize("kind", ["roles", "local_attributes"])
def test_a_glob_that_matches_nothing(llama, kind):
    wrong = {"model.blocks.*.mlp": "mlp.up" if kind == "roles" else ("width",)}
    adapter = Adapter(**{"model_types": ("llama",), "roles": {}, kind: wrong})
    with pytest.raises(ConfigError, match=r"the adapter for 'llama' expects modules 'model\.blocks\.\*\.mlp'"):
        adapter.bind(llama)


def test_a_glob_of_attributes_is_about_the_modules_that_have_one(llama):
    """Layers of other kinds may stand there; where no module has one, all are named when the model is planned."""
    mlps, attentions = ([f"model.layers.{index}.{name}" for index in range(2)] for name in ("mlp", "self_attn"))

    def bound(glob, *names):
        return list(Adapter(("llama",), {}, local_attributes={glob: names}).bind(llama).local_attributes)

    assert bound("model.layers.*", "intermediate_size", "nothing") == mlps
    assert bound("model.layers.*", "head_dim") == attentions
    assert bound("model.layers.*.mlp", "nothing") == mlps


def test_a_role_that_does_not_exist(llama):
    with pytest.raises(ValueError, match=r"model\.norm: unknown role 'norm\.last'; roles are embed\.tokens"):
        Adapter(model_types=("llama",), roles={"model.norm": "norm.last"}).bind(llama)


def test_packed_sizes_without_roles_are_of_nothing():
    with pytest.raises(ValueError, match="packed and local_attributes go with roles"):
        Adapter(("llama",), packed={"mlp.up": lambda config: (1,)})


def test_without_roles_hfs_plan_gives_them(llama):
    facts = AttentionFacts({"out": "self_attn.dense"})
    bound, plain = Adapter(("llama",), attention=facts).bind(llama), roles_of(llama)
    assert str(bound.attention) == "no layer has self_attn.dense"
    assert replace(bound, attention=plain.attention, layer=plain.layer) == plain
    assert isinstance(plain.layer, LayerSpec)


SPECS = {
    "layer": LayerSpec(AttentionSpec(heads=1, kv_heads=1, head_dim=1)),
    "attention": AttentionSpec(heads=1, kv_heads=1, head_dim=1),
    "moe": MoeSpec(router="a", experts="b", top_k=1, normalized=True),
    "mlps": {"a": MlpSpec()},
}


@pytest.mark.parametrize("name", SPECS)
def test_a_function_of_the_definition_stands_for_facts(llama, name):
    seen = []

    def say(model):
        seen.append(model)
        return SPECS[name]

    assert getattr(Adapter(("llama",), {}, **{name: say}).bind(llama), name) == SPECS[name]
    assert seen == [llama]


@pytest.mark.parametrize(("old", "new"), [("block", "layer"), ("mixture", "moe")])
def test_names_of_earlier_releases_are_taken_with_a_warning(llama, old, new):
    with pytest.warns(DeprecationWarning, match=rf"Adapter\({old}=\.\.\.\) is called Adapter\({new}=\.\.\.\)"):
        adapter = Adapter(("llama",), {}, **{old: lambda model: SPECS[new]})
    assert getattr(adapter.bind(llama), new) is SPECS[new]


class Planned(nn.Module):
    """As much of an HF model as the generic adapter reads."""

    def __init__(self, plan, tp_plan_head=None):
        super().__init__()
        self.config = tiny.config("llama")
        self.tp_plan = plan
        layer = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("q_proj", "o_proj", "mystery", "norm")})
        self.layers = nn.ModuleList([layer, nn.ModuleDict({"q_proj": nn.Linear(2, 2)})])
        self.embed = nn.Embedding(3, 2)
        self.out = nn.Linear(2, 3)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.out


def test_hfs_plan_is_read_by_style():
    plan = {
        "layers.*.q_proj": "colwise",
        "layers.*.o_proj": "rowwise_rep",
        "layers.*.mystery": "colwise_gather_output",
        "layers.*.norm": "replicated_with_grad_allreduce",
        "layers.*.gone": "rowwise",
        "embed": "embedding_rowwise",
        "out": "colwise_rep",
        "layers.0.q": None,
    }
    assert generic.read_plan(Planned(plan)) == Roles(
        role={
            "layers.0.q_proj": "qkv.q",
            "layers.0.o_proj": "attn.out",
            "layers.0.mystery": "column",
            "layers.1.q_proj": "qkv.q",
            "embed": "embed.tokens",
            "out": "head",
        },
        heads={"layers.0.q_proj": 4, "layers.0.o_proj": 4, "layers.1.q_proj": 4},
        origin={
            "layers.0.q_proj": "HF's plan: layers.*.q_proj is colwise",
            "layers.0.o_proj": "HF's plan: layers.*.o_proj is rowwise_rep",
            "layers.0.mystery": "HF's plan: layers.*.mystery is colwise_gather_output",
            "layers.1.q_proj": "HF's plan: layers.*.q_proj is colwise",
            "embed": "HF's plan: embed is embedding_rowwise",
            "out": "HF's plan: out is colwise_rep",
        },
    )


def test_a_packed_gate_and_up_is_cut_half_by_half():
    model = Planned({"layers.*.gate_up_proj": "colwise_gather_output", "layers.*.o_proj": "rowwise_split_input"})
    model.layers[1]["gate_up_proj"] = nn.Linear(2, 10)
    roles = generic.read_plan(model)
    assert roles.role["layers.1.gate_up_proj"] == "mlp.gate_up"
    assert roles.components == {"layers.1.gate_up_proj": (5, 5)}


def test_a_style_that_is_not_known_prints_the_line_to_add():
    with pytest.raises(ConfigError) as raised:
        generic.read_plan(Planned({"layers.*.q_proj": "diagonal"}))
    assert str(raised.value) == (
        "llama: HF's plan gives 'layers.*.q_proj' the style 'diagonal', which is not known; add it to STYLES in "
        'model_adapters/generic.py: "diagonal": "column" | "row" | None'
    )


def test_a_style_that_is_not_known_and_matches_nothing_is_nobodys_problem():
    assert generic.read_plan(Planned({"layers.*.q_proj": "colwise", "layers.*.gone": "diagonal"})).role


@pytest.mark.parametrize("plan", [None, {}, {"layers.*.q_proj": None}])
def test_without_a_plan_the_ends_have_their_roles(plan):
    roles = generic.read_plan(Planned(plan))
    assert roles.role == {"embed": "embed.tokens", "out": "head"}
    assert roles.origin == {"embed": "end of every model", "out": "end of every model"}


def test_ends_that_share_a_parameter_with_a_third_module_stay_whole():
    model = Planned({"embed": "embedding_rowwise"})
    model.layers[0]["norm"].bias = model.out.bias
    roles = generic.read_plan(model)
    assert roles.role == {}
    assert set(roles.declined) == {"embed", "out"}


class ScaledHead(nn.Linear):
    """Dory's: a scale for each token."""

    def forward(self, x):
        return 2.0 * super().forward(x)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_no_plain_linear_stays_whole_and_what_is_tied_to_it(tied):
    model = Planned({"embed": "embedding_rowwise", "out": "colwise_gather_output"})
    model.out = ScaledHead(2, 3, bias=False)
    if tied:
        model.out.weight = model.embed.weight
    roles = registry.roles_of(model)
    out = "HF's plan: out is colwise_gather_output, but this ScaledHead computes or holds more than nn.Linear does"
    embed = "HF's plan: embed is embedding_rowwise, but tied to out, which stays whole"
    assert roles.role == ({} if tied else {"embed": "embed.tokens"})
    assert roles.declined == ({"embed": embed, "out": out} if tied else {"out": out})


def test_what_a_plan_asks_for_and_is_not_done_is_told():
    roles = generic.read_plan(Planned({"layers.*.mystery": "moe_tp_experts", "layers.*.norm": "replicate"}))
    assert roles.declined == {"layers.0.mystery": "HF's plan: layers.*.mystery is moe_tp_experts"}


def test_every_style_of_transformers_plans_is_known():
    """A new version's new style shows here first."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    styles: set[str] = set()
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        styles |= {s for s in (getattr(config, "base_model_tp_plan", None) or {}).values() if s is not None}
    assert {"colwise", "rowwise", "replicated_with_grad_allreduce"} <= styles & set(generic.STYLES)
    assert styles <= set(generic.STYLES)
