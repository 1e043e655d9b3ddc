"""Megatron's BERT and T5 data sets on a real corpus, as the bundled scripts give their samples out."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megasched.definition.objectives import MASKED_LM, SEQ2SEQ_LM
from tests.families.cases import (
    assert_gradients_equal,
    assert_outcome_equals_hf,
    samples_of,
    save,
    train_sampled,
)
from tests.families.example import MAKE, write_corpus

MASKED, SPANS, SENTINELS = MAKE["OF_BERT"], MAKE["OF_T5"], MAKE["SENTINELS"]
write_tokenizer = MAKE["write_tokenizer"]


def _train(ranks, folder: Path, script: str, *more: str):
    """A step on the corpus; ``--data-path`` comes with what replaces the flags of mock data."""
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    flags += ["--data-path", write_corpus(folder), "--tensor-model-parallel-size", "2", *more]
    return ranks.run(2, train_sampled, str(folder), flags, iterations=1, script=script, mock_data=False)


@pytest.mark.parametrize("pad_token_id", [0, 1])
def test_masked_tokens_are_what_megatron_masked_and_padding_is_the_models(ranks, tmp_path, pad_token_id):
    names = ["pad", "unk", "cls", "sep", "mask"] if pad_token_id == 0 else ["cls", "pad", "sep", "unk", "mask"]
    size = write_tokenizer(tmp_path, {name: MASKED[name] for name in names})
    folder = save("bert" if pad_token_id == 0 else "roberta", tmp_path, vocab_size=size, pad_token_id=pad_token_id)
    reports = _train(ranks, tmp_path, "pretrain_bert")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    samples = samples_of(reports)
    padded = 0
    for batch in samples:
        real, masked = batch["attention_mask"] == 1, batch["loss_mask"] == 1
        padded += int((~real).sum())
        assert (batch["input_ids"][~real] == tokenizer.pad_token_id).all()
        assert (batch["input_ids"][:, 0] == tokenizer.cls_token_id).all()
        assert (masked & ~real).sum() == 0
        assert (masked.sum(dim=1) > 0).all()
        assert (batch["labels"][~masked] == 0).all()
        assert (batch["labels"][masked] >= len(MASKED)).all()
    assert padded
    assert any((batch["input_ids"] == tokenizer.mask_token_id).any() for batch in samples)
    expected = assert_outcome_equals_hf(folder, MASKED_LM, reports)
    assert_gradients_equal(expected, reports, tp=2)


def test_spans_are_taken_out_of_the_source_and_stand_in_the_target(ranks, tmp_path):
    size = write_tokenizer(tmp_path, SPANS, SENTINELS)
    folder = save("t5", tmp_path, vocab_size=size)
    reports = _train(ranks, tmp_path, "pretrain_t5", "--decoder-seq-length", "14")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    first = tokenizer.convert_tokens_to_ids(SENTINELS[0])
    for batch in samples_of(reports):
        source, target = batch["attention_mask"] == 1, batch["decoder_attention_mask"] == 1
        assert (batch["input_ids"][~source] == 0).all()
        assert (batch["input_ids"] == first).sum(dim=1).tolist() == [1, 1]
        assert (batch["decoder_input_ids"][:, 0] == 0).all()  # T5 starts with its padding
        assert (batch["labels"][:, 0] == first).all()
        assert (batch["loss_mask"] == batch["decoder_attention_mask"]).all()
        for row, length in enumerate(target.sum(dim=1).tolist()):
            shifted = batch["decoder_input_ids"][row, 1:length].tolist()
            assert batch["labels"][row, :length].tolist() == [*shifted, tokenizer.eos_token_id]
    expected = assert_outcome_equals_hf(folder, SEQ2SEQ_LM, reports)
    assert_gradients_equal(expected, reports, tp=2)
