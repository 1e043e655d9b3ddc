"""Reads weights that are stored in 8 or 4 bits, as some models are published, as bfloat16, box by box.

Training needs weights of full range. transformers makes them when it loads (``Fp8Dequantize`` in
transformers/integrations/finegrained_fp8.py, ``convert_moe_packed_tensors`` in integrations/mxfp4.py); here each
rank does it for its own part alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from megasched.errors import CheckpointError
from megasched.weights.lazy import Box, LazyTensor, Transposed, View, refuse_nan, whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of the stored names: what is behind that of a weight.
SCALE = "_scale_inv"
PACKED, SCALES = "_blocks", "_scales"

# What a 4-bit float of 2 bits of exponent and 1 of mantissa is (OCP Microscaling Formats 1.0, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Bias of a scale that is an exponent of 2 alone (same source, section 5.4.1).
E8M0_BIAS, E8M0_NAN = 127, 255


def settings_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Returns the config's settings of the quantization of a model's weights, or None if there are none."""
    parts = (config, config.get_text_config(decoder=True))
    found = next((part.quantization_config for part in parts if hasattr(part, "quantization_config")), None)
    if found is None or isinstance(found, dict):
        return found
    return found.to_dict()


def dequantized(stored: Mapping[str, LazyTensor], config: PretrainedConfig) -> dict[str, LazyTensor]:
    """Returns the tensors of a folder by their names in a folder that is not quantized.

    Raises:
        CheckpointError: their quantization is not supported, or an 8-bit weight has no scale.
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
        if (key.endswith(SCALE) and key.removesuffix(SCALE) in stored) or _of_activations(key, stored):
            continue
        scale = stored.get(key + SCALE)
        if scale is None and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            beside = sorted(
                other for other in stored if other.startswith(key.removesuffix("weight")) and other != key
            )
            there = f"; there is {', '.join(beside)}" if beside else ""
            raise CheckpointError(f"{tensor.where} is in {tensor.dtype}, and has no scale {key + SCALE}{there}")
        found[key] = tensor if scale is None else Fp8(tensor, scale, block)
    return found


def _of_activations(key: str, stored: Mapping[str, LazyTensor]) -> bool:
    """Returns whether a tensor is the scale of a weight's input, which training does not use."""
    stem = key.removesuffix("activation_scale")
    return stem != key and (f"{stem}weight{SCALE}" in stored or f"{stem.removesuffix('_')}{SCALE}" in stored)


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


class InBfloat16(View):
    """Serves as the base of stored tensors that are read as bfloat16."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


@dataclass(frozen=True)
class Fp8(InBfloat16):
    """Dequantizes 8-bit floats with a factor for each block of rows and columns; the last blocks may be smaller.

    Attributes:
        base: [..., rows, columns].
        scale: [..., blocks of rows, blocks of columns], or one value for all.
        block: rows and columns of a block; None if the config has none.
    """

    scale: LazyTensor
    block: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def read(self, box: Box) -> torch.Tensor:
        """Reads a box and multiplies it by its factors; see ``LazyTensor.read``.

        Raises:
            CheckpointError: the weight is not in 8-bit floats, or there is not one scale for each block.
        """
        values = self.base.read(box)
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
        """Returns the factors of the values in a box, in a shape that broadcasts with theirs."""
        if prod(self.scale.shape) == 1:
            return _factor(self.scale.read(whole(self.scale.shape)), self.scale.where).reshape(())
        block = self._block()
        of_scale = [(start // size, -(-stop // size)) for (start, stop), size in zip(box[-2:], block, strict=True)]
        factors = _factor(self.scale.read((*box[:-2], *of_scale)), self.scale.where)
        for dim, (start, stop), size in zip((-2, -1), box[-2:], block, strict=True):
            factors = factors.repeat_interleave(size, dim).narrow(dim, start % size, stop - start)
        return factors

    def _block(self) -> tuple[int, ...]:
        """Returns the config's block, or else the one that divides the weight into as many blocks as scales."""
        lengths, counts = self.shape[-2:], self.scale.shape[-2:]
        block = self.block
        if (
            block is None
            and len(counts) == 2
            and not any(n % count for n, count in zip(lengths, counts, strict=True))
        ):
            block = (lengths[0] // counts[0], lengths[1] // counts[1])
        fits = block is not None and counts == tuple(-(-n // size) for n, size in zip(lengths, block, strict=True))
        if block is None or not fits or self.scale.shape[:-2] != self.shape[:-2]:
            blocks = "equal blocks" if block is None else f"blocks of {list(block)}"
            raise CheckpointError(
                f"{self.scale.where} has shape {list(self.scale.shape)}, which is not one scale for each of the "
                f"{blocks} of a weight of {list(self.shape)}"
            )
        return block


@dataclass(frozen=True)
class Mxfp4(InBfloat16):
    """Dequantizes pairs of 4-bit floats with an exponent for each group (OCP Microscaling Formats).

    Attributes:
        base: [..., rows, groups, bytes of a group]; the lower half of a byte comes first.
        scales: [..., rows, groups].
    """

    scales: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, groups, size = self.base.shape
        return (*rows, groups * size * 2)

    def read(self, box: Box) -> torch.Tensor:
        """Reads a box and scales it by its exponents; see ``LazyTensor.read``.

        Raises:
            CheckpointError: there is not one scale for each group.
        """
        if self.scales.shape != self.base.shape[:-1]:
            raise CheckpointError(
                f"{self.scales.where} has shape {list(self.scales.shape)}; groups of "
                f"{list(self.base.shape)} need {list(self.base.shape[:-1])}"
            )
        size = 2 * self.base.shape[-1]
        start, stop = box[-1]
        groups = (start // size, -(-stop // size))
        packed = self.base.read((*box[:-1], groups, (0, size // 2)))
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.bfloat16)
        halves = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
        values = table[halves.int()]
        exponents = self.scales.read((*box[:-1], groups))
        _refuse_no_number(exponents, self.scales.where)
        result = torch.ldexp(values, exponents.int().sub(E8M0_BIAS).unsqueeze(-1)).to(torch.bfloat16).flatten(-2)
        return result.narrow(-1, start - groups[0] * size, stop - start)


def _factor(scale: torch.Tensor, where: str) -> torch.Tensor:
    """Returns scales as float32 factors; those in bytes are exponents of 2."""
    if scale.dtype == torch.uint8:
        _refuse_no_number(scale, where)
        return (scale.float() - E8M0_BIAS).exp2()
    return scale.float()


def _refuse_no_number(exponents: torch.Tensor, where: str) -> None:
    if exponents.eq(E8M0_NAN).any():
        raise CheckpointError(f"{where} has a scale that is no number (byte {E8M0_NAN}): the file is damaged")
