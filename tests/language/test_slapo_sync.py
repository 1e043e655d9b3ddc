"""Sync in Slapo's words: an axis, hooks with the arguments of torch's; what can't be meant is refused."""

from functools import partial

import pytest
import torch

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.definition.build import build_definition
from megasched.language.schedule import create_schedule
from megasched.model_adapters.default_schedule import schedule as auto
from megasched.model_adapters.registry import roles_of
from megasched.plan.make import make_plan
from megasched.verify import trainer_run
from megasched.verify.ranks.pool import init_megatron
from tests import tiny
from tests.language.sharding import Embedded, planned, shard_all
from tests.lowering.models import Mlp, randomize
from tests.lowering.parity import compare, compare_gradients, distance, scheduled_copy, too_far, weighted_loss
from tests.parity.steps import assert_first_step_equals_hf


@pytest.mark.parametrize(
    ("path", "mode", "op", "axis"),
    [("head", "fwd_post", "all_gather", 2), ("head", "fwd_post", "all_gather", -1)],
)
def test_the_right_axis_is_accepted_in_slapos_words(path, mode, op, axis):
    stated = planned(
        lambda sch: sch[path].sync(mode=mode, sync_op_or_fn=op, axis=axis, tensor_parallel_output_grad=False)
    )
    assert stated.tp_facts.gather.keys() == {"head"}
    assert stated.records_of("sync")[0].arguments == {"mode": mode, "op": op, "axis": axis}


def test_an_axis_is_taken_without_inputs_where_it_says_the_last():
    for axis, refused in ((-1, False), (1, True)):
        sch = megasched.create_schedule(Mlp(), ParallelDims(tensor_model_parallel_size=2))
        sch["up"].shard("weight", axis=0).sync("fwd_post", "all_gather", axis=axis)
        if refused:
            with pytest.raises(ScheduleError, match="this module sends along the features"):
                make_plan(sch)
        else:
            assert make_plan(sch).tp_facts.gather.keys() == {"up"}


def two(module, inputs):
    return inputs


@pytest.mark.parametrize(
    ("path", "mode", "given", "what", "remedy"),
    [
        (
            "head",
            "fwd_post",
            {"op": "all_gather", "axis": 1},
            "sync('fwd_post', 'all_gather', axis=1): this module sends along the features, and its output has 3 "
            "dimensions",
            "axis=-1, or no axis",
        ),
        (
            "mlp.down",
            "fwd_post",
            {"op": "reduce_scatter", "axis": 1},
            "sync('fwd_post', 'reduce_scatter') contradicts the placement: a row-sharded module here needs "
            "all_reduce at fwd_post",
            "leave the call out: what must be sent follows from the shards, and sequence parallelism alone cuts "
            "sequences",
        ),
        (
            "embed",
            "fwd_pre",
            {"sync_op_or_fn": two},
            "sync('fwd_pre', 'two') contradicts the placement: a vocab-sharded module here sends nothing at "
            "fwd_pre",
            "leave the call out: what must be sent follows from the shards; what else the function does belongs "
            "into hook()",
        ),
        ("mlp", "fwd_post", {"op": "all_reduce", "axis": 1}, "sync: all_reduce has no axis", "leave axis out"),
        (
            "mlp",
            "fwd_post",
            {"op": two},
            "sync: two can't be called at fwd_post",
            "a function of the tensor, or of (module, inputs, output)",
        ),
        (
            "mlp",
            "fwd_post",
            {"op": "RS->RR"},
            "no sync operation 'RS->RR'",
            "scatter (to S) or all_gather (to R), with axis=-1 for the second letter and axis=-2 for the first",
        ),
        (
            "mlp",
            "fwd_post",
            {"sync_op_or_fn": "all_gather"},
            "sync: sync_op_or_fn='all_gather' without an axis: Slapo takes axis 0, megasched the last",
            "say which you mean, e.g. axis=-1",
        ),
        (
            "mlp",
            "fwd_post",
            {"op": "all_gather", "tensor_parallel_output_grad": True},
            "sync: tensor_parallel_output_grad=True sums over the ranks what is summed already: here each module "
            "behind sums the gradient of its own input",
            "leave it out",
        ),
        (
            "mlp",
            "fwd_post",
            {},
            "sync: takes one operation, as op or as sync_op_or_fn",
            "one of all_reduce, all_gather, reduce_scatter, scatter, or a function",
        ),
    ],
)
def test_what_can_not_be_meant_says_what_would_be_right(path, mode, given, what, remedy):
    with pytest.raises(ScheduleError) as raised:
        planned(lambda sch: sch[path].sync(mode, **given))
    (problem,) = raised.value.problems
    assert (problem.what, problem.module, problem.remedy) == (what, path, remedy)


def doubled(module, inputs):
    return (2 * inputs[0],)


def shifted(module, inputs, output):
    return output + inputs[0].square()


def halved(module, grad_input, grad_output):
    return (grad_input[0] / 2,)


def _by_hooks():
    """Distances of a model with functions of torch's hooks in ``sync`` from one with the hooks themselves."""
    init_megatron(tp=2)
    hooked = randomize(Embedded())

    def fill(sch):
        shard_all(sch)
        activation = sch["mlp.act"]
        activation.sync(mode="fwd_pre", sync_op_or_fn=doubled)
        activation.sync(mode="fwd_post", sync_op_or_fn=shifted).sync("bwd_post", halved)

    ids = {"ids": torch.arange(10).reshape(2, 5)}
    built, plan, _ = scheduled_copy(hooked, fill, ids)
    hooked.mlp.act.register_forward_pre_hook(doubled)
    hooked.mlp.act.register_forward_hook(shifted)
    hooked.mlp.act.register_full_backward_hook(halved)
    outputs = [each(**ids) for each in (built, hooked)]
    for output in outputs:
        weighted_loss(output).backward()
    return too_far({"output": distance(*outputs), **compare_gradients(built, plan, hooked)})


def test_a_function_of_torchs_hooks_is_one(ranks):
    assert ranks.run(2, _by_hooks) == [{}, {}]


def _cut_between():
    """Distances where whole modules hand each other a part of the sequence, or of the features."""
    init_megatron(tp=2)
    x = {"x": torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8)}

    def fill(sch, axis):
        sch["act"].sync("fwd_pre", sync_op_or_fn="scatter", axis=axis)
        sch["drop"].sync("fwd_post", "all_gather", axis=axis, tensor_parallel_output_grad=False)

    return [too_far(compare(randomize(Mlp()), partial(fill, axis=axis), x, x)) for axis in (1, -2, 2, -1)]


def test_what_is_cut_and_gathered_again_along_an_axis_equals_the_whole(ranks):
    assert ranks.run(2, _cut_between) == [[{}] * 4] * 2


SEQUENCES = """
from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout):
    auto(sch, layout)
    for layer in sch["model.layers"]:
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            layer[name].sync(mode="fwd_pre", sync_op_or_fn="all_gather", axis=1)
            layer[name].sync(mode="bwd_post", sync_op_or_fn="reduce_scatter", axis=-2)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer[name].sync(mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=1)
"""


def test_sequence_parallelism_stated_in_slapos_words_equals_hf(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    (tmp_path / "sch.py").write_text(SEQUENCES)
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    reports = ranks.run(2, trainer_run.train, folder, flags, iterations=1, schedule=str(tmp_path / "sch.py"))
    assert_first_step_equals_hf(ranks, folder, reports, 2, random_init=True)


SP = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("path", "mode", "op", "axis", "what"),
    [
        ("model.layers.0.mlp.down_proj", "fwd_post", "reduce_scatter", 0, "sends along the sequence"),
        ("model.layers.0.mlp.down_proj", "fwd_post", "reduce_scatter", -1, "sends along the sequence"),
        ("model.norm", "fwd_post", "all_gather", 1, "under sequence parallelism, which cuts sequences before"),
    ],
)
def test_other_axes_under_sequence_parallelism_are_refused(path, mode, op, axis, what):
    definition = build_definition(tiny.config("llama", num_hidden_layers=2))
    sch = create_schedule(definition, SP, roles_of(definition))
    auto(sch, SP)
    sch[path].sync(mode, op, axis=axis)
    with pytest.raises(ScheduleError, match=what):
        make_plan(sch, model=definition, causal_lm=True)
