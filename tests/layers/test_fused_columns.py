"""Columns that read one tensor, computed by one matrix product."""

import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import megasched
from megasched.errors import ScheduleError
from megasched.layers.fused_columns import FusedColumns
from megasched.layers.megatron.trials import Trials
from megasched.lowering.build import build_with_plan
from megasched.plan.make import make_plan
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import auto, randomize, tiny_model, token_ids
from tests.lowering.parity import compare, compare_gradients, distance, scheduled_copy, too_far
from tests.tiny import FAMILIES

QKV = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
GATED = tuple(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up"))
JOINT = {
    **{family: [QKV, GATED] for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2")},
    "phi3": [],  # packed in the definition
    "gpt2": [],
    "gpt_neox": [],
    "opt": [tuple(f"model.decoder.layers.0.self_attn.{name}_proj" for name in "qkv")],
}


def _joint(family):
    init_megatron(tp=2)
    model = tiny_model(family)
    sch = megasched.create_schedule(model)
    auto(sch)
    plan = make_plan(sch, inputs={"input_ids": token_ids()}, causal_lm=True, trials=Trials)
    return [sorted(paths) for paths in plan.fused_columns if ".0." in paths[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_joined(ranks, family):
    assert ranks.run(2, _joint, family) == [[sorted(paths) for paths in JOINT[family]]] * 2


class Counted:
    """Counts the products of joint columns, and those that had to be left to each column."""

    def __enter__(self):
        self.real, self.done, self.left = FusedColumns._product, 0, 0

        def compute(fused_columns, x):
            found = self.real(fused_columns, x)
            if found is None:
                self.left += 1
            else:
                self.done += 1
            return found

        FusedColumns._product = compute
        return self

    def __exit__(self, *error):
        FusedColumns._product = self.real


def _levels(tp):
    """Output and gradients at both levels, and how often a product was shared."""
    init_megatron(tp=tp)
    ids = token_ids()
    calls = {"input_ids": ids, "labels": ids}
    found = {}
    for family in ("llama", "opt", "qwen2"):  # without and with biases
        for level in ("leaf", "fused"):

            def fill(sch, level=level):
                auto(sch)
                sch.level(level)

            with Counted() as counted:
                gaps = too_far(compare(tiny_model(family), fill, calls))
            found[family, level] = (gaps, counted.done, counted.left)
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_both_levels_give_the_definitions_gradients(ranks, tp):
    shared = {"llama": 4, "opt": 2, "qwen2": 4}  # in two layers
    for found in ranks.run(tp, _levels, tp):
        for family, count in shared.items():
            assert found[family, "leaf"] == ({}, 0, 0)
            assert found[family, "fused"] == ({}, count, 0)


def _clipped(tp):
    """OLMo's ``clip_qkv`` writes to what its projections give, joined or gathered."""
    init_megatron(tp=tp)
    config = AutoConfig.for_model("olmo", **{**FAMILIES["llama"], "num_hidden_layers": 2, "clip_qkv": 0.05})
    ids = token_ids()
    found = {}
    for whole in (False, True):

        def fill(sch, whole=whole):
            auto(sch)
            for name in "qk" if whole else "":
                sch[f"model.layers.1.self_attn.{name}_proj"].sync("fwd_post", "all_gather")

        model = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).train()
        found[whole] = too_far(compare(model, fill, {"input_ids": ids, "labels": ids}))
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_outputs_that_are_written_to_are_nobody_elses(ranks, tp):
    for found in ranks.run(tp, _clipped, tp):
        assert found == {False: {}, True: {}}


def _innermost():
    init_megatron(tp=2)

    def fill(sch):
        auto(sch)
        sch.level("leaf")
        sch["model.layers.1"].level("fused")
        sch["model.layers.1.mlp"].level("leaf")

    _, plan, _ = scheduled_copy(tiny_model("llama"), fill)
    return plan.fused_columns


def test_the_innermost_level_counts(ranks):
    want = [tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")]
    assert ranks.run(2, _innermost) == [tuple(want)] * 2


def test_an_unknown_level_is_refused():
    sch = megasched.create_schedule(tiny_model("llama"))
    sch["model.layers.0"].level("fastest")
    with pytest.raises(ScheduleError, match="no level 'fastest'") as raised:
        make_plan(sch, inputs={"input_ids": token_ids()})
    assert raised.value.problems[0].remedy == "one of leaf, fused, block"


def _frozen(names):
    """Parts of which only some are trained stay apart; all frozen ones are joined."""
    init_megatron(tp=2)
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(f"{part}_proj" in name for part in names))
    ids = token_ids()
    with Counted() as counted:
        gaps = too_far(compare(model, auto, {"input_ids": ids, "labels": ids}))
    return gaps, counted.done, counted.left


@pytest.mark.parametrize(("names", "products"), [("k", 2), ("qkv", 4)])
def test_frozen_parts(ranks, names, products):
    assert ranks.run(2, _frozen, names) == [({}, products, 0)] * 2


def _attention_of(model):
    return model.model.layers[0].self_attn


def _moved():
    """Weights that something put elsewhere in memory are used where they are, each on its own."""
    init_megatron(tp=2)
    model = tiny_model("llama")
    sch = megasched.create_schedule(tiny_model("llama"))
    auto(sch)
    plan = build_with_plan(sch)
    built = sch.mod
    for layer in built.model.layers:
        layer.self_attn.k_proj.weight.data = layer.self_attn.k_proj.weight.data.clone()
    ids = token_ids()
    with Counted() as counted:
        for each in (built, model):
            each(input_ids=ids, labels=ids).loss.backward()
    return too_far(compare_gradients(built, plan, model)), counted.done, counted.left


def test_weights_that_were_moved_are_used_one_by_one(ranks):
    # q, k and v ask in turn, in two layers; the MLPs go on together
    assert ranks.run(2, _moved) == [({}, 2, 6)] * 2


def _handed_out():
    """Same tensor: one product. Another tensor, one changed in place, another grad mode: computed again."""
    init_megatron(tp=2)
    built, _, _ = scheduled_copy(tiny_model("llama"), auto)
    attention = _attention_of(built)
    x = torch.randn(2, 3, 32, requires_grad=True).clone()
    with Counted() as counted:
        steps = []

        def step():
            steps.append(counted.done)

        q = attention.q_proj(x)
        k = attention.k_proj(x)
        step()
        attention.v_proj(x.clone())  # another tensor
        step()
        attention.q_proj(x)
        step()
        with torch.no_grad():
            attention.k_proj(x)
        step()
        attention.q_proj(x)
        again = attention.q_proj(x)  # asked twice
        step()
        attention.k_proj(x)
        x.mul_(2)
        k_of_double = attention.k_proj(x)
        step()
    same = torch.equal(again, q) and torch.allclose(k_of_double, 2 * k, rtol=1e-5, atol=1e-6)
    return steps, bool(same)


def test_outputs_are_handed_out_for_the_tensor_they_were_computed_from(ranks):
    assert ranks.run(2, _handed_out) == [([1, 2, 3, 4, 6, 7], True)] * 2


def _weights_changed():
    """One column is skipped, the weights change, and the same tensor comes again."""
    init_megatron(tp=2)
    model = tiny_model("llama")
    built, _, _ = scheduled_copy(model, auto)
    mlp, x, found = built.model.layers[0].mlp, torch.randn(2, 3, 32), []
    for change in (lambda p: p.mul_(2), lambda p: setattr(p, "data", p.data * 2)):
        before = mlp.gate_proj(x)
        mlp.up_proj(x)
        mlp.up_proj(x)
        with torch.no_grad():
            change(mlp.gate_proj.weight)
        after = mlp.gate_proj(x)
        after.sum().backward()
        found.append(torch.allclose(after, 2 * before, rtol=1e-5, atol=1e-6))
    return found


def test_outputs_of_weights_that_have_changed_are_computed_again(ranks):
    assert ranks.run(2, _weights_changed) == [[True, True]] * 2


def _inference():
    init_megatron(tp=2)
    model = tiny_model("llama").eval()
    built, _, _ = scheduled_copy(model, auto)
    ids = token_ids()
    with torch.inference_mode(), Counted() as counted:
        got, want = (each.eval()(input_ids=ids).logits for each in (built, model))
    return distance(got, want), counted.done, counted.left


def test_inference(ranks):
    for gap, done, left in ranks.run(2, _inference):
        assert (done, left) == (4, 0)
        assert gap < 1e-5


def _released():
    init_megatron(tp=2)
    built, _, _ = scheduled_copy(tiny_model("llama"), auto)
    attention = _attention_of(built)
    x = torch.randn(2, 3, 32)
    for name in "qkv":
        getattr(attention, f"{name}_proj")(x)
    held = weakref.ref(x)
    del x
    gc.collect()
    return held() is None


def test_nothing_is_kept_once_all_is_handed_out(ranks):
    assert ranks.run(2, _released) == [True, True]


def _names():
    init_megatron(tp=2)
    model = tiny_model("qwen2")
    built, _, _ = scheduled_copy(model, auto)
    return list(built.state_dict()) == list(model.state_dict())


def test_state_dict_keys_stay(ranks):
    assert ranks.run(2, _names) == [True, True]


def _added_to_main_grad():
    """Apex's kernel, with torch in its place: it adds the gradient of the joint weight to Megatron's buffer."""
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import layers

    init_megatron(tp=2)
    model = tiny_model("llama")
    built, plan, _ = scheduled_copy(model, auto)
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, dy, out: out.addmm_(dy.t(), x))
    before = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
    layers.fused_weight_gradient_mlp_cuda = kernel
    joined = [part for paths in plan.fused_columns for part in map(built.get_submodule, paths)]
    for group in plan.fused_columns:  # as Megatron's buffers lie: the last parameter first
        order = [built.get_submodule(path) for path in reversed(group)]
        buffer = torch.zeros(sum(member.weight.numel() for member in order))
        for member, part in zip(order, buffer.split([m.weight.numel() for m in order]), strict=True):
            member.gradient_accumulation_fusion = True
            member.weight.main_grad = part.view(member.weight.shape)
            member.weight.grad_added_to_main_grad = False
    ids = token_ids()
    try:
        with Counted() as counted:
            for each in (built, model, built, model):  # twice: it adds to what is there
                each(input_ids=ids, labels=ids).loss.backward()
    finally:
        layers.fused_weight_gradient_mlp_cuda = before
    for member in joined:
        assert member.weight.grad_added_to_main_grad
        assert member.weight.grad.shape == member.weight.shape  # a stand-in, for the hooks that wait for one
        member.weight.grad = member.weight.main_grad
    return too_far(compare_gradients(built, plan, model)), counted.done, counted.left


def test_the_gradient_is_added_to_megatrons_buffer(ranks):
    assert ranks.run(2, _added_to_main_grad) == [({}, 8, 0)] * 2
