"""Changed configs through Megatron's trainer: a step is that of plain HF, or is refused.

python -m tests.fuzz.run_configs SECONDS [SEED [TYPE ...]]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.definition.small_models.small_models import causal_lm_types
from megasched.verify.parity import LAYOUTS, Outcome, compare, failure, routes_to_experts
from megasched.verify.ranks.pool import RankError, RankPool
from megasched.verify.reference import hf_step, rounding_of
from megasched.verify.trainer_run import batches_of, train
from tests.definition.test_small_models import RANDOM
from tests.fuzz.configs import write_changed

FINE = ("equal", "refused")
NAMES = ("one", "tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "ep2")
# Everything by default, and what Megatron's own modules compute by these.
BLOCKS = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    of_layer = f".{getattr(getattr(sch.roles.layer, 'attention', None), 'out', '')}"
    for path, role in sch.roles.role.items():
        if of_layer != "." and path.endswith(of_layer):
            sch[path.removesuffix(of_layer)].level("block", required=False)
"""


def outcome_of(ranks: RankPool, folder: str, layout: str, schedule: str) -> Outcome:
    """One step at a layout, held against plain HF."""
    laid_out = LAYOUTS[layout]
    flags = [*laid_out.flags.split(), "--vocab-size", str(VOCABULARY)]
    options = {"iterations": 1, "random_init": False, "tokens": TOKENS, "schedule": schedule}
    try:
        reports = ranks.run(laid_out.world_size, train, folder, flags, timeout=240, **options)
        batches = batches_of(reports)
        (expected,) = ranks.run(1, hf_step, folder, batches, random_init=False)
        found = compare(reports, expected, laid_out.tp)
        if found.verdict == "wrong" and found.errors:
            (rounding,) = ranks.run(1, rounding_of, folder, batches, random_init=False)
            found = compare(reports, expected, laid_out.tp, rounding)
    except RankError as error:
        return failure(str(error))
    return found


def outcomes(ranks: RankPool, types: Sequence[str], seed: int) -> Iterator[tuple[str, Outcome]]:
    """What is tried of each type, again and again, and what comes of it."""
    draw = random.Random(seed)
    for number in count(seed):
        for model_type in types:
            layout, by_megatron = draw.choice(NAMES), draw.random() < 0.5
            with tempfile.TemporaryDirectory() as work:
                (schedule := Path(work, "blocks.py")).write_text(BLOCKS)
                folder = f"{work}/model"
                (changes,) = ranks.run(1, write_changed, model_type, number, folder, timeout=240)
                if not changes:
                    continue
                if layout == "ep2" and ranks.run(1, routes_to_experts, folder) == [False]:
                    layout = "tp2"
                outcome = outcome_of(ranks, folder, layout, str(schedule) if by_megatron else "auto")
            yield f"{model_type} at {layout}{' by blocks' if by_megatron else ''}, {', '.join(changes)}", outcome


def main() -> None:
    end, seed = time.monotonic() + float(sys.argv[1]), int((*sys.argv[2:3], "0")[0])
    known = sorted(set(causal_lm_types()) - RANDOM)
    types = sys.argv[3:] or random.Random(seed).sample(known, len(known))
    verdicts: dict[str, int] = {}
    with RankPool() as ranks:
        for told, outcome in outcomes(ranks, types, seed):
            verdicts[outcome.verdict] = verdicts.get(outcome.verdict, 0) + 1
            if outcome.verdict not in FINE:
                print(f"{outcome.verdict}: {told}: {outcome.why}", flush=True)
            if time.monotonic() > end:
                break
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())))
    sys.exit(bool(verdicts.keys() - set(FINE)))


if __name__ == "__main__":
    main()
