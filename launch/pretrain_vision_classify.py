"""Trains ViT to classify images.

    torchrun ... -m megasched pretrain_vision_classify.py --model-schedule auto --hf-model DIR <Megatron's flags>

``--data-path FILE`` is a safetensors file with ``pixel_values`` [n, channels, height, width], as the model takes
them, and ``labels`` [n]. ``--split`` cuts it into training, validation and test images, in this order. With
``--mock-data`` images are noise around one random image for each class. ``--seq-length`` follows from the model.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from megasched.definition.objectives import IMAGE_CLASSIFICATION
from megasched.definition.objectives.image_classification import image_shape
from megasched.errors import ConfigError
from megasched.launch.pretraining import mock_sets, train
from megasched.reading.files import Expected
from megasched.reading.safetensors_file import open_safetensors
from megasched.trainer.flags.arguments import load_hf_config

# Megatron wants a tokenizer; images need none.
IMAGES = Expected("safetensors with pixel_values and labels", flag="--data-path")
DEFAULTS = {"tokenizer_type": "NullTokenizer"}


class ImageFile(torch.utils.data.Dataset):
    """Reads some images of a file one by one, and starts again from the first after the last.

    Args:
        images: half-open range of the images.
        samples: number of samples that are asked for.
    """

    def __init__(self, file: str, images: tuple[int, int], samples: int) -> None:
        self.file, self.samples = file, samples
        self.start, self.count = images[0], images[1] - images[0]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.start + index % self.count
        with open_safetensors(self.file, expected=IMAGES) as tensors:
            image, label = (tensors.get_slice(name)[row : row + 1][0] for name in ("pixel_values", "labels"))
        return _sample(image.float(), label.long())


def mock_image(shape: tuple[int, ...], classes: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns noise around one random image for each class."""
    label = torch.randint(classes, (), generator=draw)
    image = torch.randn(shape, generator=torch.Generator().manual_seed(-1 - int(label)))
    return _sample(image + torch.randn(shape, generator=draw), label)


def _sample(image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": image, "labels": label, "loss_mask": torch.ones_like(label)}


def check_file(file: str, shape: Sequence[int], classes: int) -> int:
    """Checks the images of a file, and returns how many there are.

    Raises:
        ConfigError: the model does not take them.
    """
    with open_safetensors(file, expected=IMAGES) as tensors:
        if not {"pixel_values", "labels"} <= set(tensors.keys()):
            raise ConfigError(f"--data-path {file}: no tensors pixel_values and labels in it")
        found, labels = tensors.get_slice("pixel_values").get_shape(), tensors.get_tensor("labels")
    if list(found[1:]) != list(shape) or len(labels) != found[0]:
        raise ConfigError(
            f"--data-path {file}: pixel_values {found} and labels {list(labels.shape)}; the model takes "
            f"[n, {', '.join(map(str, shape))}] and [n]"
        )
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ConfigError(
            f"--data-path {file}: labels from {labels.min()} to {labels.max()}, of {classes} classes"
        )
    return len(labels)


def datasets(args: Namespace, num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Returns the training, validation and test set, with these numbers of samples."""
    config = load_hf_config(args)
    shape, (classes, _) = image_shape(config), IMAGE_CLASSIFICATION.classes(config)
    if args.mock_data:
        return mock_sets(partial(mock_image, shape, classes), num_samples)
    if not args.data_path or len(args.data_path) > 1:
        raise ConfigError("give one file with images, --data-path FILE, or --mock-data")
    (file,) = args.data_path
    count = check_file(file, shape, classes)
    parts = [float(part) for part in (args.split or "969,30,1").split(",")]
    bounds = [round(count * sum(parts[:end]) / sum(parts)) for end in range(4)]
    made = [
        ImageFile(file, images, samples) if samples and images[0] < images[1] else None
        for images, samples in zip(pairwise(bounds), num_samples, strict=True)
    ]
    return made[0], made[1], made[2]


def main() -> None:
    """Trains the model."""
    train(IMAGE_CLASSIFICATION, datasets, **DEFAULTS)


if __name__ == "__main__":
    main()
