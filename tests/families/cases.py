"""Small models of the families that are no plain causal decoders, and their first step against Hugging Face."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from megasched.definition.objectives import Objective
from megasched.verify.plain.loss import IGNORED
from megasched.verify.recording import RankReport
from megasched.verify.reference import HfStep, hf_model, relative, summed_step
from megasched.verify.trainer_run import gather, losses, train

LAYOUTS: dict[str, tuple[int, int, str]] = {
    "one": (1, 1, ""),
    "tp2": (2, 2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, 1, "--pipeline-model-parallel-size 2"),
    "pp2-vpp2": (2, 1, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "dp2": (2, 1, ""),
    "dp2-distopt": (2, 1, "--use-distributed-optimizer"),
    "tp2-sp-pp2": (
        4,
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
}

_BERT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_BERT, "pad_token_id": 1},
    "albert": {**_BERT, "embedding_size": 16, "inner_group_num": 2},
    "t5": {
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 12,
        "patch_size": 4,
        "num_labels": 5,
        "initializer_range": 0.1,
    },
}


def save(family: str, folder: Any, **changes: Any) -> str:
    """Writes ``config.json`` of a family into a folder and returns the folder."""
    AutoConfig.for_model(family, **{**FAMILIES[family], **changes}).save_pretrained(folder)
    return str(folder)


def train_sampled(*given: Any, **named: Any) -> RankReport:
    """As ``train``, of scripts other than ``pretrain_gpt.py``; the report has the micro-batches as ``samples``."""
    from megasched.launch import pretraining

    samples: list[dict[str, torch.Tensor]] = []
    real = pretraining.get_batch

    def get_batch(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        samples.append(real(*args, **kwargs))
        return samples[-1]

    with mock.patch.object(pretraining, "get_batch", get_batch):
        report = train(*given, **named)
    report.samples = samples
    return report


def samples_of(reports: list[RankReport]) -> list[dict[str, torch.Tensor]]:
    """Each micro-batch of a step over all DP ranks, once where chunks of a rank read the same."""
    own = {report.dp_rank: report for report in reports if report.tp_rank == 0 and report.pp_rank == 0}
    found: list[dict[str, torch.Tensor]] = []
    for rank in sorted(own):
        for batch in own[rank].samples:
            if not any(_same(batch, other) for other in found):
                found.append(batch)
    return found


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def hf_objective_step(
    folder: str, objective: Objective, batches: list[dict[str, torch.Tensor]], per_token: bool
) -> HfStep:
    """One global batch of any objective, with the weights that ``--hf-random-init`` gives."""
    model = hf_model(folder, objective=objective)
    outcomes = [masked_loss(model, objective, batch) for batch in batches]
    return summed_step(model, outcomes, [int(batch["loss_mask"].sum()) for batch in batches], per_token)


def masked_loss(
    model: Any, objective: Objective, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean cross entropy of HF's logits over the labels that the loss mask counts, and the logits."""
    logits = model(**{name: batch[name] for name in objective.inputs}).logits
    ignored = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), ignored.flatten()), logits


def check_first_step(ranks: Any, folder: str, objective: Objective, script: str, layout: str, *more: str) -> None:
    """One step of Megatron's trainer and what Hugging Face computes for the same batches."""
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, train_sampled, folder, [*flags.split(), *more], iterations=1, script=script)
    expected = assert_outcome_equals_hf(folder, objective, reports, "--calculate-per-token-loss" in more)
    if "--use-distributed-optimizer" not in flags:  # a rank has the sums of its own part alone then
        assert_gradients_equal(expected, reports, tp)


def assert_outcome_equals_hf(
    folder: str, objective: Objective, reports: list[RankReport], per_token: bool = False
) -> HfStep:
    """Loss, logits and gradient norm, within 1e-5 relative."""
    expected = hf_objective_step(folder, objective, samples_of(reports), per_token)
    assert losses(reports)[0] == pytest.approx(expected.loss, rel=1e-5)
    assert reports[0].grad_norms[0] == pytest.approx(expected.grad_norm, rel=1e-5)
    logits = [out for report in reports if report.tp_rank == 0 for out in report.logits.get(0, [])]
    assert len(logits) == len(expected.logits)
    for got, wanted in zip(logits, expected.logits, strict=True):
        assert relative(got, wanted) < 1e-5
    return expected


def assert_gradients_equal(expected: HfStep, reports: list[RankReport], tp: int) -> None:
    """Every gradient, within 1e-5 relative."""
    gradients = gather(reports, "gradients", tp)
    assert gradients.keys() == expected.gradients.keys()
    # A key's bias has no gradient but rounding, and is measured against the rest.
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, wanted in expected.gradients.items():
        assert relative(gradients[name], wanted, floor) < 1e-5, name
