"""What goes from stage to stage in one tensor."""

import pytest
import torch

from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.output_refs import BEFORE, OutputRef, StageInput
from megasched.analysis.stages.shapes import Shape
from megasched.trainer.stages.stage_transfer import BoundaryCodec, StageBuffers, receive_hidden, send_hidden

IDS = StageInput(BEFORE, 3, (OutputRef(""),))
KEYS = StageInput(0, 2, (OutputRef("layers.0", 0, "shared", "kv"),))
MASK = StageInput(0, 2, (OutputRef("layers.0", 1),))
TENSORS = {  # [b, s] = [2, 6]
    IDS: torch.arange(12).view(2, 6) + 2**40,
    KEYS: torch.randn(2, 4, 6, 3, generator=torch.Generator().manual_seed(0)),
    MASK: torch.arange(12).view(2, 6) % 5 == 0,
}


def packing(dtype=torch.float32, dims=("b", "s", 8), stage_inputs=tuple(TENSORS), **more):
    structure = LayerStack(
        "layers", 4, HiddenStateArg(0, None), stage_inputs=stage_inputs, hidden=Shape(dims, torch.float32)
    )
    made = BoundaryCodec(torch.nn.Module(), structure, dtype, **more)
    made.measured[made.dtype, 2, 6] = {side.places[0]: tensor.to("meta") for side, tensor in TENSORS.items()}
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_packed_arrives_and_so_does_its_gradient(dtype):
    pack = packing(dtype)
    pack.fit([1, 2, 3], 2, 6)
    hidden = torch.randn(2, 6, 8).to(dtype).requires_grad_()
    keys = TENSORS[KEYS].clone().requires_grad_()
    wire = StageBuffers(batch=2, length=6, values={**TENSORS, KEYS: keys})
    sent = pack.send(2, wire, hidden)
    assert (sent.shape, sent.dtype, sent._base) == ((6, 2, pack.width), dtype, None)

    received = sent.detach().requires_grad_()
    there = StageBuffers(batch=2, length=6)
    pack.receive(2, there, received)
    assert torch.equal(there.received, hidden)
    for side, tensor in TENSORS.items():
        assert torch.equal(there.values[side], tensor)
    assert [there.values[side].requires_grad for side in TENSORS] == [False, True, False]

    ((there.received * 2).float().sum() + (there.values[KEYS] * TENSORS[KEYS]).sum()).backward()
    sent.backward(received.grad)
    assert torch.equal(hidden.grad, torch.full_like(hidden, 2))
    assert torch.equal(keys.grad, TENSORS[KEYS])


def test_a_side_that_nobody_reads_has_no_gradient_but_zeros():
    pack = packing()
    pack.fit([2], 2, 6)
    keys = TENSORS[KEYS].clone().requires_grad_()
    sent = pack.send(2, StageBuffers(batch=2, length=6, values={**TENSORS, KEYS: keys}), torch.randn(2, 6, 8))
    received, there = sent.detach().requires_grad_(), StageBuffers(batch=2, length=6)
    pack.receive(2, there, received)
    there.received.sum().backward()
    sent.backward(received.grad)
    assert torch.equal(keys.grad, torch.zeros_like(keys))


def test_the_width_is_that_of_the_widest_cut():
    pack = packing()
    pack.fit([1, 2, 3], 2, 6)
    keys, ids, mask, hidden = 2 * 4 * 6 * 3 * 4, 12 * 8, 16, 2 * 6 * 8 * 4  # bytes, rounded to 8
    assert [sum(piece.room for piece in pack.pieces(b, 2, 6)) for b in (2, 3)] == [
        hidden + ids + keys + mask,
        hidden + ids,
    ]
    assert pack.width == -(-(hidden + ids + keys + mask) // (12 * 4))


def test_what_is_cut_is_sent_as_it_is_on_each_rank():
    pack = packing(parts=2, tp=2, cut={KEYS.places[0]: 1})
    shapes = [piece.shape for piece in pack.pieces(2, 2, 6)]
    assert shapes == [(2, 3, 8), (2, 6), (2, 2, 6, 3), (2, 6)]


def test_when_packing_is_needed():
    assert not packing(stage_inputs=()).needed([1, 2])
    assert not packing(stage_inputs=()).needed([])
    assert packing().needed([1])
    assert not packing().needed([])
    assert not packing(stage_inputs=(KEYS,)).needed([3])
    assert packing(stage_inputs=(), dims=("s", "b", 8)).needed([1])
    assert packing(stage_inputs=(), dims=("b", "s", 4, 8)).needed([1])


def test_another_shape_than_planned_is_refused():
    pack = packing()
    pack.fit([2], 2, 6)
    wire = StageBuffers(batch=2, length=6, values={**TENSORS, MASK: TENSORS[MASK].long()})
    with pytest.raises(RuntimeError, match=r"layers.0 crosses the cut before layer 2 as torch.int64 \[2, 6\]"):
        pack.send(2, wire, torch.randn(2, 6, 8))


def test_the_hidden_state_alone():
    hidden = torch.randn(1, 6, 8, requires_grad=True)
    sent = send_hidden(hidden)
    assert (sent.shape, sent._base) == ((6, 1, 8), None)
    assert torch.equal(receive_hidden(sent), hidden)


def test_parts_of_sequences_go_along_a_plain_hidden_state_with_what_hooks_recorded():
    """Of other sides it is not known how a part of a sequence has them."""
    logits = StageInput(0, 4, (OutputRef("layers.0.router", 0),))
    for stage_inputs, known in (((), True), ((logits,), True), ((logits, KEYS), False)):
        pack = packing(stage_inputs=stage_inputs)
        pack.structure.recorded = logits.places
        assert pack.sends_local_sequences([1, 2]) is known
        assert pack.needed([1, 2]) is bool(stage_inputs)
    assert not packing(dims=("s", "b", 8), stage_inputs=()).sends_local_sequences([1])


def test_there_is_room_for_batches_of_other_rows_than_in_training():
    """A bias of positions has as many bytes for one row as for four."""
    bias = StageInput(0, 2, (OutputRef("layers.0", 0, "bias"),))
    pack = packing(stage_inputs=(bias,))
    tensor = torch.randn(1, 4, 6, 6)
    for rows in (1, 4):
        pack.measured[pack.dtype, rows, 6] = {bias.places[0]: tensor.to("meta")}
        pack.fit([2], rows, 6)
    for rows in (1, 4):
        hidden, there = torch.randn(rows, 6, 8), StageBuffers(batch=rows, length=6)
        pack.receive(2, there, pack.send(2, StageBuffers(batch=rows, length=6, values={bias: tensor}), hidden))
        assert torch.equal(there.received, hidden)
        assert torch.equal(there.values[bias], tensor)
