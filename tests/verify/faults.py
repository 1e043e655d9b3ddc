"""A schedule file of mistakes: each function schedules as ``auto`` does and breaks one thing on the way.

They reach into the lowering of the process that reads them, which is not of use to anyone after that.
"""

import torch
from torch.nn import functional as F

from megasched.layers import build_context
from megasched.lowering import lower
from megasched.model_adapters.default_schedule import schedule as auto
from megasched.trainer.scheduled_model import ScheduledModel


def _when_lowered(path, change):
    """Calls ``change(lowered, context)`` on the linear that takes the place of the one at ``path``."""
    real = lower.lower_linear

    def lowering(at, module, given, **options):
        lowered = real(at, module, given, **options)
        if at == path:
            change(lowered, given)
        return lowered

    lower.lower_linear = lowering


def dropped_forward_reduce(sch, layout):
    auto(sch, layout)
    _when_lowered(
        "model.layers.1.self_attn.o_proj",
        lambda row, given: setattr(row, "forward", lambda x: F.linear(x, row.weight)),
    )


def dropped_backward_reduce(sch, layout):
    auto(sch, layout)
    real = lower.lower_linear

    def lowering(path, module, given, **options):
        in_mlp = path.startswith("model.layers.2.mlp.") and not path.endswith("down_proj")
        return real(path, module, given, **({**options, "entered": True} if in_mlp else options))

    lower.lower_linear = lowering


def bias_added_by_every_rank(sch, layout):
    auto(sch, layout)

    def change(row, given):
        real, bias = row.forward, row.bias
        row.forward = lambda x: real(x) + (given.size - 1) * bias

    _when_lowered("transformer.h.1.mlp.c_proj", change)


def norm_gradient_not_summed(sch, layout):
    auto(sch, layout)
    real = build_context.reduce_partial_gradient

    def reduce(parameter, placement, given):
        real(parameter, placement, given)
        if placement.name == "model.layers.1.post_attention_layernorm.weight":
            parameter.sequence_parallel = False

    build_context.reduce_partial_gradient = reduce


def untied_tie(sch, layout):
    auto(sch, layout)
    real = ScheduledModel._share

    def share(self, stages):
        real(self, stages)
        self.share_embeddings_and_output_weights = False

    ScheduledModel._share = share


def wrong_head_order(sch, layout):
    auto(sch, layout)

    def change(column, given):
        with torch.no_grad():
            first, second, *rest = column.weight.chunk(4)
            column.weight.copy_(torch.cat([second, first, *rest]))

    _when_lowered("model.layers.0.self_attn.qkv_proj", change)


def forked_dropout(sch, layout):
    auto(sch, layout)
    sch["transformer.h.1.mlp.dropout"].fork_rng()


def _rounded(module, args, output):
    return tuple(table.bfloat16().float() for table in output)


def rotary_in_bf16(sch, layout):
    auto(sch, layout)
    sch["model.rotary_emb"].hook("fw_post", _rounded)


def _multiplied(module, args):
    return (args[0] * 8.0, *args[1:])


def multiplier_twice(sch, layout):
    auto(sch, layout)
    sch["model.layers.2"].hook("fw_pre", _multiplied)


def kv_head_of_another_group(sch, layout):
    auto(sch, layout)

    def change(column, given):
        held = [torch.empty_like(column.weight) for _ in range(given.size)]
        torch.distributed.all_gather(held, column.weight.detach(), group=given.group)
        with torch.no_grad():
            column.weight.copy_(held[given.rank - 1])

    _when_lowered("model.layers.1.self_attn.k_proj", change)
