"""Runs of few steps that the tests of parity have in common, and what they are held against."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.verify.parity import TOLERANCE, CheckedLayout, Outcome, compare
from megasched.verify.reference import HfStep, hf_step, rounding_of
from megasched.verify.trainer_run import batches_of, gather, losses, train
from tests.parity.instances import instances_of

RUN = ["--vocab-size", str(VOCABULARY)]
ADAM = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
SAVE = ["--use-distributed-optimizer", "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
SAVE += ["--override-opt-param-scheduler"]


def run(ranks, folder, layout: CheckedLayout, *more: str, iterations: int = 1, schedule: str = "auto", mask=False):
    flags = [*layout.flags.split(), *RUN, *more]
    options = {"iterations": iterations, "schedule": schedule, "random_init": False, "tokens": TOKENS}
    return ranks.run(layout.world_size, train, folder, flags, **options, mask=mask)


def step_of_own_code(
    ranks, folder, layout: CheckedLayout, *more: str, random_init: bool = True, **options: Any
) -> Outcome:
    """A step of a model that comes with code of its own, against the unscheduled one."""
    flags = [*layout.flags.split(), *more, "--trust-remote-code"]
    options |= {"iterations": 1, "random_init": random_init}
    reports = ranks.run(layout.world_size, train, folder, flags, **options)
    of_folder = {"trust_remote_code": True, "random_init": random_init}
    (expected,) = ranks.run(1, hf_step, folder, batches_of(reports), **of_folder)
    return compare(reports, expected, layout.tp)


def assert_equal(outcome: Outcome) -> None:
    """Every number is within the tolerance."""
    assert (outcome.verdict, outcome.why) == ("equal", "")
    assert max(outcome.errors.values()) <= TOLERANCE


def assert_equal_by_rounding(outcome: Outcome) -> None:
    """Every number is within the tolerance, or as near to float64 as rounding allows."""
    assert outcome.verdict == "equal", outcome.why


def step_making(folder, flags, schedule, kind):
    """In a rank: a run of one step, and how many instances of a class (``module:name``) this rank made."""
    module, _, name = kind.partition(":")
    options = {"schedule": schedule, "random_init": False, "tokens": TOKENS}
    with instances_of(getattr(importlib.import_module(module), name)) as made:
        report = train(folder, [*flags, *RUN], iterations=1, **options)
    return report, len(made)


_known: dict[tuple[bytes, ...], Any] = {}


def one_rank(ranks, folder, iterations: int = 2):
    """A run of a model with weights at random on one rank; once for each config."""
    key = Path(folder, "config.json").read_bytes(), b"%d" % iterations
    if key not in _known:
        _known[key] = ranks.run(1, train, folder, [], iterations=iterations)
    return _known[key]


def unscheduled(ranks, folder, reports, *, random_init: bool = False, per_token: bool = False) -> HfStep:
    """The first step of a run by the HF model in one process; once for the same model and batches."""
    batches = batches_of(reports)
    weights = b"" if random_init else Path(folder, "model.safetensors").read_bytes()
    key = Path(folder, "config.json").read_bytes(), weights, b"%d" % per_token
    key += tuple(tensor.numpy().tobytes() for batch in batches for tensor in batch)
    if key not in _known:
        options = {"random_init": random_init, "per_token": per_token}
        (_known[key],) = ranks.run(1, hf_step, folder, batches, **options)
    return _known[key]


def assert_first_step_equals_hf(ranks, folder, reports, tp, **options: bool):
    """Loss, logits, every gradient and the norm.

    Args:
        options: ``random_init``: the run began with weights at random, not with those in the folder;
            ``per_token``: its loss was that of tokens, not of micro-batches.
    """
    assert_equal(compare(reports, unscheduled(ranks, folder, reports, **options), tp))


def assert_first_step_equals_hf_by_rounding(ranks, folder, reports, tp):
    """The same as closely as the HF model in float32 equals itself in float64, as the matrix has it."""
    expected = unscheduled(ranks, folder, reports)
    outcome = compare(reports, expected, tp)
    if outcome.verdict == "wrong":
        (rounding,) = ranks.run(1, rounding_of, folder, batches_of(reports), random_init=False)
        outcome = compare(reports, expected, tp, rounding)
    assert_equal_by_rounding(outcome)


def assert_same_losses(reports, expected):
    """Of every iteration, and the gradient norms on each rank."""
    torch.testing.assert_close(losses(reports), losses(expected), rtol=2e-6, atol=0)
    for report in reports:
        torch.testing.assert_close(report.grad_norms, expected[0].grad_norms, rtol=1e-5, atol=0)


def assert_same_run(reports, expected, skip: int = 0, tp: int = 1, of_tp: int = 1, atol: float = 2e-6):
    """Losses, gradient norms and weights of a run at ``tp``, and of the later steps of one at ``of_tp``."""
    torch.testing.assert_close(losses(reports), losses(expected)[skip:], rtol=2e-6, atol=0)
    for report in reports:
        torch.testing.assert_close(report.grad_norms, expected[0].grad_norms[skip:], rtol=1e-5, atol=0)
    weights, wanted = gather(reports, "weights", tp), gather(expected, "weights", of_tp)
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=atol, msg=name)


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
