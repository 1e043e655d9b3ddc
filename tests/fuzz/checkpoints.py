"""Checkpoints at random: saved at one layout and resumed at another, each by a schedule of its own.

python -m tests.fuzz.checkpoints SECONDS [SEED [TYPE ...]]
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file

from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.definition.small_models.small_models import write_small_model
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from megasched.verify.parity import Outcome, failure, routes_to_experts
from megasched.verify.ranks.pool import RankError, RankPool
from megasched.verify.recording import RankReport
from megasched.verify.trainer_run import train
from megasched.weights.exporting import export_weights
from tests.fuzz.flags import ALL_LAYOUTS, MOST, TYPES, compared
from tests.fuzz.run_configs import hunt
from tests.fuzz.schedules import write_schedule

RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
# Of both runs, one of each.
BOTH = (
    (RESHARDABLE, RESHARDABLE, "", "--use-distributed-optimizer"),
    ("", "", "--optimizer sgd --sgd-momentum 0.5", "--weight-decay 0.1", "--clip-grad 0"),
    ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    ("", "", "--overlap-grad-reduce --ddp-bucket-size 1000"),
)
OF_SAVE = (
    *("", "", "", "--async-save --use-persistent-ckpt-worker", "--no-ckpt-fully-parallel-save", "--no-save-optim"),
    *("--no-save-rng", "--ckpt-assume-constant-structure", "--save-retain-interval 2", "--verify-integrity"),
    *("--distrib-optim-fully-reshardable-mem-efficient", "--ckpt-fully-parallel-save-process-group ep_dp"),
    *("--dist-ckpt-workers 2", "--async-save --async-strategy mcore --use-persistent-ckpt-worker"),
    *("--save-params-interval 1", "--save-wgrads-interval 1 --save-dgrads-interval 1"),
    "--save-activations-interval 1",
)
OF_LOAD = (
    *("", "", "", "--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-fully-parallel-load"),
    *("--ckpt-step 1", "--auto-detect-ckpt-format", "--exit-on-missing-checkpoint", "--use-checkpoint-args"),
    *("--dist-ckpt-strictness raise_all", "--no-load-optim --no-load-rng", "--finetune --no-load-optim"),
    "--ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo gather_rounds",
)
# What the runs train; the second one may begin adapters.
WHOLE = ""
ADAPTED = '    sch.role("{role}").adapt(rank=2, alpha=3)\n'
WITH_EMBEDDING = f'{ADAPTED}    sch.role("embed.tokens").unfreeze()\n'
TRAINED = ((WHOLE, WHOLE), (WHOLE, WHOLE), (ADAPTED, ADAPTED), (WITH_EMBEDDING, WITH_EMBEDDING))
ROLES = ("mlp.down", "row", "attn.out", "head")  # one that the model has is adapted
DEFAULT = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
"""
CUT, STEPS = 2, 4


@dataclass(frozen=True)
class Run:
    """One of the two runs.

    Attributes:
        layout: a key of ``ALL_LAYOUTS``.
        flags: of this run on one rank and at the layout.
        schedule: the file, for the layout; ``alone`` for one rank.
        lines: of ``schedule``.
    """

    layout: str
    flags: str
    schedule: str
    alone: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.layout} ({'; '.join(self.lines)}) {self.flags}"


def roles_of(folder: str) -> set[str]:
    """In a rank: the roles of the model's modules."""
    return {*open_session("auto", folder, ParallelDims()).schedule.roles.role.values()}


def drawn(ranks: RankPool, folder: str, work: str, seed: str) -> tuple[Run, Run]:
    """The run that saves, and the one that goes on."""
    draw = random.Random(seed)
    (of_experts,), (roles,) = ranks.run(1, routes_to_experts, folder), ranks.run(1, roles_of, folder)
    role = draw.choice([role for role in ROLES if role in roles])
    names = [name for name, one in ALL_LAYOUTS.items() if one.of_experts <= of_experts]
    both = " ".join(filter(None, map(draw.choice, BOTH)))
    found = []
    for trained, some in zip(draw.choice(TRAINED), (OF_SAVE, OF_LOAD), strict=True):
        layout, number = draw.choice(names), draw.randrange(10**6)
        schedule, alone = f"{work}/drawn_{number}.py", f"{work}/alone_{number}.py"
        if draw.random() < 0.5:
            (lines,) = ranks.run(1, write_schedule, folder, f"{seed} {number}", schedule, layout, timeout=240)
            text = Path(schedule).read_text()
        else:
            lines, text = ["auto"], DEFAULT
        trained = trained.format(role=role)
        Path(schedule).write_text(text + trained)
        Path(alone).write_text(DEFAULT + trained)
        lines += [line.strip() for line in trained.splitlines()]
        found.append(Run(layout, f"{both} {draw.choice(some)}".strip(), schedule, alone, tuple(lines)))
    return found[0], found[1]


def outcome_of(ranks: RankPool, folder: str, work: str, first: Run, then: Run) -> Outcome:
    """Both runs against the same two on one rank; ``not applicable`` where those are refused, too."""
    try:
        wanted = _both(ranks, folder, f"{work}/alone", first, then, alone=True)
    except RankError as error:
        return Outcome("not applicable", {}, why=failure(str(error)).why)
    try:
        found = _both(ranks, folder, f"{work}/wide", first, then, alone=False)
    except RankError as error:
        return failure(str(error))
    (expected, exported), (reports, other) = wanted, found
    outcome = compared(reports, expected, ALL_LAYOUTS[then.layout].tp)
    apart = _apart(other, exported)
    if outcome.verdict != "equal" or apart <= MOST["weights"]:
        return outcome
    return replace(outcome, verdict="wrong", why=f"what is exported by {apart:.1e}")


def _both(
    ranks: RankPool, folder: str, saved: str, first: Run, then: Run, *, alone: bool
) -> tuple[list[RankReport], dict[str, torch.Tensor]]:
    """The reports of the second run, and what ``megasched export`` makes of the first one's checkpoint."""

    def run(one: Run, iterations: int, *flags: str) -> list[RankReport]:
        at = ALL_LAYOUTS["one" if alone else one.layout]
        argv = [*at.flags.split(), *one.flags.split(), *flags, "--vocab-size", str(VOCABULARY)]
        argv += ["--ckpt-format", "torch_dist"]
        options = {"schedule": one.alone if alone else one.schedule, "random_init": False, "tokens": TOKENS}
        return ranks.run(at.world_size, train, folder, argv, iterations=iterations, timeout=240, **options)

    run(first, CUT, "--save", saved, "--save-interval", "1")
    exported = f"{saved}_exported"
    ranks.run(1, export, saved, exported, timeout=240)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(exported).glob("*.safetensors")):
        tensors |= load_file(file)
    return run(then, STEPS, "--load", saved), tensors


def export(saved: str, output: str) -> None:
    """In a rank: writes the HF folder of a run's last checkpoint."""
    export_weights(saved, output, progress=lambda size: nullcontext(lambda done: None), max_shard_size=10**9)


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if found.keys() != expected.keys():
        return float("inf")
    return max(float((found[name] - one).abs().max()) for name, one in expected.items() if one.numel())


def outcomes(ranks: RankPool, types: Sequence[str], seed: int) -> Iterator[tuple[str, Outcome]]:
    """What is tried of the types in turn, and what comes of it."""
    with tempfile.TemporaryDirectory() as work:
        folders = {name: ranks.run(1, write_small_model, name, f"{work}/{name}", timeout=240)[0] for name in types}
        for number in count():
            model_type = types[number % len(types)]
            with tempfile.TemporaryDirectory() as place:
                first, then = drawn(ranks, folders[model_type], place, f"{seed} {number}")
                outcome = outcome_of(ranks, folders[model_type], place, first, then)
            if outcome.verdict != "not applicable":
                yield f"{model_type}: saved at {first}, resumed at {then}", outcome


if __name__ == "__main__":
    from tests.fuzz import checkpoints  # by whose name the ranks find its functions

    hunt(TYPES, checkpoints.outcomes)
