"""Makes a small BERT, T5 and ViT: their configs, and for the first two a tokenizer and some text.

    python examples/families/make.py [FOLDER]

It writes bert-small, t5-small and vit-small into the folder, by default the current one. The text is of twelve
words that come at random: all that a model can learn of it is which they are.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

WORDS = "red green blue stone river cloud walks sings falling rising slowly never"
# Special tokens by the names that transformers has for them, in the order of their ids.
OF_BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
OF_T5 = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
# T5 has spans of text replaced by these; one is used for each span of a sample.
SENTINELS = [f"<extra_id_{number}>" for number in range(12)]
SENTENCES, OF_A_DOCUMENT = 60, 4


def sentences() -> Iterator[str]:
    """Sentences of 3 to 12 words, always the same."""
    draw = random.Random(0)
    for _ in range(SENTENCES):
        yield " ".join(draw.choices(WORDS.split(), k=draw.randint(3, 12)))


def write_tokenizer(folder: Path, special: Mapping[str, str], more: Sequence[str] = ()) -> int:
    """A tokenizer of whole words, as Hugging Face saves one; returns how many tokens it has."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*special.values(), *more, *WORDS.split()]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=special["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*special.values(), *more])
    named = {f"{name}_token": token for name, token in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return len(tokens)


def write_text(folder: Path) -> None:
    """JSON lines with a document each, as a list of its sentences."""
    every = iter(sentences())
    with (folder / "text.jsonl").open("w") as out:
        while document := list(islice(every, OF_A_DOCUMENT)):
            out.write(json.dumps({"sentences": document}) + "\n")


def write_bert(folder: Path) -> None:
    from transformers import BertConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    BertConfig(
        vocab_size=write_tokenizer(folder, OF_BERT),
        max_position_embeddings=64,
        **sizes,
        architectures=["BertForMaskedLM"],
    ).save_pretrained(folder)
    write_text(folder)


def write_t5(folder: Path) -> None:
    from transformers import T5Config

    T5Config(
        vocab_size=write_tokenizer(folder, OF_T5, SENTINELS),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_heads=4,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ).save_pretrained(folder)
    write_text(folder)


def write_vit(folder: Path) -> None:
    from transformers import ViTConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    ViTConfig(
        image_size=28, patch_size=4, num_labels=10, **sizes, architectures=["ViTForImageClassification"]
    ).save_pretrained(folder)


def main(folder: Path) -> None:
    for name, write in {"bert-small": write_bert, "t5-small": write_t5, "vit-small": write_vit}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        write(folder / name)
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    try:
        main(Path(*sys.argv[1:]))
    except OSError as error:  # a folder that can't be written
        sys.exit(f"{error.filename or 'the folder'}: {error.strerror}")
