"""Emulated CUDA: devices, random states, checkpointing, and nothing left when it is taken back."""

import os
import subprocess
import sys

import pytest
import torch

from megasched.errors import ConfigError
from megasched.patches import host_cuda
from megasched.verify.ranks.pool import init_megatron


def devices():
    ones = torch.ones(2)
    index = torch.cuda.current_device()
    made = [
        torch.ones(2, device="cuda"),
        torch.ones(2, device="cuda:1"),
        torch.ones(2, device=0),
        torch.ones(2, device=index),
        torch.ones(2, device=torch.device("cuda", index)),
        torch.tensor([1.0, 1.0], device="cuda"),
        torch.empty_like(ones, device=index).fill_(1),
        torch.empty(2, pin_memory=True).fill_(1),
        ones.to("cuda"),
        ones.to(0),
        ones.to(torch.device("cuda:0"), torch.float64),
        ones.to(device="cuda", dtype=torch.float32),
        ones.cuda(),
        ones.cuda(index, non_blocking=True),
        ones.pin_memory(),
    ]
    assert all(tensor.device.type == "cpu" and tensor.sum() == 2 for tensor in made)
    assert made[10].dtype is torch.float64
    assert ones.cuda() is ones
    with torch.device("cuda"):
        assert torch.ones(2).device.type == "cpu"
    module = torch.nn.Linear(2, 2, device=index)
    weight = module.weight
    for moved in (module.cuda(), module.cuda(index), module.to("cuda"), module.to(index)):
        assert moved.weight is weight
        assert moved.weight.device.type == "cpu"
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.device.type == "cpu"
    return type(index), torch.cuda.device_count(), torch.cuda.is_available()


def meta_devices():
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
        # As with real CUDA, an explicit device wins over the context.
        assert torch.ones(2, device=torch.cuda.current_device()).device.type == "cpu"
    tensor = torch.ones(2, device="meta")
    assert tensor.to("meta").device.type == "meta"
    assert torch.empty_like(tensor).device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        tensor.cuda()
    return tensor.type()


def type_names():
    ones = torch.ones(2)
    assert ones.type(torch.int32).dtype is torch.int32
    assert ones.type("torch.cuda.LongTensor").dtype is torch.int64
    return [tensor.type() for tensor in (ones, ones.half(), torch.nn.Parameter(ones.bfloat16()))]


class AllocatesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.ones(grad.shape, device=torch.cuda.current_device())


def backward_on_the_device():
    x = torch.zeros(2, requires_grad=True)
    AllocatesInBackward.apply(x).sum().backward()
    torch.autograd.backward(AllocatesInBackward.apply(x).sum())
    return x.grad, torch.autograd.grad(AllocatesInBackward.apply(x).sum(), x)[0]


def streams():
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with torch.cuda.stream(stream):
        start.record()
        torch.cuda.current_stream().wait_stream(stream)
        end.record(stream)
    torch.cuda.synchronize()
    torch.ones(1).record_stream(stream)
    assert stream.record_event().query()
    stats = torch.cuda.memory_stats()
    return start.elapsed_time(end) >= 0, stats["allocated_bytes.all.current"], torch.cuda.memory_allocated()


def rng_tracker():
    import logging

    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    warnings = []
    handler = logging.Handler()
    handler.emit = warnings.append
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    init_megatron(tp=2, seed=11)
    tracker = get_cuda_rng_tracker()

    def draw():
        outside = [torch.rand(4)]
        with tracker.fork():
            inside = [torch.rand(4)]
        outside.append(torch.rand(4))
        with tracker.fork():
            inside.append(torch.rand(4))
        return torch.cat(outside), torch.cat(inside)

    outside, inside = draw()
    before = torch.cuda.get_rng_state()
    with tracker.fork():
        torch.rand(3)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    tracker = get_cuda_rng_tracker()
    again = draw()
    assert torch.equal(torch.cat(again), torch.cat((outside, inside)))
    torch.manual_seed(11)
    assert torch.equal(torch.rand(8), outside)
    return outside, inside, [record.getMessage() for record in warnings]


class Noisy(torch.nn.Module):
    """Two linears with dropout, inside and outside the tracker's fork."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        x = torch.nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)
        if get_cuda_rng_tracker().is_initialized():
            with get_cuda_rng_tracker().fork():
                x = torch.nn.functional.dropout(x, 0.5)
        return self.linear(x)


def gradients(how):
    """Output, gradients of input and weight, and a draw after the backward; from the same seeds each time."""
    from megatron.core.tensor_parallel import checkpoint as megatron_checkpoint
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.utils.checkpoint import checkpoint

    if how.startswith("megatron"):
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    torch.manual_seed(5)
    model, x = Noisy(), torch.randn(3, 8, requires_grad=True)
    out = {
        "torch plain": lambda: model(x),
        "torch reentrant": lambda: checkpoint(model, x, use_reentrant=True),
        "torch non-reentrant": lambda: checkpoint(model, x, use_reentrant=False),
        "megatron plain": lambda: model(x),
        "megatron checkpoint": lambda: megatron_checkpoint(model, False, x),
    }[how]()
    out.square().sum().backward()
    return [out.detach(), x.grad, model.linear.weight.grad, torch.rand(2)]


def recompute():
    plain = gradients("torch plain")
    for how in ("torch reentrant", "torch non-reentrant"):
        assert all(map(torch.equal, gradients(how), plain)), how
    init_megatron()
    plain = gradients("megatron plain")
    assert all(map(torch.equal, gradients("megatron checkpoint"), plain))
    return plain[2].abs().sum().item()


def data_loader_leaves_the_generator():
    before = torch.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.arange(8), shuffle=True, pin_memory=True)
    order = torch.cat(list(loader))
    assert torch.equal(torch.get_rng_state(), before)
    assert not loader.pin_memory
    return order.sort().values


def optimizer_steps():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.ones(2)
    optimizer.step()
    return weight.detach()


def environment():
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCHDYNAMO_DISABLE")
    return host_cuda.is_installed(), [os.environ[name] for name in names]


def test_every_form_of_a_cuda_device_is_the_cpu(ranks):
    assert ranks.run(1, devices) == [(int, 1, True)]


def test_meta_stays_meta(ranks):
    assert ranks.run(1, meta_devices) == ["torch.meta.FloatTensor"]


def test_type_names_are_those_that_megatron_compares_with(ranks):
    (names,) = ranks.run(1, type_names)
    assert names == ["torch.cuda.FloatTensor", "torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]


def test_custom_backwards_may_allocate_on_the_device(ranks):
    ((accumulated, single),) = ranks.run(1, backward_on_the_device)
    assert accumulated.tolist() == [4.0, 4.0]
    assert single.tolist() == [2.0, 2.0]


def test_streams_events_and_memory_figures(ranks):
    assert ranks.run(1, streams) == [(True, 0, 0)]


def test_rng_tracker_forks_differ_over_tp_and_default_states_do_not(ranks):
    (outside0, inside0, warnings0), (outside1, inside1, warnings1) = ranks.run(2, rng_tracker)
    assert torch.equal(outside0, outside1)
    assert not torch.equal(inside0, inside1)
    assert not torch.equal(inside0[:4], inside0[4:])
    assert warnings0 == warnings1 == []


def test_recompute_with_dropout_is_bit_identical(ranks):
    (magnitude,) = ranks.run(1, recompute)
    assert magnitude > 0


def test_a_data_loader_does_not_move_the_devices_generator(ranks):
    (order,) = ranks.run(1, data_loader_leaves_the_generator)
    assert order.tolist() == list(range(8))


def test_torch_optimizers_step(ranks):
    (weight,) = ranks.run(1, optimizer_steps)
    torch.testing.assert_close(weight, torch.tensor([0.9, 0.9]))


def test_the_environment_that_cpu_runs_need(ranks):
    assert ranks.run(1, environment) == [(True, ["1", "1"])]


def test_nothing_is_emulated_where_it_was_not_asked_for():
    assert not host_cuda.is_installed()
    assert torch.cuda.is_available.__module__ == "torch.cuda"
    assert "cuda" not in vars(torch.Tensor)


def test_real_cuda_is_refused_unless_forced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    with pytest.raises(ConfigError, match=r"8 device\(s\), the first is NVIDIA H100.*MEGASCHED_REHEARSE=force"):
        host_cuda.install()
    assert not host_cuda.is_installed()
    assert "cuda" not in vars(torch.Tensor)


def test_every_surface_is_listed_once():
    targets = host_cuda.PATCH.targets
    assert len(targets) == len(set(targets)) > 40


UNDO = """
import os, torch
from megasched.patches import host_cuda, undo
from megasched.attributes import locate

def state():
    found = []
    for target in host_cuda.PATCH.targets:
        owner, name = locate(target)
        found.append((name in vars(owner), id(getattr(owner, name))))
    import megatron.core.tensor_parallel.random as random
    variables = [os.environ.get(name) for name in host_cuda.ENVIRONMENT]
    return found, id(random._lazy_call), len(torch.overrides._get_current_function_mode_stack()), variables

# Simulates the second and last rank of a node.
before = state()
host_cuda.install()
host_cuda.install()
installed = state()
undo("host_cuda")
assert state() == before
assert all(new[1] != old[1] for new, old in zip(installed[0], before[0]))
assert installed[1] != before[1] and installed[2:] == (1, ["1", "1"])
import torch._dynamo  # Megatron has imported it meanwhile, when the variable was set
assert not torch._dynamo.config.disable
os.environ["RANK"] = "1"
host_cuda.install()
"""


def test_undo_restores_every_surface_and_the_banner_comes_once_on_rank_zero():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNDO],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if key not in host_cuda.ENVIRONMENT}
        | {"RANK": "0", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("REHEARSAL: no GPU is used") == 1
    assert "2 device(s) a node" in result.stderr
