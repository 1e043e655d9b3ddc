"""8-bit training at plan time: what level the layers take, and sizes that no 8-bit matrix product takes."""

import pytest

import megasched
from megasched.definition import attention_interface
from megasched.errors import ConfigError, ScheduleError
from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.layers import attention
from megasched.layers.megatron.trials import Trials
from megasched.model_adapters.default_schedule import schedule as default
from megasched.model_adapters.registry import roles_of
from megasched.plan.fp8 import left_in_16_bits
from megasched.plan.make import make_plan
from tests.lowering.models import tiny_model


def plan(*args, **options):
    return model_and_plan(*args, **options)[1]


def model_and_plan(family="llama", fp8="tensorwise", tp=1, start=0, end=0, **changes):
    model = tiny_model(family, **{"hidden_size": 64, "intermediate_size": 96, **changes})
    attention.register()
    model.config._attn_implementation = attention_interface.NAME
    asked = Fp8(fp8_recipe=fp8, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)
    layout = ParallelDims(tensor_model_parallel_size=tp, fp8=asked)
    sch = megasched.create_schedule(model, layout, roles_of(model))
    default(sch, layout)
    return model, make_plan(sch, causal_lm=True, trials=Trials)


def test_the_automatic_schedule_takes_megatrons_layers():
    assert plan().blocks == {"model.layers.0", "model.layers.1"}
    assert plan(tp=2).blocks == {"model.layers.0", "model.layers.1"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tp": 2, "intermediate_size": 80}, "mlp.down_proj.weight is [64, 40] on each of 2 TP ranks"),
        ({"fp8": "mxfp8", "intermediate_size": 80}, "takes multiples of 32"),
        ({"hidden_size": 72}, "mlp.gate_proj.weight + mlp.up_proj.weight is [192, 72]"),
    ],
)
def test_sizes_that_8_bits_do_not_take(options, told):
    with pytest.raises(ScheduleError) as raised:
        plan(**options)
    assert told in str(raised.value)
    assert "modules: model.layers.0, model.layers.1" in str(raised.value)
    assert "remedy: " in str(raised.value)


def test_layers_in_16_bits_may_have_any_size():
    with pytest.raises(ScheduleError, match=r"module: model\.layers\.1\n"):
        plan(intermediate_size=90, start=1)
    assert plan(intermediate_size=90, start=1, end=1).blocks


def test_linears_of_other_models_are_transformer_engines():
    found = plan("gemma2", start=1)
    assert found.blocks == set()
    layer = "model.layers.1"
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    names += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert found.te_linears == {f"{layer}.{name}" for name in names}


def test_projections_that_are_whole_stay_in_16_bits():
    """k and v with fewer heads than TP ranks."""
    model, found = model_and_plan(tp=4, intermediate_size=192)
    assert "model.layers.0.self_attn.q_proj" in found.te_linears
    assert not any(path.endswith(("k_proj", "v_proj")) for path in found.te_linears)
    assert left_in_16_bits(found, model) == [
        f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("k_proj", "v_proj")
    ]
    for fp8 in ({"start": 2}, {"tp": 2}):  # none in 8 bits; all in Megatron's layers
        model, found = model_and_plan(**fp8)
        assert left_in_16_bits(found, model) == []


def test_sizes_of_products_of_linears():
    with pytest.raises(ScheduleError) as raised:
        plan("gemma2", intermediate_size=88)
    assert "mlp.down_proj.weight is [64, 88] on each of 1 TP ranks" in str(raised.value)
    assert "gate_proj" not in str(raised.value)  # with up_proj it is one product of 176


def test_layers_without_a_sharded_linear():
    model = tiny_model("llama")
    sch = megasched.create_schedule(model, ParallelDims(fp8=Fp8()), roles_of(model))
    with pytest.raises(ScheduleError, match="none of its linears is sharded"):
        make_plan(sch, causal_lm=True, trials=Trials)


def test_decompose_is_refused():
    """Of a linear that is Transformer Engine's; one in a layer of 16 bits may be decomposed."""
    model = tiny_model("gemma2", hidden_size=64, intermediate_size=96)
    for layer, told in ((1, "Transformer Engine computes it in 8 bits"), (0, "")):
        layout = ParallelDims(fp8=Fp8(fp8_recipe="tensorwise", num_layers_at_start_in_bf16=1))
        sch = megasched.create_schedule(model, layout, roles_of(model))
        default(sch, layout)
        mlp = sch[f"model.layers.{layer}.mlp"]
        mlp["up_proj"].decompose()
        mlp.trace()
        if told:
            with pytest.raises(ScheduleError, match=told):
                make_plan(sch, causal_lm=True, trials=Trials)
        else:
            assert make_plan(sch, causal_lm=True, trials=Trials).te_linears


def test_a_recipe_that_is_none():
    with pytest.raises(ConfigError, match="must be one of delayed, tensorwise, blockwise, mxfp8"):
        Fp8(fp8_recipe="nvfp4")


def test_it_is_for_megatrons_trainer():
    model = tiny_model("llama")
    sch = megasched.create_schedule(model, ParallelDims(fp8=Fp8()), roles_of(model))
    with pytest.raises(ScheduleError, match="8-bit training is for Megatron's trainer"):
        make_plan(sch)


def test_overlap_of_communication_is_for_megatrons_layers():
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)
    found = {}
    for family in ("llama", "gemma2"):
        model = tiny_model(family)
        sch = megasched.create_schedule(model, layout, roles_of(model))
        default(sch, layout)
        found[family] = sch
    assert len(make_plan(found["llama"], causal_lm=True, trials=Trials).blocks) == 2
    with pytest.raises(ScheduleError, match="--tp-comm-overlap: only Megatron's own layers overlap"):
        make_plan(found["gemma2"], causal_lm=True, trials=Trials)
