"""Every level in bf16 against plain HF in float64: no further off than plain HF in bf16, but for a small factor.

All three start from the same weights, rounded to bf16, so that what is compared is arithmetic alone. An error is
the norm of a difference over the norm of what float64 gives.

What the factors must allow for (u = 2^-8 is half of bf16's spacing at 1):

- On one rank, the order of sums: joined columns, fused norms and Megatron's layers round elsewhere than HF does.
- At TP 2, one more rounding for each row: a rank's half of the product is rounded to bf16 before the halves are
  added, and under SP so is each gradient that is gathered or scattered.
- A single parameter's error is a sample of few numbers (a norm of 32), all gradients together one of 10^4.
- The loss is a mean over 128 tokens, in which errors cancel; how far is luck. So it is held to u / 16 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megasched.verify.reference import hf_model
from megasched.verify.trainer_run import batches_of, gather, losses, train
from tests import tiny

SCHEDULE = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    sch["{layers}.*"].level("{level}")
"""
LAYERS = {"gpt2": "transformer.h"}
U = 2.0**-8


@dataclass(frozen=True)
class Factors:
    """How many times plain HF's error in bf16 a scheduled model's may be: of the logits, of all gradients
    together, and of a single parameter's; beside each, the largest measured."""

    logits: float
    gradients: float
    single: float


LAYOUTS = {
    "one-rank": (1, "", Factors(logits=1.05, gradients=1.25, single=1.5)),  # 1.00, 1.06, 1.24
    "tp2-sp": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel",
        Factors(logits=1.25, gradients=1.5, single=2.0),  # 1.10, 1.20, 1.56
    ),
}


@dataclass(frozen=True)
class Step:
    """What one global batch gives, in float64: loss, logits [b, s, v] of all micro-batches, gradients."""

    loss: float
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def _rounded(folder, dtype):
    """Plain HF with weights rounded to bf16; buffers (rotary frequencies) stay float32, as HF has them."""
    model = hf_model(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    return model


def _plain_step(folder, batches, dtype):
    """One global batch, gradients added up in float64 over the micro-batches; softmax in float32 at least."""
    model, total, logits = _rounded(folder, dtype), 0.0, []
    gradients = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for tokens, labels in batches:
        model.zero_grad()
        output = model(input_ids=tokens).logits
        wide = torch.promote_types(dtype, torch.float32)
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1).to(wide), labels.flatten()) / len(batches)
        loss.backward()
        total += float(loss.detach())
        logits.append(output.detach().double())
        for name, parameter in model.named_parameters():
            gradients[name] += parameter.grad
    return Step(total, torch.cat(logits), gradients)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Family -> folder, and batches -> (exact, plain), computed when first asked for."""
    folders, steps = {}, {}

    def folder(family):
        if family not in folders:
            folders[family] = tiny.save(family, tmp_path_factory.mktemp(family))
        return folders[family]

    def both(family, batches):
        if family not in steps:
            dtypes = (torch.float64, torch.bfloat16)
            steps[family] = batches, [_plain_step(folder(family), batches, dtype) for dtype in dtypes]
        known, found = steps[family]
        assert torch.equal(_tokens(known), _tokens(batches))  # every layout is fed the same
        return found

    return folder, both


def _tokens(batches):
    return torch.cat([torch.cat(pair) for pair in batches])


def _error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


def _together(gradients):
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


CASES = [(family, level) for family in ("llama", "qwen3") for level in ("leaf", "fused", "block")]
CASES += [(family, "fused") for family in ("gemma2", "phi3", "gpt2")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "level"), CASES)
def test_error_in_bf16_is_that_of_plain_hf(ranks, references, tmp_path, family, level, layout):
    folder_of, steps = references
    tp, flags, factors = LAYOUTS[layout]
    folder, schedule = folder_of(family), tmp_path / "sch.py"
    schedule.write_text(SCHEDULE.format(layers=LAYERS.get(family, "model.layers"), level=level))
    argv = [*flags.split(), "--bf16", "--lr", "0", "--min-lr", "0"]
    reports = ranks.run(tp, train, folder, argv, iterations=1, schedule=str(schedule))
    weights = gather(reports, "weights", tp)  # a rate of 0: those that the step was made with
    for name, parameter in _rounded(folder, torch.bfloat16).named_parameters():
        assert torch.equal(weights[name].bfloat16(), parameter.detach()), name
    exact, plain = steps(family, batches_of(reports))
    logits = torch.cat([out for report in reports if report.tp_rank == 0 for out in report.logits])
    gradients = gather(reports, "gradients", tp)

    assert U / 4 < _error(plain.logits, exact.logits) < 4 * U  # the yardstick is rounding to bf16
    assert _error(logits, exact.logits) <= factors.logits * _error(plain.logits, exact.logits)
    assert abs(losses(reports)[0] / exact.loss - 1) <= max(U / 16, abs(plain.loss / exact.loss - 1))
    assert gradients.keys() == exact.gradients.keys()
    whole = _together(exact.gradients)
    limit = factors.gradients * _error(_together(plain.gradients), whole)
    assert _error(_together(gradients), whole) <= limit
    far = {
        name: (_error(gradients[name], wanted), _error(plain.gradients[name], wanted))
        for name, wanted in exact.gradients.items()
    }
    assert {name: gap for name, gap in far.items() if not gap[0] <= factors.single * gap[1]} == {}
