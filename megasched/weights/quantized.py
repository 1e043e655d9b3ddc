"""Folders whose weights are stored in 8 or 4 bits, as some models are published: read as bfloat16, box by box.

Training needs weights of full range. transformers makes them when it loads (``Fp8Dequantize`` in
transformers/integrations/finegrained_fp8.py, ``convert_moe_packed_tensors`` in integrations/mxfp4.py); a rank here
does it for its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from megasched.errors import CheckpointError
from megasched.weights.lazy import Box, LazyTensor, Leaf, Transposed, refuse_nan

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Of the stored names: what is behind that of a weight.
SCALE = "_scale_inv"
PACKED, SCALES = "_blocks", "_scales"

# What a 4-bit float of 2 bits of exponent and 1 of mantissa is (OCP Microscaling Formats 1.0, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Bias of a scale that is an exponent of 2 alone (same source, section 5.4.1).
E8M0_BIAS = 127


def settings_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """How a model's weights are quantized, as its config says it; None where they are not."""
    found = getattr(config, "quantization_config", None)
    if found is None or isinstance(found, dict):
        return found
    return found.to_dict()


def dequantized(stored: Mapping[str, LazyTensor], config: PretrainedConfig) -> dict[str, LazyTensor]:
    """The tensors of a folder by their names in a folder that is not quantized.

    Raises:
        CheckpointError: they are quantized in a way that is not read, or a scale does not fit its weight.
    """
    settings = settings_of(config)
    if settings is None:
        return dict(stored)
    method = settings.get("quant_method")
    if method == "fp8":
        return _from_fp8(stored, settings)
    if method == "mxfp4":
        return _from_mxfp4(stored)
    where = next(iter(stored.values())).where if stored else "the folder"
    raise CheckpointError(
        f"{where}: config.json has a quantization_config with quant_method {method}; fp8 and mxfp4 are read. Load "
        "the model with transformers, call dequantize() on it and save it; or take quantization_config out, if "
        "the weights are not quantized"
    )


def _from_fp8(stored: Mapping[str, LazyTensor], settings: Mapping[str, Any]) -> dict[str, LazyTensor]:
    given = settings.get("weight_block_size")
    block = None if given is None else (int(given[0]), int(given[1]))
    found: dict[str, LazyTensor] = {}
    for key, tensor in stored.items():
        if key.endswith(SCALE) and key.removesuffix(SCALE) in stored:
            continue
        scale = stored.get(key + SCALE)
        if scale is None and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            raise CheckpointError(f"{tensor.where} is in {tensor.dtype}, and there is no {key + SCALE} for it")
        found[key] = tensor if scale is None else Fp8(tensor, scale, block)
    return found


def _from_mxfp4(stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for key, tensor in stored.items():
        name = key.removesuffix(PACKED)
        if name != key and name + SCALES in stored:
            last = len(tensor.shape) - 2
            found[name] = Transposed(Mxfp4(tensor, stored[name + SCALES]), last - 1, last)
        elif not (key.endswith(SCALES) and key.removesuffix(SCALES) + PACKED in stored):
            found[key] = tensor
    return found


@dataclass(frozen=True)
class Fp8:
    """8-bit floats and a factor for each block of rows and columns; the last blocks may be smaller.

    Attributes:
        weight: [..., rows, columns].
        scale: [..., blocks of rows, blocks of columns], or one value for all.
        block: rows and columns of a block; None where there is one value for all.
    """

    weight: LazyTensor
    scale: LazyTensor
    block: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16

    @property
    def where(self) -> str:
        return self.weight.where

    def read(self, box: Box) -> torch.Tensor:
        """See ``LazyTensor.read``.

        Raises:
            CheckpointError: the weight is not in 8-bit floats, or the scales are not one for each block.
        """
        import torch

        values = self.weight.read(box)
        if not values.is_floating_point() or values.itemsize != 1:
            raise CheckpointError(
                f"{self.where} has scales and is in {values.dtype}; 8-bit floats are read, as the config's "
                "quantization_config says"
            )
        factors = self._factors(box)
        result = (values.float() * factors).to(torch.bfloat16)
        refuse_nan(result, f"{self.where}, or its scale,")
        return result

    def _factors(self, box: Box) -> torch.Tensor:
        """Of the values in a box; of a shape that goes with theirs."""
        if prod(self.scale.shape) == 1:
            return _factor(self.scale.read(tuple((0, 1) for _ in self.scale.shape))).reshape(())
        blocks = (*self.shape[:-2], *self._blocks())
        if self.scale.shape != blocks:
            raise CheckpointError(
                f"{self.scale.where} has shape {list(self.scale.shape)}; a weight of {list(self.shape)} "
                f"in blocks of {self.block} needs {list(blocks)}"
            )
        assert self.block is not None
        of_scale = [
            (start // size, -(-stop // size)) for (start, stop), size in zip(box[-2:], self.block, strict=True)
        ]
        factors = _factor(self.scale.read((*box[:-2], *of_scale)))
        for dim, (start, stop), size in zip((-2, -1), box[-2:], self.block, strict=True):
            factors = factors.repeat_interleave(size, dim).narrow(dim, start % size, stop - start)
        return factors

    def _blocks(self) -> tuple[int, ...]:
        if self.block is None:
            return ()
        return tuple(-(-length // size) for length, size in zip(self.shape[-2:], self.block, strict=True))

    def leaves(self) -> Iterator[Leaf]:
        return self.weight.leaves()


@dataclass(frozen=True)
class Mxfp4:
    """Pairs of 4-bit floats, and an exponent for each group of them (OCP Microscaling Formats).

    Attributes:
        packed: [..., rows, groups, bytes of a group]; the lower half of a byte comes first.
        scales: [..., rows, groups].
    """

    packed: LazyTensor
    scales: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, groups, size = self.packed.shape
        return (*rows, groups * size * 2)

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16

    @property
    def where(self) -> str:
        return self.packed.where

    def read(self, box: Box) -> torch.Tensor:
        """See ``LazyTensor.read``.

        Raises:
            CheckpointError: there is not one scale for each group.
        """
        import torch

        if self.scales.shape != self.packed.shape[:-1]:
            raise CheckpointError(
                f"{self.scales.where} has shape {list(self.scales.shape)}; groups of "
                f"{list(self.packed.shape)} need {list(self.packed.shape[:-1])}"
            )
        size = 2 * self.packed.shape[-1]
        start, stop = box[-1]
        groups = (start // size, -(-stop // size))
        packed = self.packed.read((*box[:-1], groups, (0, size // 2)))
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.bfloat16)
        halves = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
        values = table[halves.int()]
        exponents = self.scales.read((*box[:-1], groups)).int() - E8M0_BIAS
        result = torch.ldexp(values, exponents.unsqueeze(-1)).to(torch.bfloat16).flatten(-2)
        return result.narrow(-1, start - groups[0] * size, stop - start)

    def leaves(self) -> Iterator[Leaf]:
        return self.packed.leaves()


def _factor(scale: torch.Tensor) -> torch.Tensor:
    """float32. Scales in bytes are exponents of 2."""
    import torch

    if scale.dtype == torch.uint8:
        return (scale.float() - E8M0_BIAS).exp2()
    return scale.float()
