"""Megatron's flags at random, at a random layout: a run is that of one rank with the same flags, or is refused.

python -m tests.fuzz.flags SECONDS [SEED [TYPE ...]]
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.parity import LAYOUTS, CheckedLayout, Outcome, failure, routes_to_experts
from megasched.verify.ranks.pool import RankError, RankPool
from megasched.verify.recording import RankReport
from megasched.verify.trainer_run import gather, losses, train
from tests.fuzz.run_configs import hunt

# Of what they are about, one is drawn: Megatron does not take all of them beside each other.
FLAGS: dict[str, tuple[str, ...]] = {
    "optimizer": (
        "--optimizer sgd --sgd-momentum 0.5",
        "--adam-beta1 0.5 --adam-beta2 0.9",
        "--use-distributed-optimizer",
        "--use-distributed-optimizer --overlap-grad-reduce",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000",
        "--use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw",
        "--overlap-grad-reduce --ddp-bucket-size 1000",
        "--overlap-grad-reduce --ddp-num-buckets 3",
    ),
    "clipping": ("--clip-grad 0.05", "--clip-grad 0"),
    "decay": (
        "--weight-decay 0.1",
        "--start-weight-decay 0.01 --end-weight-decay 0.3 --weight-decay-incr-style linear",
    ),
    "learning rate": (
        "--decoupled-lr 1e-2 --decoupled-min-lr 1e-3",
        "--lr-decay-style cosine --lr-decay-iters 4",
        "--lr-decay-style inverse-square-root --lr-warmup-iters 1",
        "--lr-decay-style WSD --lr-decay-iters 4 --lr-wsd-decay-iters 2 --lr-wsd-decay-style exponential",
        "--lr-warmup-iters 2 --lr-warmup-init 1e-4",
    ),
    "reduction": ("--ddp-average-in-collective", "--calculate-per-token-loss", "--no-align-grad-reduce"),
    "recompute": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-granularity selective",
        "--recompute-granularity selective --recompute-modules core_attn mlp",
    ),
    "batches": (
        "--micro-batch-size 1",
        "--micro-batch-size 4 --global-batch-size 16",
        "--micro-batch-size 1 --global-batch-size 12",
        "--seq-length 32",
        "--decrease-batch-size-if-needed",
    ),
    "evaluation": (
        "--eval-iters 1 --eval-interval 1 --split 80,20,0",
        "--eval-iters 2 --eval-interval 2 --split 80,20,0 --eval-micro-batch-size 1",
        "--eval-iters 1 --eval-interval 2 --split 80,20,0 --eval-global-batch-size 16",
    ),
    "data": ("--num-workers 0", "--no-create-attention-mask-in-dataloader", "--eod-mask-loss", "--seed 7"),
    "checks": (
        "--check-weight-hash-across-dp-replicas-interval 1",
        "--check-for-spiky-loss --check-for-large-grads",
        "--log-params-norm --log-num-zeros-in-grad",
        "--deterministic-mode",
    ),
    "iterations": ("--iterations-to-skip 2",),
    "vocabulary": ("--make-vocab-size-divisible-by 8",),
}
# For stages alone; one rank runs without.
OF_STAGES = (
    "--decoder-first-pipeline-num-layers 1",
    "--decoder-last-pipeline-num-layers 1",
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout Et*3|tL",
)
BY_LENGTH = ("decay", "learning rate", "iterations")  # another run where it is cut in two
SAVING = "--use-distributed-optimizer --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
SAVING += " --override-opt-param-scheduler"
ALL_LAYOUTS = LAYOUTS | {
    "dp2": CheckedLayout(2, 1, ""),
    "tp2-sp-dp2": CheckedLayout(4, 2, LAYOUTS["tp2-sp"].flags),
    "pp2-dp2": CheckedLayout(4, 1, LAYOUTS["pp2"].flags),
    "cp2-pp2": CheckedLayout(4, 1, f"{LAYOUTS['cp2'].flags} {LAYOUTS['pp2'].flags}"),
    "ep2-pp2": CheckedLayout(4, 1, f"{LAYOUTS['ep2'].flags} {LAYOUTS['pp2'].flags}", of_experts=True),
    "ep2-tp2-sp": CheckedLayout(2, 2, f"{LAYOUTS['ep2'].flags} {LAYOUTS['tp2-sp'].flags}", of_experts=True),
}
TYPES = ("bloom", "cohere2", "deepseek_v3", "falcon", "gemma3_text", "glm4_moe", "gpt2", "jamba", "llama", "mamba")
TYPES += ("mixtral", "opt", "phi3", "qwen3", "qwen3_moe", "qwen3_next", "youtu")
# A router's choice may turn on a rounding after the first step.
MOST = {"loss": 1e-4, "norm": 5e-3, "weights": 1e-3}
STEPS, CUT = 4, 2


@dataclass(frozen=True)
class Drawn:
    """A run that is tried.

    Attributes:
        layout: a key of ``ALL_LAYOUTS``.
        flags: of both runs.
        of_stages: of the run at the layout alone.
        mask: whether only some labels count.
        resumed: ``""``; ``to`` (the first steps on one rank, the others at the layout); or ``from``.
    """

    layout: str
    flags: tuple[str, ...]
    of_stages: str
    mask: bool
    resumed: str

    def __str__(self) -> str:
        how = {"": "", "to": ", from one rank", "from": ", resumed on one rank"}[self.resumed]
        return (
            f"{self.layout}{how}{', some labels' if self.mask else ''}: {' '.join([*self.flags, self.of_stages])}"
        )


def drawn(draw: random.Random, of_experts: bool) -> Drawn:
    """A run of a model, with experts or without."""
    layout = draw.choice(
        [name for name, one in ALL_LAYOUTS.items() if name != "one" and one.of_experts <= of_experts]
    )
    resumed = draw.choice(("", "", "", "to", "from"))
    subjects = [name for name in FLAGS if not resumed or name not in (*BY_LENGTH, "optimizer")]
    flags = [draw.choice(FLAGS[name]) for name in draw.sample(subjects, draw.choice((2, 3, 4, 5)))]
    cuts = "pp2" in layout and "vpp" not in layout and draw.random() < 0.5
    saving = [SAVING] if resumed else []
    return Drawn(layout, (*flags, *saving), draw.choice(OF_STAGES) if cuts else "", draw.random() < 0.5, resumed)


def run(ranks: RankPool, folder: str, one: Drawn) -> Outcome:
    """The run against that of one rank; ``not applicable`` where that one is refused, too."""
    layout = ALL_LAYOUTS[one.layout]
    both = [*" ".join(one.flags).split(), "--vocab-size", str(VOCABULARY)]
    alone, wide = (1, both), (layout.world_size, [*layout.flags.split(), *one.of_stages.split(), *both])

    def steps(where: tuple[int, list[str]], *more: str, iterations: int = STEPS) -> list[RankReport]:
        world, flags = where
        options = {"iterations": iterations, "random_init": False, "tokens": TOKENS, "mask": one.mask}
        return ranks.run(world, train, folder, [*flags, *more], timeout=240, **options)

    try:
        expected = steps(alone)
    except RankError as error:
        return Outcome("not applicable", {}, why=failure(str(error)).why)
    try:
        if not one.resumed:
            return compared(steps(wide), expected, layout.tp)
        before, after = (alone, wide) if one.resumed == "to" else (wide, alone)
        with tempfile.TemporaryDirectory() as saved:
            steps(before, "--save", saved, "--save-interval", str(CUT), iterations=CUT)
            found = steps(after, "--load", saved)
        return compared(found, expected, layout.tp if one.resumed == "to" else 1)
    except RankError as error:
        return failure(str(error))


def compared(found: list[RankReport], expected: list[RankReport], tp: int) -> Outcome:
    """Of runs that may begin later than what they are held against."""
    wanted, got = losses(expected), losses(found)
    norms, others = expected[0].grad_norms, found[-1].grad_norms
    weights, same = gather(expected, "weights", 1), gather(found, "weights", tp)
    if weights.keys() != same.keys() or not got:
        return Outcome(
            "wrong", {}, why=f"not on both sides: {sorted(weights.keys() ^ same.keys())[:3] or 'losses'}"
        )
    apart = {name: float((value - same[name]).abs().max()) for name, value in weights.items() if value.numel()}
    worst = max(apart, key=lambda name: apart[name])
    errors = {
        "loss": max(abs(one - other) / abs(other) for one, other in zip(got, wanted[-len(got) :], strict=True)),
        "norm": max(abs(one - other) / other for one, other in zip(others, norms[-len(others) :], strict=True)),
        "weights": apart[worst],
    }
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= MOST[name]]
    return Outcome(
        "wrong" if wrong else "equal", errors, worst, f"{', '.join(wrong)}, most at {worst}" if wrong else ""
    )


def outcomes(ranks: RankPool, types: Sequence[str], seed: int) -> Iterator[tuple[str, Outcome]]:
    """What is tried of the types in turn, and what comes of it."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as work:
        folders = {name: ranks.run(1, write_small_model, name, f"{work}/{name}", timeout=240)[0] for name in types}
        experts = {name: ranks.run(1, routes_to_experts, folder)[0] for name, folder in folders.items()}
        for number in count():
            model_type = types[number % len(types)]
            one = drawn(draw, experts[model_type])
            outcome = run(ranks, folders[model_type], one)
            if outcome.verdict != "not applicable":
                yield f"{model_type} at {one}", outcome


if __name__ == "__main__":
    hunt(TYPES, outcomes)
