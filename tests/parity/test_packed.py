"""Fine-tuning: packed sequences through Megatron's trainer compute what HF computes of each sequence by itself."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.ranks.pool import RankError, cache_folder
from megasched.verify.reference import hf_model, relative
from megasched.verify.trainer_run import batches_of, gather, logits_of, losses, train
from tests import tiny
from tests.parity.cases import slow
from tests.parity.levels import SCHEDULE
from tests.parity.test_matrix import LAYOUTS

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "sft" / "make.py"))
PAD, BEGIN, IGNORED = 0, 1, -100  # <unk>, <SPECIAL_10>, and what Megatron puts in the place of what is no answer
SEQUENCE = 80
LAYOUTS = LAYOUTS | {"tp2-pp2": (4, 2, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")}
FLAGS = [
    "--sft", "--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--tokenizer-type", "SFTTokenizer",
    "--seq-length", str(SEQUENCE),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return str(folder), EXAMPLE["write_tokenizer"](folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight rows, one global batch: of one to three conversations, too long ones, and one without an answer."""
    every = list(EXAMPLE["conversations"]())
    rows = [every[start : start + count] for start, count in enumerate([3, 2, 1, 3, 2, 4, 2])]
    rows.append([every[9][:2]])
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    EXAMPLE["write_lines"](file, rows)
    assert len(json.loads(file.read_text().splitlines()[0])["messages"]) == 9
    return str(file)


def _train(*args, **kwargs):
    os.environ["HF_DATASETS_CACHE"] = str(cache_folder() / "datasets")  # read when `datasets` is imported
    return train(*args, mock_data=False, **kwargs)


def run(ranks, folder, tokenizer, data, layout, *flags, iterations=1, **options):
    world, _, spread = LAYOUTS[layout]
    given = [*FLAGS, "--tokenizer-model", tokenizer[0], "--data-path", data, *spread.split(), *flags]
    return ranks.run(world, _train, folder, given, iterations=iterations, **options)


def save(family, folder, tokenizer, **changes):
    sizes = {"gpt2": "n_positions"}
    changes = {"vocab_size": tokenizer[1], sizes.get(family, "max_position_embeddings"): SEQUENCE, **changes}
    return tiny.save(family, folder, **changes)


def conversations_of(row: torch.Tensor) -> list[slice]:
    """Where each conversation stands in a row [s]: from its first token to its last, without padding."""
    starts = (row == BEGIN).nonzero().flatten().tolist()
    end = int((row != PAD).nonzero().max()) + 1
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], end], strict=True)]


def assert_equals_each_sequence_alone(folder, reports, tp, per_token=False, random_init=True, least=6):
    """
    Args:
        least: so many rows must hold several sequences, or nothing is shown.
    """
    model = hf_model(folder, random_init=random_init)
    total, counted, packed = torch.zeros(()), 0, 0
    batches = [(tokens.view(-1, SEQUENCE), labels.view(-1, SEQUENCE)) for tokens, labels in batches_of(reports)]
    everywhere = sum(int((labels > PAD).sum()) for _, labels in batches)
    for (tokens, labels), logits in zip(batches, logits_of(reports), strict=True):
        loss, count = torch.zeros(()), int((labels > PAD).sum())
        for row in range(len(tokens)):
            own = conversations_of(tokens[row])
            packed += len(own) > 1
            for place in own:
                alone = model(input_ids=tokens[row, place][None]).logits[0]
                assert relative(logits[row, place], alone.detach()) < 1e-5
                wanted = labels[row, place].masked_fill(labels[row, place] == PAD, IGNORED)
                loss = loss + F.cross_entropy(alone, wanted, ignore_index=IGNORED, reduction="sum")
        (loss / (everywhere if per_token else max(count, 1) * len(batches))).backward()
        total, counted = total + loss.detach(), counted + count
    assert packed >= least
    assert losses(reports)[0] == pytest.approx(float(total / counted), rel=1e-5)
    gradients = gather(reports, "gradients", tp)
    expected = dict(model.named_parameters())
    assert gradients.keys() == expected.keys()
    floor = 1e-2 * max(float(parameter.grad.abs().max()) for parameter in expected.values())
    for name, parameter in expected.items():
        assert relative(gradients[name], parameter.grad, floor) < 1e-5, name


CASES = [
    ("llama", "tp2-sp-pp2-vpp2"),
    ("gpt2", "tp2-sp"),  # learned positions
    ("gemma2", "pp2"),  # windows, masks of eager attention
    ("opt", "tp2"),  # hands no position_ids to HF's masks
    slow("llama", "tp2-pp2"),
    slow("gemma2", "pp4"),
    slow("opt", "tp2-pp2"),
    slow("phi3", "dp2-tp2"),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_each_sequence_is_computed_as_if_alone(ranks, tmp_path, tokenizer, data, family, layout):
    folder = save(family, tmp_path, tokenizer)
    reports = run(ranks, folder, tokenizer, data, layout)
    assert_equals_each_sequence_alone(folder, reports, LAYOUTS[layout][1])


def test_per_token_loss_with_recompute_and_one_row_a_micro_batch(ranks, tmp_path, tokenizer, data):
    """A row without an answer is a micro-batch without a token that counts."""
    folder = save("qwen3", tmp_path, tokenizer)
    flags = (
        "--calculate-per-token-loss --micro-batch-size 1 --recompute-granularity full --recompute-method uniform"
    )
    more = [*flags.split(), "--recompute-num-layers", "1"]
    reports = run(ranks, folder, tokenizer, data, "tp2-pp2", *more, iterations=2)
    assert_equals_each_sequence_alone(folder, reports, 2, per_token=True)
    assert all(torch.isfinite(torch.tensor([*losses(reports), *reports[0].grad_norms])))
    assert 0 in [int((labels > PAD).sum()) for _, labels in batches_of(reports)]


@pytest.mark.parametrize(
    ("family", "layout", "where", "level", "flags"),
    [
        slow("mistral", "tp2-pp2", "", "block", []),
        ("qwen3", "tp2-sp", "", "block", ["--micro-batch-size", "1"]),
        ("mistral", "tp2", ".self_attn", "block", []),
        slow("mistral", "tp2-pp2", ".self_attn", "block", []),
        slow("qwen3", "tp2-sp", ".self_attn", "block", ["--micro-batch-size", "1"]),
        ("qwen2", "tp2-sp", "", "leaf", []),
    ],
)
def test_other_levels(ranks, tmp_path, tokenizer, data, family, layout, where, level, flags):
    """At level block Megatron's SelfAttention takes thd, in its layer and alone."""
    schedule = tmp_path / "level.py"
    schedule.write_text(SCHEDULE.format(where=f"model.layers.*{where}", level=level))
    folder = save(family, tmp_path, tokenizer)
    reports = run(ranks, folder, tokenizer, data, layout, *flags, schedule=str(schedule))
    assert_equals_each_sequence_alone(folder, reports, LAYOUTS[layout][1])


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])  # sinks and experts; latent attention
def test_other_architectures(ranks, tmp_path, tokenizer, data, model_type):
    ranks.run(1, write_small_model, model_type, str(tmp_path))
    _grow(tmp_path, tokenizer[1])
    reports = run(ranks, str(tmp_path), tokenizer, data, "tp2-sp")
    assert_equals_each_sequence_alone(str(tmp_path), reports, 2)


@pytest.mark.parametrize(("model_type", "layout"), [("deepseek_v3", "tp2-sp"), slow("youtu", "dp2-tp2")])
def test_latent_attention_of_megatrons(ranks, tmp_path, block, tokenizer, data, model_type, layout):
    """It takes thd, too, with heads of v that are smaller than those of q and k."""
    ranks.run(1, write_small_model, model_type, str(tmp_path))
    _grow(tmp_path, tokenizer[1])
    more = ["--micro-batch-size", "1", *(["--sequence-parallel"] if layout == "dp2-tp2" else [])]
    reports = run(ranks, str(tmp_path), tokenizer, data, layout, *more, schedule=block())
    assert_equals_each_sequence_alone(str(tmp_path), reports, 2)


def test_rows_are_balanced_one_by_one(ranks, tmp_path, block, tokenizer, data):
    """In Megatron's layers, which join the rows of a micro-batch, as in a mixture that is handed them apart."""
    ranks.run(1, write_small_model, "mixtral", str(tmp_path))
    _grow(tmp_path, tokenizer[1])
    flags = ["--moe-aux-loss-coeff", "0.1", "--moe-router-load-balancing-type", "seq_aux_loss"]
    alone = tmp_path / "alone.py"
    alone.write_text(SCHEDULE.format(where="model.layers.*.mlp", level="block"))
    layers, mixtures = (
        gather(run(ranks, str(tmp_path), tokenizer, data, "pp2", *flags, schedule=one), "gradients", 1)
        for one in (block(), str(alone))
    )
    for name, gradient in mixtures.items():
        assert relative(layers[name], gradient) < 1e-5, name


def _grow(folder: Path, vocabulary: int) -> None:
    """As many tokens and places as the conversations need; weights are made anew."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"vocab_size": vocabulary, "max_position_embeddings": SEQUENCE}
    file.write_text(json.dumps(config))


def test_a_recurrence_takes_rows_of_one_sequence_and_no_others(ranks, tmp_path, tokenizer, data):
    ranks.run(1, write_small_model, "mamba", str(tmp_path))
    _grow(tmp_path, tokenizer[1])
    single = tmp_path / "single.jsonl"
    EXAMPLE["write_lines"](single, [[conversation] for conversation in list(EXAMPLE["conversations"]())[:8]])
    reports = run(ranks, str(tmp_path), tokenizer, str(single), "tp2")
    assert_equals_each_sequence_alone(str(tmp_path), reports, 2, least=0)
    with pytest.raises(RankError, match=r"packed sequences: .*\n.*remedy: one conversation a line"):
        run(ranks, str(tmp_path), tokenizer, data, "tp2")
