"""More mistakes, as ``faults.py`` has them: in the code of a built model, in what trains it, on one rank alone.

Each function plants one; none shows in one step of few tokens on the first rank.
"""

import torch

from megasched.model_adapters.default_schedule import schedule as auto
from megasched.trainer.losses.loss import VocabParallelLoss
from megasched.trainer.scheduled_model import ScheduledModel

MICRO_BATCHES = 4  # of a step on one replica


def _replace(owner, name, make):
    """Puts ``make(real)`` in the place of a function, once, however often a schedule is read."""
    real = getattr(getattr(owner, name), "real", getattr(owner, name))
    planted = make(real)
    planted.real = real
    setattr(owner, name, planted)


def _when_built(change):
    """Calls ``change(definition)`` on each stage's, once it is built."""

    def make(real):
        def share(self, stages):
            real(self, stages)
            change(self.definition)

        return share

    _replace(ScheduledModel, "_share", make)


def _output(path, change):
    """Puts ``change(output)`` in the place of what a module gives."""

    def plant(definition):
        module = definition.get_submodule(path)
        module.register_forward_hook(lambda module, args, output: change(output))

    _when_built(plant)


def _input(path, change):
    def plant(definition):
        module = definition.get_submodule(path)
        module.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))

    _when_built(plant)


def _gradient(name, change, ranks=(0, 1)):
    """Puts ``change(gradient)`` in the place of a parameter's, on some ranks."""

    def plant(definition):
        if torch.distributed.get_rank() in ranks:
            dict(definition.named_parameters())[name].register_hook(change)

    _when_built(plant)


def _optimizer(before=None, after=None):
    """Functions of Megatron's optimizer around each of its steps."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    def make(real):
        def step(self):
            if before is not None:
                before(self)
            result = real(self)
            if after is not None:
                after(self)
            return result

        return step

    _replace(FP32Optimizer, "step_with_ready_grads", make)


def _of_loss(change):
    """Puts ``change(losses, logits)`` in the place of what the loss gives."""

    def make(real):
        return lambda self, logits, labels, *args, **kwargs: change(self, real, logits, labels)

    _replace(VocabParallelLoss, "__call__", make)


# ids and positions -----------------------------------------------------------------------------------


def low_ids_zeroed(sch, layout):
    auto(sch, layout)
    _input("model.embed_tokens", lambda ids: ids.masked_fill(ids < 10, 0))


def upper_ids_wrong(sch, layout):
    auto(sch, layout)
    _input("model.embed_tokens", lambda ids: torch.where(ids > 251, ids - 1, ids))


def one_id_wrong(sch, layout):
    """Which is not in the first micro-batch."""
    auto(sch, layout)
    _input("model.embed_tokens", lambda ids: torch.where(ids == 5, 6, ids))


def rotary_wrong_beyond_16(sch, layout):
    auto(sch, layout)

    def stopped(tables):
        return tuple(torch.cat([table[:, :16], table[:, 15:16].expand_as(table[:, 16:])], 1) for table in tables)

    _output("model.rotary_emb", stopped)


def positions_off_by_one(sch, layout):
    auto(sch, layout)
    _input("transformer.wpe", lambda positions: positions + 1)


# modules ---------------------------------------------------------------------------------------------


def wrong_from_the_second_step(sch, layout):
    auto(sch, layout)
    calls = []

    def change(output):
        calls.append(1)
        return output * 1.01 if len(calls) > MICRO_BATCHES else output

    _output("model.layers.1.mlp", change)


def mixture_scaled(sch, layout):
    auto(sch, layout)

    def change(output):
        return (output[0] * 0.7, *output[1:]) if isinstance(output, tuple) else output * 0.7

    _output("model.layers.1.mlp", change)


def router_too_warm(sch, layout):
    auto(sch, layout)
    _output("model.layers.1.mlp.gate", lambda output: (output[0], output[1] * 0.5, *output[2:]))


def wrong_experts(sch, layout):
    auto(sch, layout)
    _output("model.layers.1.mlp.gate", lambda output: (*output[:-1], output[-1].flip(-1)))


def norm_clamped(sch, layout):
    auto(sch, layout)
    _output("model.layers.1.input_layernorm", lambda output: output.clamp(-1.5, 1.5))


def attention_scaled(sch, layout):
    auto(sch, layout)

    def plant(definition):
        definition.model.layers[1].self_attn.scaling *= 1.1

    _when_built(plant)


def bias_dropped(sch, layout):
    auto(sch, layout)

    def plant(definition):
        bias = definition.get_submodule("transformer.h.1.mlp.c_fc").bias
        bias.data.zero_()

    _when_built(plant)


def buffer_wrong(sch, layout):
    auto(sch, layout)
    _when_built(lambda definition: definition.model.rotary_emb.inv_freq.mul_(1.01))


def buffer_written(sch, layout):
    """Which no forward of these steps reads."""
    auto(sch, layout)
    _when_built(lambda definition: definition.model.rotary_emb.original_inv_freq.mul_(1.01))


def rounded_activation(sch, layout):
    auto(sch, layout)
    _output("model.layers.2.mlp.down_proj", lambda output: output.bfloat16().float())


def wrong_on_the_second_replica(sch, layout):
    auto(sch, layout)
    _output("model.layers.2.mlp", lambda output: output * (1 + 0.01 * torch.distributed.get_rank()))


# gradients -------------------------------------------------------------------------------------------

NORM = "model.layers.1.input_layernorm.weight"


def gradient_doubled_on_one_rank(sch, layout):
    auto(sch, layout)
    _gradient(NORM, lambda gradient: 2 * gradient, ranks=(1,))


def gradient_on_one_rank_alone(sch, layout):
    auto(sch, layout)
    _gradient(NORM, torch.zeros_like, ranks=(1,))


def gradient_times_tp(sch, layout):
    auto(sch, layout)
    _gradient(NORM, lambda gradient: 2 * gradient)


def experts_of_one_rank_untrained(sch, layout):
    auto(sch, layout)

    def plant(definition):
        if torch.distributed.get_rank() == 1:
            for name, parameter in definition.named_parameters():
                if "layers.1." in name and ".experts." in name:
                    parameter.register_hook(torch.zeros_like)

    _when_built(plant)


def norm_counted_twice(sch, layout):
    """The gradient norm alone: each rank counts what all of them hold whole."""
    auto(sch, layout)

    def plant(definition):
        dict(definition.named_parameters())[NORM].tensor_model_parallel = True

    _when_built(plant)


# the loss --------------------------------------------------------------------------------------------


def loss_of_its_own(sch, layout):
    auto(sch, layout)

    def with_z(self, real, logits, labels):
        return real(self, logits, labels) + 1e-3 * self.whole(logits).logsumexp(-1).square()

    _of_loss(with_z)


def labels_shifted_twice(sch, layout):
    auto(sch, layout)
    _of_loss(lambda self, real, logits, labels: real(self, logits, labels.roll(-1, 1)))


def padding_counted(sch, layout):
    auto(sch, layout)
    from megasched.launch import pretrain_gpt

    def make(real):
        return lambda mask, output: real(torch.ones_like(mask), output)

    _replace(pretrain_gpt, "loss_func", make)


# weights ---------------------------------------------------------------------------------------------


def replica_drifts(sch, layout):
    auto(sch, layout)
    held = {}
    _when_built(lambda definition: held.update(definition.named_parameters()))

    def drift(optimizer):
        if torch.distributed.get_rank() == 1:
            held[NORM].data.add_(1e-4)

    _optimizer(after=drift)


def norms_decayed(sch, layout):
    auto(sch, layout)

    def decay(optimizer):
        for group in optimizer.optimizer.param_groups:
            group["weight_decay"] = 0.1

    _optimizer(before=decay)


def parameter_not_trained(sch, layout):
    auto(sch, layout)
    held, start = {}, {}
    name = "model.layers.3.mlp.up_proj.weight"

    def plant(definition):
        held.update(definition.named_parameters())

    def keep(optimizer):
        start.setdefault(name, held[name].detach().clone())

    def put_back(optimizer):
        held[name].data.copy_(start[name])

    _when_built(plant)
    _optimizer(before=keep, after=put_back)


def only_the_last_step_lost(sch, layout):
    """The third step of one parameter: nothing that is computed shows it."""
    auto(sch, layout)
    held, steps = {}, []

    def plant(definition):
        held.update(definition.named_parameters())

    def put_back(optimizer):
        steps.append(held[NORM].detach().clone())
        if len(steps) == 3:
            held[NORM].data.copy_(steps[1])

    _when_built(plant)
    _optimizer(after=put_back)


def mask_lost(sch, layout):
    auto(sch, layout)

    def plant(definition):
        def unmasked(module, args, kwargs):
            return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["attention_mask"])}

        definition.register_forward_pre_hook(unmasked, with_kwargs=True)

    _when_built(plant)
