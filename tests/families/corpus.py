"""A small corpus in Megatron's format, and a tokenizer trained on it."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = (
    "red",
    "green",
    "blue",
    "stone",
    "river",
    "cloud",
    "walks",
    "sings",
    "falling",
    "rising",
    "slowly",
    "never",
)
MASKED = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
SPANS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
SENTINELS = [f"<extra_id_{number}>" for number in range(12)]


def sentences(count: int = 60) -> list[str]:
    """Sentences of 3 to 12 words, always the same."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(count)]


def write_tokenizer(folder: Path, special: dict[str, str], more: list[str] | None = None) -> int:
    """A WordPiece tokenizer with these special tokens, in this order from id 0; returns its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token=special["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = [*special.values(), *(more or [])]
    tokenizer.train_from_iterator(
        sentences(), trainers.WordPieceTrainer(vocab_size=80, special_tokens=tokens, show_progress=False)
    )
    named = {f"{name}_token": token for name, token in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_corpus(folder: Path) -> str:
    """The sentences, four to a document; returns the prefix for ``--data-path``."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prefix = str(folder / "corpus")
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for number, sentence in enumerate(sentences()):
        builder.add_item(torch.tensor(tokenizer(sentence, add_special_tokens=False).input_ids))
        if number % 4 == 3:
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
