"""TorchVision's models, small, with schedules that cut them; and short chains of what such models are made of."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision.models import DenseNet, mobilenet_v3_small
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.models.segmentation.deeplabv3 import ASPP, DeepLabV3
from torchvision.models.vision_transformer import VisionTransformer

from tests.lowering.models import randomize


def resnet(width: int = 8) -> nn.Module:
    """A ResNet-50 with one block a stage; WideResNet-50-2 has twice the width."""
    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=width)


def wide_resnet() -> nn.Module:
    return resnet(16)


def bottlenecks(sch: Any, inside: str = "") -> None:
    """The wide convolution of each block by its outputs, the one after it by its inputs."""
    for stage in range(1, 5):
        sch[f"{inside}layer{stage}.*.conv2"].shard("weight", axis=0)
        sch[f"{inside}layer{stage}.*.conv3"].shard("weight", axis=1)


def vit() -> nn.Module:
    return randomize(VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10))  # its head begins with zeros


def perceptrons(sch: Any) -> None:
    sch["conv_proj"].shard("weight", axis=0)  # gathered: a class token is put before what it gives
    sch["**.mlp.0"].shard("weight", axis=0)
    sch["**.mlp.3"].shard("weight", axis=1)


def deeplab() -> nn.Module:
    backbone = IntermediateLayerGetter(resnet(), return_layers={"layer4": "out"})
    pyramid = ASPP(2048, [2, 3], 32)
    pyramid.project[3].p = 0.0
    last = [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 1)]
    return DeepLabV3(backbone, nn.Sequential(pyramid, *last))


def pyramid(sch: Any) -> None:
    """Four branches by their outputs, side by side before the convolution that takes them all."""
    bottlenecks(sch, "backbone.")
    sch["classifier.0.convs.*.0"][:3].shard("weight", axis=0)
    sch["classifier.0.convs.3.1"].shard("weight", axis=0)
    sch["classifier.0.project.0"].shard("weight", axis=1)
    sch["classifier.1"].shard("weight", axis=0)
    sch["classifier.4"].shard("weight", axis=1)


def densenet() -> nn.Module:
    return DenseNet(8, (2, 2), 16, num_classes=10)


def growing(sch: Any) -> None:
    """What each layer adds stays cut, beside what there was before."""
    sch["features.conv0"].shard("weight", axis=0)
    sch["**.denselayer*.conv1"].shard("weight", axis=1)
    sch["**.denselayer*.conv2"].shard("weight", axis=0)
    sch["**.transition*.conv"].shard("weight", axis=1)
    sch["classifier"].shard("weight", axis=1)


def mobilenet() -> nn.Module:
    return mobilenet_v3_small(num_classes=10, dropout=0.0)


def inverted(sch: Any) -> None:
    """Two blocks: widened, depthwise, weighed by channel, narrowed."""
    for block in (4, 5):
        inside = sch[f"features.{block}.block"]
        inside["0.0"].shard("weight", axis=0)
        inside["1.0"].shard("weight", axis=0)
        inside["2.fc1"].shard("weight", axis=1)
        inside["2.fc2"].shard("weight", axis=0)
        inside["3.0"].shard("weight", axis=1)


Case = tuple[Callable[[], nn.Module], Callable[[Any], Any], int]
# Name -> model, schedule, pixels of a side.
MODELS: dict[str, Case] = {
    "resnet": (resnet, bottlenecks, 64),
    "wide resnet": (wide_resnet, bottlenecks, 64),
    "vit": (vit, perceptrons, 32),
    "deeplab": (deeplab, pyramid, 64),
    "densenet": (densenet, growing, 64),
    "mobilenet": (mobilenet, inverted, 64),
}


def smooth(model: nn.Module) -> nn.Module:
    """The model without kinks: a value that is zero but for rounding would be on either side of one by chance, and
    change a gradient by more than float32's digits."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU())
    return model


def pictures(side: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    """[8, 3, side, side]: fewer would leave a batch norm few values, and float32 few digits."""
    return torch.randn(8, 3, side, side, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chain(**modules: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(modules))


def ends(sch: Any) -> None:
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)


def transposed_ends(sch: Any) -> None:
    sch["up"].shard("weight", axis=1)
    sch["down"].shard("weight", axis=0)


class Resized(nn.Module):
    """A transposed convolution that is told the size of its output; its input is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ConvTranspose2d(4, 6, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x, output_size=[2 * side + 2 for side in x.shape[2:]])


class Shuffled(nn.Module):
    """Channels are dealt out anew, by numbers that the code reads off a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        batch, channels, *places = x.shape
        return self.down(
            x.view(batch, 2, channels // 2, *places).transpose(1, 2).reshape(batch, channels, *places)
        )


def normed(count: int, conv: Any, norm: Any, pool: Any) -> nn.Module:
    middle = {"norm": norm(count), "act": nn.ReLU(inplace=True), "pool": pool(2)}
    return chain(up=conv(4, count, 3, padding=1), **middle, down=conv(count, 6, 1))


# Name -> model, schedule, shape of the input, paths that are gathered.
CHAINS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], tuple[int, ...], set[str]]] = {
    "one dimension": (lambda: normed(8, nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d), ends, (4, 4, 6), set()),
    "three dimensions": (lambda: normed(8, nn.Conv3d, nn.BatchNorm3d, nn.AvgPool3d), ends, (4, 4, 4, 4, 4), set()),
    "transposed": (
        lambda: chain(up=nn.ConvTranspose2d(4, 8, 3, 2), norm=nn.BatchNorm2d(8), down=nn.ConvTranspose2d(8, 6, 2)),
        transposed_ends,
        (4, 4, 3, 3),
        set(),
    ),
    "transposed to a size": (Resized, lambda sch: sch["down"].shard("weight", axis=0), (4, 4, 3, 3), set()),
    "flattened before a linear": (
        lambda: chain(up=nn.Conv2d(4, 8, 3), act=nn.ReLU(), flat=nn.Flatten(), down=nn.Linear(32, 5)),
        ends,
        (4, 4, 4, 4),
        set(),
    ),
    "a linear and a batch norm": (
        lambda: chain(up=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), down=nn.Linear(8, 4)),
        ends,
        (6, 4),
        set(),
    ),
    "two by outputs": (
        lambda: chain(up=nn.Conv2d(4, 8, 3, padding_mode="reflect", padding=1), down=nn.Conv2d(8, 6, 1)),
        lambda sch: [sch[name].shard("weight", axis=0) for name in ("up", "down")],
        (4, 4, 4, 4),
        {"up", "down"},
    ),
    "by inputs alone, then changed in place": (
        lambda: chain(down=nn.Conv2d(4, 6, 3, bias=False), act=nn.ReLU(inplace=True), last=nn.Conv2d(6, 2, 1)),
        lambda sch: sch["down"].shard("weight", axis=1),
        (4, 4, 4, 4),
        set(),
    ),
    "one image": (lambda: chain(up=nn.Conv2d(4, 8, 3), down=nn.Conv2d(8, 6, 1)), ends, (4, 5, 5), set()),
    "groups of channels": (
        lambda: chain(
            up=nn.Conv2d(4, 8, 1),
            wide=nn.Conv2d(8, 16, 3, groups=4),
            norm=nn.BatchNorm2d(16, affine=False),
            back=nn.ConvTranspose2d(16, 8, 3, groups=2),
            still=nn.BatchNorm2d(8, track_running_stats=False),
            down=nn.Conv2d(8, 6, 1),
        ),
        ends,
        (4, 4, 4, 4),
        set(),
    ),
    "groups that TP does not divide": (
        lambda: chain(up=nn.Conv2d(4, 6, 1), wide=nn.Conv2d(6, 6, 3, groups=3), down=nn.Conv2d(6, 4, 1)),
        ends,
        (4, 4, 4, 4),
        {"up"},
    ),
    "channels dealt out anew": (Shuffled, ends, (4, 4, 3, 3), {"up"}),
    "as Slapo writes it": (
        lambda: normed(8, nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d),
        lambda sch: [
            ends(sch),
            *(sch["norm"].shard(name, axis=0) for name in ("weight", "bias", "running_mean", "running_var")),
            sch["up"].sync("bwd_post", "all_reduce"),
            sch["down"].sync("fwd_post", "all_reduce"),
        ],
        (4, 4, 4, 4),
        set(),
    ),
}
