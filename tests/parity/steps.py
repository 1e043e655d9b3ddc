"""Runs of few steps that the tests of parity have in common, and what they are held against."""

from __future__ import annotations

import importlib

import torch

from megasched.verify.parity import TOLERANCE, CheckedLayout, compare, reference_step
from megasched.verify.shrink import TOKENS, VOCABULARY
from megasched.verify.trainer_run import batches_of, gather, losses, train
from tests.parity.instances import instances_of

RUN = ["--vocab-size", str(VOCABULARY)]
ADAM = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
SAVE = ["--use-distributed-optimizer", "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
SAVE += ["--override-opt-param-scheduler"]


def run(ranks, folder, layout: CheckedLayout, *more: str, iterations: int = 1, schedule: str = "auto"):
    flags = [*layout.flags.split(), *RUN, *more]
    options = {"iterations": iterations, "schedule": schedule, "random_init": False, "tokens": TOKENS}
    return ranks.run(layout.world_size, train, folder, flags, **options)


def step_making(folder, flags, schedule, kind):
    """In a rank: a run of one step, and how many instances of a class (``module:name``) this rank made."""
    module, _, name = kind.partition(":")
    options = {"schedule": schedule, "random_init": False, "tokens": TOKENS}
    with instances_of(getattr(importlib.import_module(module), name)) as made:
        report = train(folder, [*flags, *RUN], iterations=1, **options)
    return report, len(made)


def assert_first_step_equals_hf(ranks, folder, reports, tp):
    """Loss, logits, every gradient and the norm."""
    (expected,) = ranks.run(1, reference_step, folder, batches_of(reports))
    outcome = compare(reports, expected, tp)
    assert outcome.verdict == "equal", outcome.why
    assert max(outcome.errors.values()) <= TOLERANCE


def assert_first_step_equals_hf_by_rounding(ranks, folder, reports, tp):
    """The same as closely as the HF model in float32 equals itself in float64, as the matrix has it."""
    batches = batches_of(reports)
    expected, exact = (ranks.run(1, reference_step, folder, batches, False, double)[0] for double in (False, True))
    outcome = compare(reports, expected, tp, exact)
    assert outcome.verdict == "equal", outcome.why


def assert_same_run(reports, expected, skip: int = 0, tp: int = 1):
    torch.testing.assert_close(losses(reports), losses(expected)[skip:], rtol=2e-6, atol=0)
    for report in reports:
        torch.testing.assert_close(report.grad_norms, expected[0].grad_norms[skip:], rtol=1e-5, atol=0)
    weights, wanted = gather(reports, "weights", tp), gather(expected, "weights", 1)
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=2e-6, msg=name)


def assert_goes_between_levels(ranks, folder, schedules, first, layouts, kept):
    """Two steps at one level and layout and two more at another are as four by one process: parameters and the
    optimizer's states go over by HF's names.

    Args:
        schedules: level -> schedule, of ``block`` and ``fused``.
        first: level of the first two steps.
        layouts: of the first two, and of the last two and the run that they are held against.
        kept: folder for the checkpoint.
    """
    second = "fused" if first == "block" else "block"
    wide, narrow = layouts
    whole = run(ranks, folder, narrow, *SAVE, iterations=4, schedule=schedules("fused"))
    saving = ["--save", str(kept), "--save-interval", "2"]
    run(ranks, folder, wide, *SAVE, *saving, iterations=2, schedule=schedules(first))
    loading = [*SAVE, "--load", str(kept)]
    assert_same_run(run(ranks, folder, narrow, *loading, iterations=4, schedule=schedules(second)), whole, skip=2)
