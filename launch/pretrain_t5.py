"""Trains T5 to fill in spans of tokens, on Megatron's T5 data set.

    torchrun ... -m megasched pretrain_t5.py --model-schedule auto --hf-model DIR <Megatron's flags>

For data it takes the flags of Megatron-LM's pretrain_t5.py: ``--seq-length`` of the encoder,
``--decoder-seq-length`` (as long, if it is not given), ``--data-path``, ``--mask-prob``, ``--short-seq-prob``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megasched.definition.objectives import SEQ2SEQ_LM
from megasched.errors import ConfigError
from megasched.launch.pretraining import holds_data, masked_data, mock_sets, train
from megasched.trainer.flags.arguments import load_hf_config


class SpanTokenizer:
    """Adds to a tokenizer what Megatron's T5 data set needs and Hugging Face's tokenizers for T5 lack.

    Attributes:
        bos: token with which the decoder's input begins.
        additional_special_tokens_ids: ids of the sentinels, ``<extra_id_0>`` first.

    Raises:
        ConfigError: the tokenizer has no sentinels.
    """

    def __init__(self, tokenizer: Any, start: int) -> None:
        self._tokenizer, self.bos = tokenizer, start
        numbered = {}
        for token_id, token in tokenizer.inv_vocab.items():
            found = re.fullmatch(r"<extra_id_(\d+)>", token)
            if found:
                numbered[int(found[1])] = token_id
        self.additional_special_tokens_ids = [numbered[number] for number in sorted(numbered)]
        if not numbered:
            raise ConfigError("the tokenizer has no <extra_id_0>, <extra_id_1>, ... that stand for masked spans")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Seq2SeqDataset(T5MaskedWordPieceDataset):
    """Gives Megatron's samples the field names of Hugging Face."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With 0, which is T5's, labels of padding stay -1 (`t5_dataset.py:318`); its own stand-in is replaced.
        self._pad_token_id = -1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample, pad = super().__getitem__(index), self.config.tokenizer.pad
        fields = {
            "input_ids": np.where(sample["enc_mask"], sample["text_enc"], pad),
            "attention_mask": sample["enc_mask"],
            "decoder_input_ids": np.where(sample["dec_mask"], sample["text_dec"], pad),
            "decoder_attention_mask": sample["dec_mask"],
            "labels": sample["labels"],
            "loss_mask": sample["loss_mask"],
        }
        return {name: torch.from_numpy(value) for name, value in fields.items()}


def mock_spans(
    lengths: tuple[int, int], vocab_size: int, start: int, pad: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """Returns random sequences of random lengths; the target is the beginning of the source."""
    tokens = torch.randint(pad + 1, vocab_size, (max(lengths),), generator=draw)
    source, target = (torch.arange(n) < torch.randint(n // 2, n + 1, (), generator=draw) for n in lengths)
    labels = tokens[: lengths[1]].masked_fill(~target, 0)
    shifted = torch.cat([torch.tensor([start]), labels[:-1]])
    return {
        "input_ids": tokens[: lengths[0]].masked_fill(~source, pad),
        "attention_mask": source.long(),
        "decoder_input_ids": shifted.masked_fill(~target, pad),
        "decoder_attention_mask": target.long(),
        "labels": labels,
        "loss_mask": target.long(),
    }


def decoder_start(config: Any) -> int:
    """Returns the token with which a decoder's input begins, by default the padding token."""
    start = getattr(config, "decoder_start_token_id", None)
    return config.pad_token_id if start is None else start


def dataset_config(args: Namespace) -> T5MaskedWordPieceDatasetConfig:
    """Returns Megatron's dataset configuration, from its flags."""
    return T5MaskedWordPieceDatasetConfig(
        **masked_data(args),
        sequence_length_decoder=args.decoder_seq_length or args.seq_length,
        tokenizer=SpanTokenizer(build_tokenizer(args), decoder_start(load_hf_config(args))),
        masking_max_ngram=10,
        masking_use_geometric_distribution=True,
    )


def datasets(args: Namespace, num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Returns the training, validation and test set, with these numbers of samples."""
    if args.mock_data:
        config = load_hf_config(args)
        lengths = args.seq_length, args.decoder_seq_length or args.seq_length
        vocab_size, _ = SEQ2SEQ_LM.classes(config)
        make = partial(mock_spans, lengths, vocab_size, decoder_start(config), config.pad_token_id or 0)
        return mock_sets(make, num_samples)
    return BlendedMegatronDatasetBuilder(Seq2SeqDataset, num_samples, holds_data, dataset_config(args)).build()


def main() -> None:
    """Trains the model."""
    train(SEQ2SEQ_LM, datasets, tokenizer_type="HuggingFaceTokenizer")


if __name__ == "__main__":
    main()
