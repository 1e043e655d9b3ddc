"""Makes all that the fine-tuning example needs: a small Llama with weights, its tokenizer, and conversations.

    python examples/sft/make.py FOLDER

The conversations are questions with one right answer each (what comes after 41? the opposite of hot?), several
packed into a line as Megatron's SFT data set takes them: a conversation begins with a system message.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

Message = dict[str, str]
Conversation = list[Message]

SYSTEM = "Answer in one word ."
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "new"), ("open", "closed"), ("full", "empty"),
    ("light", "dark"), ("high", "low"), ("early", "late"), ("dry", "wet"), ("near", "far"), ("soft", "hard"),
    ("rich", "poor"), ("loud", "quiet"), ("thick", "thin"), ("sweet", "sour"), ("left", "right"), ("up", "down"),
]  # fmt: skip
NUMBERS = range(100)
# The tokens of Megatron's prompt format nemotron-nano-v2: rows are filled with the first, the others begin and end
# turns.
MARKS = ("<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<SPECIAL_10>{{ message['role'] }}\n{{ message['content'] }}"
    "<SPECIAL_12>\n{% endfor %}"
)
PER_LINE = (2, 5)
SEQ_LENGTH = 128


def conversations() -> Iterator[Conversation]:
    """Every question that there is, each a conversation of its own."""
    for number in NUMBERS:
        yield ask(f"What comes after {number} ?", str((number + 1) % len(NUMBERS)))
        yield ask(f"What comes before {number} ?", str((number - 1) % len(NUMBERS)))
    for one, other in OPPOSITES:
        yield ask(f"What is the opposite of {one} ?", other)
        yield ask(f"What is the opposite of {other} ?", one)


def ask(question: str, answer: str) -> Conversation:
    said = (("system", SYSTEM), ("user", question), ("assistant", answer))
    return [{"role": role, "content": content} for role, content in said]


def write_lines(file: Path, lines: Iterable[list[Conversation]]) -> None:
    """JSON lines, each with the messages of several conversations one after the other."""
    with file.open("w") as out:
        for line in lines:
            out.write(json.dumps({"messages": [message for one in line for message in one]}) + "\n")


def packed_lines(count: int, seed: int) -> Iterator[list[Conversation]]:
    """Lines of a few conversations drawn at random."""
    draw, every = random.Random(seed), list(conversations())
    for _ in range(count):
        yield draw.sample(every, draw.randint(*PER_LINE))


def write_tokenizer(folder: Path) -> int:
    """A tokenizer of whole words, as Hugging Face saves one; returns how many tokens it has."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    said = [message["content"] for one in conversations() for message in one]
    words = sorted({word for content in said for word in content.split()})
    names = ("System", "User", "Assistant", "system", "user", "assistant", "\n")
    vocabulary = dict.fromkeys([*MARKS, *names, *words])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=MARKS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n"), "isolated")]
    )
    tokenizer.add_special_tokens(list(MARKS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=MARKS[0], pad_token=MARKS[0], eos_token=MARKS[-1]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return len(vocabulary)


def write_model(folder: Path, vocab_size: int) -> None:
    """A Llama of 0.3 million parameters with random weights, as ``save_pretrained`` writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LENGTH,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=MARKS.index("<SPECIAL_12>"),
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def main(folder: Path) -> None:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_model(model, write_tokenizer(model))
    write_lines(folder / "train.jsonl", packed_lines(400, seed=0))
    write_lines(folder / "valid.jsonl", packed_lines(40, seed=1))
    print(f"wrote {folder}/model, train.jsonl (400 lines) and valid.jsonl (40 lines)")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]))
    except OSError as error:  # a folder that can't be written
        sys.exit(f"{error.filename or 'the folder'}: {error.strerror}")
