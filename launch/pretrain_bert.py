"""Trains BERT, RoBERTa or ALBERT by masked tokens, on Megatron's BERT data set.

    torchrun ... -m megasched pretrain_bert.py --model-schedule auto --hf-model DIR <Megatron's flags>

For data it takes Megatron-LM's flags: ``--data-path``, ``--mask-prob``, ``--short-seq-prob``.
There is no next-sentence head, as ``BertForMaskedLM`` has none: a sample is one segment.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megasched.definition.objectives import MASKED_LM
from megasched.errors import ConfigError
from megasched.launch.pretraining import holds_data, masked_data, mock_sets, train
from megasched.trainer.flags.arguments import load_hf_config

SPECIAL_TOKENS = ("cls", "sep", "mask", "pad")


class MaskedLMDataset(BERTMaskedWordPieceDataset):
    """Gives Megatron's samples the field names of Hugging Face."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron writes this id into the padding mask (`bert_dataset.py:153`): RoBERTa's, which is 1, would come
        # out as no padding, and labels of that id as 0. What it uses where a tokenizer has none is right.
        self._pad_token_id = -1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        real = sample["padding_mask"] > 0
        ids = np.where(real, sample["text"], self.config.tokenizer.pad)
        fields = {
            "input_ids": ids,
            "attention_mask": real.astype(np.int64),
            "labels": sample["labels"],
            "loss_mask": sample["loss_mask"],
        }
        return {name: torch.from_numpy(value) for name, value in fields.items()}


def mock_masked(length: int, vocab_size: int, pad: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns random tokens of random length, 15% of them masked by the vocabulary's last id."""
    real = torch.arange(length) < torch.randint(length // 2, length + 1, (), generator=draw)
    labels = torch.randint(pad + 1, vocab_size - 1, (length,), generator=draw)
    masked = real & (torch.rand(length, generator=draw) < 0.15)
    masked[0] = True
    ids = labels.masked_fill(masked, vocab_size - 1).masked_fill(~real, pad)
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "labels": labels,
        "loss_mask": masked.long(),
    }


def dataset_config(args: Namespace) -> BERTMaskedWordPieceDatasetConfig:
    """Returns Megatron's dataset configuration, from its flags.

    Raises:
        ConfigError: the tokenizer lacks a special token.
    """
    tokenizer = build_tokenizer(args)
    missing = [name for name in SPECIAL_TOKENS if getattr(tokenizer, name, None) is None]
    if missing:
        raise ConfigError(
            f"the tokenizer ({args.tokenizer_model or args.vocab_file or args.tokenizer_type}) has no "
            f"{', '.join(missing)} token; masked language modelling needs {', '.join(SPECIAL_TOKENS)}"
        )
    return BERTMaskedWordPieceDatasetConfig(
        **masked_data(args),
        tokenizer=tokenizer,
        masking_max_ngram=3,
        masking_use_geometric_distribution=False,
        classification_head=False,
    )


def datasets(args: Namespace, num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Returns the training, validation and test set, with these numbers of samples."""
    if args.mock_data:
        config = load_hf_config(args)
        vocab_size, _ = MASKED_LM.classes(config)
        return mock_sets(partial(mock_masked, args.seq_length, vocab_size, config.pad_token_id or 0), num_samples)
    return BlendedMegatronDatasetBuilder(MaskedLMDataset, num_samples, holds_data, dataset_config(args)).build()


def main() -> None:
    """Trains the model."""
    train(MASKED_LM, datasets, tokenizer_type="BertWordPieceLowerCase")


if __name__ == "__main__":
    main()
