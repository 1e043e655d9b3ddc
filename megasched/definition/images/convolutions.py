"""Finds what computes channels of images: torch's convolutions and batch norms, and how each can be cut.

A convolution's weight is [out, in / groups, places...], a transposed one's [in, out / groups, places...].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from megasched.language.roles import Cut


def is_convolution(module: nn.Module) -> bool:
    """Returns whether a module computes what torch's convolution of its class does, and holds nothing more."""
    from torch import nn

    classes = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return _is_plain(module, classes, ("forward", "_conv_forward"), ("weight", "bias"), ())


def is_batch_norm(module: nn.Module) -> bool:
    """Returns whether a module computes what torch's batch norm of its class does, and holds nothing more."""
    from torch import nn

    classes = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return _is_plain(module, classes, ("forward",), ("weight", "bias"), buffers)


def _is_plain(
    module: nn.Module,
    classes: tuple[type[nn.Module], ...],
    methods: tuple[str, ...],
    parameters: tuple[str, ...],
    buffers: tuple[str, ...],
) -> bool:
    base = next((one for one in classes if isinstance(module, one)), None)
    if base is None or any(name in vars(module) for name in methods):
        return False
    same = all(getattr(type(module), name, None) is getattr(base, name, None) for name in methods)
    return same and {*module._parameters} <= {*parameters} and {*module._buffers} <= {*buffers}


def is_grouped(module: nn.Module) -> bool:
    """Returns whether it is a convolution of several groups of channels, such as a depthwise one."""
    return is_convolution(module) and module.groups > 1


def group_width(module: nn.Module) -> int:
    """Returns how many channels a module takes together that takes channels by themselves."""
    return int(module.in_channels) // int(module.groups) if is_grouped(module) else 1


def is_channelwise(module: nn.Module) -> bool:
    """Returns whether it takes channels, or groups of them, by themselves, and holds a tensor of them."""
    held = (*module._parameters.values(), *module._buffers.values())
    return (is_batch_norm(module) or is_grouped(module)) and any(one is not None and one.dim() for one in held)


def output_channels_axis(module: nn.Module) -> int:
    """Returns the axis of the output channels in the weight of a convolution of one group."""
    return 1 if module.transposed else 0


def output_channels(module: nn.Module) -> tuple[int, int]:
    """Returns the numbers of channels that a convolution or a batch norm returns and takes."""
    if is_convolution(module):
        return module.out_channels, module.in_channels
    return module.num_features, module.num_features


def cut_of_convolution(module: nn.Module, axis: int) -> Cut | None:
    """Returns how a convolution is cut whose weight is cut along an axis; None where it can't be."""
    if axis > 1 or (module.groups > 1 and axis > 0):
        return None
    if module.groups > 1:
        return "channels"
    return "column" if axis == output_channels_axis(module) else "row"


def cut_axes(module: nn.Module, cut: Cut) -> dict[str, int]:
    """Maps the parameters and buffers of a cut convolution or batch norm that are cut, to the axis of each."""
    held = [name for name, one in (*module._parameters.items(), *module._buffers.items()) if one is not None]
    if cut == "channels":
        return {name: 0 for name in held if name != "num_batches_tracked"}
    out = output_channels_axis(module)
    axes = {"weight": 1 - out} if cut == "row" else {"weight": out, "bias": 0}
    return {name: axis for name, axis in axes.items() if name in held}


def feature_dim(module: nn.Module, dims: int) -> int:
    """Returns the dimension of the channels in an input or output of so many dimensions; a linear's is the last.

    A batch norm's is the second one. A convolution may be handed one image [channels, places...] alone.
    """
    if is_batch_norm(module):
        return 1
    return dims - 1 - (len(module.kernel_size) if is_convolution(module) else 0)
