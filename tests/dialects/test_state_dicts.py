"""Checkpoints of torch.distributed.checkpoint, saved at one layout and resumed at another."""

import copy
import io
from types import MappingProxyType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.nn.parallel import DistributedDataParallel

import megasched
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import CLIP, Steps, adamw, causal, gaps, mean_over_replicas, one_process, shared
from tests.dialects.test_saving import normed
from tests.dialects.test_torch import fsdp2
from tests.lowering.models import tiny_model

BEFORE = 2  # steps before a checkpoint


def _made(family, layout, sharded, changes):
    """A built model, and what trains it: itself as FSDP2 has it, or DDP."""
    from megatron.core import parallel_state

    init_megatron(**layout)
    sch = megasched.create_schedule(tiny_model(family, **changes), name="auto")
    if sharded:
        sch.level("leaf")
    model, replicas = megasched.build(sch), parallel_state.get_data_parallel_group()
    wrapped = fsdp2(model, replicas) if sharded else DistributedDataParallel(model, process_group=replicas)
    return model, wrapped


def _train(model, wrapped, optimizer, data):
    losses = []
    for batch in data:
        loss = wrapped(**shared(batch)).loss
        loss.backward()
        megasched.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_replicas(loss))
    return losses


def _state(model, optimizer):
    weights, states = megasched.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def _saved(folder, family, layout, sharded, changes=MappingProxyType({})):
    model, wrapped = _made(family, layout, sharded, changes)
    optimizer = adamw(model.parameters())
    losses = _train(model, wrapped, optimizer, causal()[:BEFORE])
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    return losses


def _resumed(folder, family, layout, sharded, changes=MappingProxyType({})):
    model, wrapped = _made(family, layout, sharded, changes)
    optimizer = adamw(model.parameters())
    _spoil(model, optimizer)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    weights, moments = state["model"], state["optimizer"]
    megasched.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    losses = _train(model, wrapped, optimizer, causal()[BEFORE:])
    return losses, megasched.full_state_dict(model)


def _spoil(model, optimizer):
    """What a checkpoint has to replace."""
    optimizer.param_groups[0]["lr"] = 1.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)


@pytest.mark.parametrize(
    ("family", "first", "then"),
    [
        ("gpt2", (4, {"tp": 2}, True), (2, {"tp": 1}, False)),
        ("phi3", (2, {"tp": 1}, True), (2, {"tp": 2}, False)),
        ("mixtral", (2, {"ep": 2}, False), (2, {"tp": 2}, False)),
    ],
)
def test_a_run_goes_on_at_another_layout(ranks, tmp_path, family, first, then):
    folder = str(tmp_path / "saved")
    (size, *layout), (later_size, *later) = first, then
    before = ranks.run(size, _saved, folder, family, *layout)[0]
    after, weights = ranks.run(later_size, _resumed, folder, family, *later)[0]
    _assert_one_run(before, after, weights, one_process(family))


def _assert_one_run(before, after, weights, wanted):
    found = Steps([*before, *after], wanted.norms, {name: weights[name] for name in wanted.weights})
    assert gaps(found, wanted) == pytest.approx({"losses": 0, "norms": 0, "weights": 0}, abs=1e-5)


def _through_stages(folder, later_folder):
    """Loads what whole models have saved, and saves it anew; both chunks of a rank have one optimizer."""
    init_megatron(pp=2)
    rank = torch.distributed.get_rank()
    schedules = [megasched.create_schedule(tiny_model("gpt2", n_layer=4), name="auto") for _ in range(2)]
    chunks = [megasched.build_stage(sch, rank + 2 * i, 4) for i, sch in enumerate(schedules)]
    optimizer = adamw([parameter for chunk in chunks for parameter in chunk.parameters()])
    for chunk in chunks:
        _spoil(chunk, optimizer)
    state = _state(chunks, optimizer)
    dcp.load(state, checkpoint_id=folder)
    weights, moments = state["model"], state["optimizer"]
    megasched.set_state_dict(chunks, optimizer, model_state_dict=weights, optim_state_dict=moments)
    dcp.save(_state(chunks, optimizer), checkpoint_id=later_folder)
    return sorted(weights)[0], len(weights)


def test_stages_load_and_save_it(ranks, tmp_path):
    changes = {"n_layer": 4}
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    before = ranks.run(2, _saved, first, "gpt2", {"tp": 2}, False, changes)[0]
    ranks.run(2, _through_stages, first, second)
    after, weights = ranks.run(2, _resumed, second, "gpt2", {"tp": 1}, False, changes)[0]
    _assert_one_run(before, after, weights, one_process("gpt2", **changes))


def _statistics(folder):
    _, built, pictures = normed()
    built(pictures)
    wanted, optimizer = megasched.full_state_dict(built), adamw(built.parameters())
    weights, moments = megasched.get_state_dict(built, optimizer)
    dcp.async_save({"model": weights}, checkpoint_id=folder).result()
    with torch.no_grad():
        for tensor in [*built.parameters(), *built.buffers()]:
            tensor.zero_()
    weights, moments = megasched.get_state_dict(built, optimizer)
    dcp.load({"model": weights}, checkpoint_id=folder)
    megasched.set_state_dict(built, optimizer, model_state_dict=weights, optim_state_dict=moments)
    found = megasched.full_state_dict(built)
    return [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)], len(wanted)


def test_statistics_and_a_save_in_the_background(ranks, tmp_path):
    assert ranks.run(2, _statistics, str(tmp_path / "saved")) == [([], 9), ([], 0)]


def _refused(folder):
    init_megatron(tp=2)
    model = megasched.build(megasched.create_schedule(tiny_model("llama"), name="auto"))
    state, words = model.state_dict(), []
    factored = torch.optim.Adafactor(model.parameters())
    for call in (
        lambda: dcp.save({"model": state}, checkpoint_id=folder),
        lambda: megasched.get_state_dict(model, factored),
        lambda: megasched.get_state_dict(tiny_model("llama"), adamw(model.parameters())),
        lambda: megasched.get_state_dict(model, object()),
        lambda: megasched.get_state_dict(model, adamw(model.parameters()))[0]["lm_head.weight"] + 1,
    ):
        with pytest.raises((megasched.ConfigError, CheckpointException)) as raised:
            call()
        words.append(str(raised.value))
    return words, _plain(state, model)


def _plain(state, model):
    """What is saved, copied or computed of a state dict is of plain tensors, and it loads."""
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    copies = [torch.load(stored, weights_only=True), copy.deepcopy(state), {k: v * 1 for k, v in state.items()}]
    for each in copies:
        assert {type(tensor) for tensor in each.values()} == {torch.Tensor}
        assert all(torch.equal(each[name], tensor) for name, tensor in state.items())
    return str(model.load_state_dict(state))


def test_shards_are_refused_where_they_would_be_taken_for_copies(ranks, tmp_path):
    for (raw, factored, plain, other, computed), loaded in ranks.run(2, _refused, str(tmp_path / "saved")):
        assert "this is a rank's shard, and torch.distributed.checkpoint would keep that of one rank alone" in raw
        assert "row_var: it has the shape [" in factored
        assert "this LlamaForCausalLM was not built by megasched" in plain
        assert "a object is no optimizer of torch.optim" in other
        assert "this stands for a tensor of which the rank holds pieces" in computed
        assert loaded == "<All keys matched successfully>"
