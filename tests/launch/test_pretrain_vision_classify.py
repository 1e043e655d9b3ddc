"""Images from a file, and flags that the scripts beside pretrain_gpt.py add."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from megatron.core.datasets.utils import Split
from safetensors.torch import save_file
from transformers import AutoConfig

from megasched.errors import ConfigError


@pytest.fixture(scope="module")
def script():
    import megasched.launch.pretrain_vision_classify as module

    return module


@pytest.fixture
def folder(tmp_path):
    AutoConfig.for_model("vit", image_size=4, patch_size=2, num_channels=1, num_labels=3).save_pretrained(tmp_path)
    return tmp_path


def _args(folder, **changes):
    known = {"hf_model": str(folder), "hf_override": [], "trust_remote_code": False, "mock_data": False}
    return Namespace(**{**known, "split": "80,20,0", "data_path": [str(folder / "images")], **changes})


def _write(folder, count=10, side=4, classes=3):
    images, labels = torch.arange(count * side * side).view(count, 1, side, side).float(), torch.arange(count)
    save_file({"pixel_values": images, "labels": labels % classes}, folder / "images")
    return images


def test_a_split_is_a_part_of_the_file_and_begins_again_at_its_end(script, folder):
    images = _write(folder)
    train, valid, test = script.datasets(_args(folder), [20, 4, 0])
    assert (len(train), len(valid), test) == (20, 4, None)
    for index in range(20):
        sample = train[index]
        assert torch.equal(sample["pixel_values"], images[index % 8])
        assert (int(sample["labels"]), int(sample["loss_mask"])) == (index % 8 % 3, 1)
    assert [torch.equal(valid[index]["pixel_values"], images[8 + index % 2]) for index in range(4)] == [True] * 4


@pytest.mark.parametrize(
    ("written", "message"),
    [({"side": 6}, r"the model takes \[n, 1, 4, 4\]"), ({"classes": 4}, "labels from 0 to 3, of 3 classes")],
)
def test_images_that_the_model_does_not_take_are_refused(script, folder, written, message):
    _write(folder, **written)
    with pytest.raises(ConfigError, match=message):
        script.datasets(_args(folder), [20, 0, 0])


def test_without_images_it_says_what_to_give(script, folder):
    with pytest.raises(ConfigError, match="--data-path FILE, or --mock-data"):
        script.datasets(_args(folder, data_path=None), [20, 0, 0])


def test_megatrons_loader_is_told_which_split_a_set_is(script, folder):
    from megasched.launch.pretraining import tell_splits

    _write(folder)
    for mock in (False, True):
        sets = script.datasets(_args(folder, split="60,20,20", mock_data=mock), [6, 6, 0])
        tell_splits(sets)
        assert [getattr(one, "split", None) for one in sets] == [Split.train, Split.valid, None]


def test_mock_images_of_the_three_sets_differ_and_come_back(script, folder):
    first, second, none = script.datasets(_args(folder, mock_data=True), [6, 6, 0])
    assert none is None
    for index in range(6):
        assert torch.equal(first[index]["pixel_values"], first[index]["pixel_values"])
        assert not torch.equal(first[index]["pixel_values"], second[index]["pixel_values"])
        assert first[index]["pixel_values"].shape == (1, 4, 4)


def test_what_the_user_says_stays():
    from megasched.launch.pretraining import missing_flags

    defaults = {"objective": "masked_lm", "tokenizer_type": "NullTokenizer"}
    assert missing_flags(["--lr", "1"], **defaults) == [
        *("--objective", "masked_lm"),
        *("--tokenizer-type", "NullTokenizer"),
    ]
    assert missing_flags(["--tokenizer-type=Other", "--objective", "masked_lm"], **defaults) == []
