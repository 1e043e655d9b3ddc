"""ViT under Megatron's trainer against plain Hugging Face."""

from __future__ import annotations

import pytest

from megasched.definition.objectives import IMAGE_CLASSIFICATION
from tests.families.cases import LAYOUTS, check_first_step, save

# What the model takes is said in the configuration; the flags that every run of the tests has say it otherwise.
SIZES = ("--seq-length", "10", "--vocab-size", "5")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_step_equals_hf(ranks, tmp_path, layout):
    folder = save("vit", tmp_path)
    check_first_step(ranks, folder, IMAGE_CLASSIFICATION, "pretrain_vision_classify", layout, *SIZES)
