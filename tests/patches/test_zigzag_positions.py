"""The positions of a context parallel rank: transformers takes them for two packed sequences without the patch."""

import torch
from transformers import masking_utils

from megasched import patches

POSITIONS = torch.tensor([[0, 1, 6, 7]])


def test_the_fault_is_still_there_without_the_patch():
    patches.undo("zigzag_positions")
    assert masking_utils.find_packed_sequence_indices(POSITIONS).tolist() == [[0, 0, 1, 1]]


def test_with_it_they_are_one_sequence():
    patches.apply("zigzag_positions")
    try:
        assert masking_utils.find_packed_sequence_indices(POSITIONS) is None
    finally:
        patches.undo("zigzag_positions")
