"""Defines classification of images (ViT), with the batch of ``pretrain_vision_classify.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megasched.definition.objectives.objective import Objective

SMALL_CLASSES = 101  # prime, as a small vocabulary is; and more than few, whose errors in bf16 would be luck


def image_shape(config: Any) -> tuple[int, int, int]:
    """Returns the channels, height and width of a model's images."""
    return (config.num_channels, *_pair(config.image_size))


def _classes(config: Any) -> tuple[int, str]:
    return config.num_labels, f"num_labels = {config.num_labels}"


def _sequence_length(config: Any) -> tuple[int, str]:
    (height, width), patch = _pair(config.image_size), _pair(config.patch_size)
    patches = (height // patch[0]) * (width // patch[1])
    return patches + 1, f"{patches} patches and the class token"


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, Iterable) else (size, size)
    return height, width


IMAGE_CLASSIFICATION = Objective(
    "image_classification",
    "pretrain_vision_classify",
    "AutoModelForImageClassification",
    "classifier of images",
    {"pixel_values": "float32"},
    shape=lambda config, batch, length: (batch, *image_shape(config)),
    label_shape=lambda config, batch, length: (batch,),
    classes=_classes,
    sequence_length=_sequence_length,
    small_copy={"num_labels": SMALL_CLASSES},
)
