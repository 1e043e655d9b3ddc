"""Carries the hidden state and its sides from stage to stage, in the one tensor that Megatron sends.

Mostly this is the hidden state as it is, [s, b, h]. Where more has to cross, or the hidden state has another
form, the bytes of all tensors lie one after the other in a tensor [s, b, w]; Megatron takes w from
``config.hidden_size`` (``core/pipeline_parallel/schedules.py``, ``get_tensor_shapes``). It only moves that tensor
and its gradient, so integers arrive as they were, and so do floats of another precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor
from torch import nn

from megasched.analysis.find_layer_stack import measure_stage_inputs
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.output_refs import OutputRef, StageInput
from megasched.definition.objectives import objective_of

_ALIGNED = 8  # bytes; a view in another dtype must begin at a multiple of its size


@dataclass(frozen=True)
class PackedTensor:
    """Describes one of the tensors that are packed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Returns the number of bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Returns the number of bytes from its beginning to that of the next tensor."""
        return -(-self.size // _ALIGNED) * _ALIGNED


@dataclass
class StageBuffers:
    """Holds what the boundaries of a stage share during one forward.

    Attributes:
        received: the hidden state that came in; None on the first stage.
        values: the sides that came in, or were made on this stage.
        batch, length, device: those of the token ids; the length is that of whole sequences.
        dtype: dtype of the parameters, as they compute.
        open: whether a forward runs. Recompute in the backward pass stores nothing here, as it would stay.
    """

    received: torch.Tensor | None = None
    values: dict[StageInput, torch.Tensor] = field(default_factory=dict)
    batch: int = 0
    length: int = 0
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    open: bool = False

    def clear(self) -> None:
        """Releases the tensors."""
        self.open = False
        self.received = None
        self.values.clear()


@dataclass
class BoundaryCodec:
    """Packs and unpacks the tensors that cross stage boundaries.

    Attributes:
        definition: pristine; its sides are measured on it.
        dtype: dtype of parameters and of the wire.
        parts: number of parts of a sequence (TP under sequence parallelism, or 1).
        cut: dimension along which a side is cut over TP (or along the sequence), by its first place.
        tp: number of parts of such a side.
        width: the w of what is sent, set by ``fit``.
        measured: sides by dtype, rows and length, for other codecs of the same definition too.
    """

    definition: nn.Module
    structure: LayerStack
    dtype: torch.dtype
    parts: int = 1
    cut: Mapping[OutputRef, int] = field(default_factory=dict)
    tp: int = 1
    width: int = 0
    measured: dict[tuple[torch.dtype, int, int], dict[OutputRef, torch.Tensor]] = field(default_factory=dict)

    def needed(self, boundaries: Sequence[int]) -> bool:
        """Returns whether these cuts take more than the hidden state as it is."""
        return bool(boundaries) and not (self._plain() and not self._sides(boundaries))

    def sends_local_sequences(self, boundaries: Sequence[int]) -> bool:
        """Returns whether a rank with a part of each sequence can send its part alone.

        It can send a plain hidden state, and what HF's hooks recorded, which is gathered after the layers.
        """
        recorded = set(self.structure.recorded)
        return self._plain() and all(side.places[0] in recorded for side in self._sides(boundaries))

    def _sides(self, boundaries: Sequence[int]) -> set[StageInput]:
        return {side for boundary in boundaries for side in self.structure.stage_inputs_at(boundary)}

    def _plain(self) -> bool:
        """Returns whether the hidden state is [b, s, h] in the wire's precision."""
        hidden = self.structure.hidden
        fixed = objective_of(self.definition).sequence_length(getattr(self.definition, "config", None))
        sequence = ("b", "s" if fixed is None else fixed[0])
        plain = len(hidden.dims) == 3 and hidden.dims[:2] == sequence and isinstance(hidden.dims[2], int)
        return plain and hidden.run_dtype(self.dtype) == self.dtype

    def fit(self, boundaries: Sequence[int], batch: int, length: int) -> None:
        """Makes what is sent, [s, b, w], wide enough for all of these cuts; called for each size of a batch.

        A side that has the same size for any number of rows needs a larger w where there are fewer rows.
        """
        room = max(sum(piece.room for piece in self.pieces(boundary, batch, length)) for boundary in boundaries)
        row = length // self.parts * batch * self.dtype.itemsize
        self.width = max(self.width, -(-room // row))

    def pieces(self, boundary: int, batch: int, length: int) -> tuple[PackedTensor, ...]:
        """Returns what crosses a cut before layer ``boundary`` on this rank: the hidden state, then the sides."""
        hidden = self.structure.hidden
        sizes = list(hidden.sizes(batch, length))
        if self.parts > 1:
            sizes[self.structure.sequence_dim] //= self.parts
        stage_inputs = self.structure.stage_inputs_at(boundary)
        found = self._measure(batch, length) if stage_inputs else {}
        return (
            PackedTensor(tuple(sizes), hidden.run_dtype(self.dtype)),
            *(self._local(side, found[side.places[0]]) for side in stage_inputs),
        )

    def _local(self, side: StageInput, whole: torch.Tensor) -> PackedTensor:
        sizes, dim = list(whole.shape), self.cut.get(side.places[0])
        if dim is not None:
            sizes[dim] //= self.tp
        return PackedTensor(tuple(sizes), whole.dtype)

    def _measure(self, batch: int, length: int) -> dict[OutputRef, torch.Tensor]:
        key = self.dtype, batch, length
        if key not in self.measured:
            self.measured[key] = measure_stage_inputs(self.definition, self.structure, batch, length, self.dtype)
        return self.measured[key]

    def send(self, boundary: int, wire: StageBuffers, hidden: torch.Tensor) -> torch.Tensor:
        """Packs the hidden state and the sides that a cut takes into [s, b, w], which is no view."""
        stage_inputs = self.structure.stage_inputs_at(boundary)
        missing = [side.places[0].path for side in stage_inputs if side not in wire.values]
        assert not missing, f"nothing was taken of {missing}"
        tensors = [hidden, *(wire.values[side] for side in stage_inputs)]
        pieces = self.pieces(boundary, wire.batch, wire.length)
        names = ["the hidden state", *(side.places[0].path for side in stage_inputs)]
        for name, tensor, piece in zip(names, tensors, pieces, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (piece.shape, piece.dtype):
                what = f"{name} crosses the cut before layer {boundary} as {tensor.dtype} {list(tensor.shape)}"
                raise RuntimeError(f"{what}; {piece.dtype} {list(piece.shape)} was planned")
        shape = (wire.length // self.parts, wire.batch, self.width)
        out = _Pack.apply(shape, self.dtype, pieces, *tensors)
        return make_viewless_tensor(out, requires_grad=out.requires_grad, keep_graph=True)

    def receive(self, boundary: int, wire: StageBuffers, packed: torch.Tensor) -> None:
        """Unpacks [s, b, w] into the hidden state and the sides of a cut."""
        hidden, *stage_inputs = _Unpack.apply(packed, self.pieces(boundary, wire.batch, wire.length))
        wire.received = hidden
        wire.values.update(zip(self.structure.stage_inputs_at(boundary), stage_inputs, strict=True))
        wire.values.update((side, hidden) for side in self.structure.stage_inputs_in_hidden(boundary))


def send_hidden(hidden: torch.Tensor) -> torch.Tensor:
    """Transposes [b, s, h] to [s, b, h], no view, as Megatron frees what it has sent."""
    out = hidden.transpose(0, 1).contiguous()
    return make_viewless_tensor(out, requires_grad=out.requires_grad, keep_graph=True)


def receive_hidden(sent: torch.Tensor) -> torch.Tensor:
    """Transposes [s, b, h] to a contiguous [b, s, h], as definitions may view it."""
    return sent.transpose(0, 1).contiguous()


def _write(
    tensors: Sequence[torch.Tensor | None], pieces: Sequence[PackedTensor], out: torch.Tensor
) -> torch.Tensor:
    room, start = out.view(-1).view(torch.uint8), 0
    for tensor, piece in zip(tensors, pieces, strict=True):
        if tensor is not None:
            room[start : start + piece.size].view(piece.dtype).view(piece.shape).copy_(tensor)
        start += piece.room
    return out


def _read(packed: torch.Tensor, pieces: Sequence[PackedTensor]) -> list[torch.Tensor]:
    room, start, found = packed.contiguous().view(-1).view(torch.uint8), 0, []
    for piece in pieces:
        found.append(room[start : start + piece.size].view(piece.dtype).view(piece.shape).clone())
        start += piece.room
    return found


class _Pack(torch.autograd.Function):
    """Packs tensors into one; the gradient comes back as ``_Unpack`` has packed it."""

    @staticmethod
    def forward(
        ctx: Any, shape: Any, dtype: torch.dtype, pieces: Sequence[PackedTensor], *tensors: torch.Tensor
    ) -> Any:
        ctx.pieces = pieces
        return _write(tensors, pieces, torch.zeros(shape, dtype=dtype, device=tensors[0].device))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        found = _read(gradient, ctx.pieces)
        return None, None, None, *(g if g.is_floating_point() else None for g in found)


class _Unpack(torch.autograd.Function):
    """Unpacks one tensor into those that were packed."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, pieces: Sequence[PackedTensor]) -> Any:
        ctx.pieces, ctx.shape, ctx.dtype = pieces, packed.shape, packed.dtype
        found = _read(packed, pieces)
        ctx.mark_non_differentiable(*(tensor for tensor in found if not tensor.is_floating_point()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=next(g.device for g in gradients if g is not None))
        floats = [
            g if piece.dtype.is_floating_point else None for g, piece in zip(gradients, ctx.pieces, strict=True)
        ]
        return _write(floats, ctx.pieces, out), None
