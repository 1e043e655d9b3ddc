"""Stands for whole tensors of which a rank holds pieces, as ``torch.distributed.checkpoint`` saves and loads them.

The protocol is that of torch/distributed/_checkpointable.py, which DTensor has as well; a DTensor can't say that a
rank holds several pieces of a tensor, as of projections that are packed into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megasched.errors import ConfigError
from megasched.plan.placement import Placement


class Box(NamedTuple):
    """Describes a piece: where it begins in the whole HF tensor and in what the rank holds, and its sizes.

    All three are in HF's orientation.
    """

    offsets: tuple[int, ...]
    held: tuple[int, ...]
    sizes: tuple[int, ...]


class HeldPieces(torch.Tensor):
    """Has the shape of a whole HF tensor, and the storage of what a rank holds of it.

    Attributes:
        held: the rank's tensor: its TP or EP shard, of which a DTensor of FSDP2 holds a part.
        boxes: the pieces.
        transposed: whether ``held`` is transposed against HF's tensor.
    """

    held: torch.Tensor
    boxes: tuple[Box, ...]
    transposed: bool

    @staticmethod
    def __new__(
        cls, held: torch.Tensor, shape: Sequence[int], boxes: Sequence[Box], transposed: bool
    ) -> HeldPieces:
        made: HeldPieces = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=held.dtype, device=held.device)
        made.held, made.boxes, made.transposed = held, tuple(boxes), transposed
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"HeldPieces(of {list(self.shape)}, held {list(self.held.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Detaches and copies, which ``async_save`` does; nothing is computed with pieces."""
        if function not in _COPIES:
            raise ConfigError(
                f"{function}: this stands for a tensor of which the rank holds pieces, for "
                "torch.distributed.checkpoint to save and load; compute with the model's parameters"
            )
        first = next(one for one in args if isinstance(one, cls))
        given = [one.held if isinstance(one, cls) else one for one in args]
        if function is _NEW:
            given[1] = first.held.shape
        held = function(*given, **(kwargs or {}))
        return args[0] if function is _IN_PLACE else cls(held, first.shape, first.boxes, first.transposed)

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties(self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in self.boxes if torch.Size(box.offsets) == index.offset)
        found = self.held.to_local() if isinstance(self.held, DTensor) else self.held
        found = found.t() if self.transposed else found
        for axis, (start, length) in enumerate(zip(box.held, box.sizes, strict=True)):
            found = found.narrow(axis, start, length)
        return found


_IN_PLACE, _NEW = torch.ops.aten.copy_.default, torch.ops.aten.new_empty.default
_COPIES = (
    _IN_PLACE,
    _NEW,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.empty_like.default,
)


def held_pieces(held: torch.Tensor, placement: Placement, rank: int, size: int) -> HeldPieces:
    """Returns what stands for the whole HF tensor.

    Args:
        held: the rank's tensor, as the placement has it; or a DTensor of FSDP2, which shares that out.
        rank, size: in the placement's group.
    """
    shared_out = [(0, length) for length in held.shape]
    if isinstance(held, DTensor):
        chunks = held.__create_chunk_list__()
        shared_out = [
            (start, start + length) for start, length in zip(chunks[0].offsets, chunks[0].sizes, strict=True)
        ]
    if placement.transposed:
        shared_out.reverse()
    boxes = list(_boxes(placement, rank, size, shared_out))
    return HeldPieces(held, placement.shape, boxes, placement.transposed)


def _boxes(placement: Placement, rank: int, size: int, shared_out: Sequence[tuple[int, int]]) -> Iterator[Box]:
    """Yields the pieces that are not empty.

    Args:
        shared_out: of the shard that the placement describes, the range along each of HF's axes that is held here.
    """
    axis = placement.axis
    if axis is None:
        runs = [(start, 0, stop - start) for start, stop in shared_out[:1]]
    else:
        runs = _along(
            placement.ranges(rank, size),
            [length // size for length in placement.component_sizes],
            shared_out[axis],
        )
    for offset, held, length in runs:
        box = [(start, 0, stop - start) for start, stop in shared_out]
        box[axis or 0] = (offset, held, length)
        if all(length > 0 for _, _, length in box):
            yield Box(*zip(*box, strict=True))


def _along(
    ranges: Sequence[tuple[int, int]], lengths: Sequence[int], held: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Yields where each component of a shard begins in the whole and in what is held, and its length on the axis.

    Args:
        ranges: of the components in the whole, without padding.
        lengths: of the components in the shard, with padding.
        held: the range of the shard that is held.
    """
    for begin, (start, stop) in zip([0, *accumulate(lengths)], ranges, strict=False):
        low, high = max(begin, held[0]), min(begin + stop - start, held[1])
        yield start + low - begin, low - held[0], high - low
