"""Changed configs through Megatron's trainer: a step is that of plain HF, or is refused.

python -m tests.fuzz.run_configs SECONDS [SEED [TYPE ...]]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

from megasched.definition.small_models.small_models import causal_lm_types
from megasched.verify.parity import Outcome, check_layout
from megasched.verify.ranks.pool import RankPool
from tests.definition.test_small_models import RANDOM
from tests.fuzz.configs import write_changed

FINE = ("equal", "refused")
NAMES = ("one", "tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "ep2")
# Everything by default, and what Megatron's own modules compute by these.
BLOCKS = """
from megasched.language.module_specs import LayerSpec
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    if isinstance(sch.roles.layer, LayerSpec):
        out = f".{sch.roles.layer.attention.out}"
        for path in sch.roles.role:
            if path.endswith(out):
                sch[path.removesuffix(out)].level("block", required=False)
"""


def outcomes(ranks: RankPool, types: Sequence[str], seed: int) -> Iterator[tuple[str, Outcome]]:
    """What is tried of each type, again and again, and what comes of it."""
    draw = random.Random(seed)
    for number in count(seed):
        for model_type in types:
            layout, by_megatron = draw.choice(NAMES), draw.random() < 0.5
            with tempfile.TemporaryDirectory() as work:
                (blocks := Path(work, "blocks.py")).write_text(BLOCKS)
                folder = f"{work}/model"
                (changes,) = ranks.run(1, write_changed, model_type, number, folder, timeout=240)
                if not changes:
                    continue
                schedule = str(blocks) if by_megatron else "auto"
                outcome = check_layout(ranks, folder, layout, schedule=schedule)
            if outcome.verdict != "not applicable":
                told = f"{model_type} at {layout}{' by blocks' if by_megatron else ''}, {', '.join(changes)}"
                yield told, outcome


# Of ranks, types and a seed.
Tried = Callable[[RankPool, Sequence[str], int], Iterator[tuple[str, Outcome]]]


def assert_fine(tried: Tried, ranks: RankPool, model_type: str, most: int) -> None:
    """All that comes of a type, at so many tries, is equal or refused."""
    for told, outcome in islice(tried(ranks, [model_type], 7), most):
        assert outcome.verdict in FINE, f"{told}: {outcome.why}"


def hunt(known: Sequence[str], tried: Tried) -> None:
    """Tries what ``tried`` yields as long as the command line says; tells what is neither equal nor refused.

    Args:
        known: types that are tried where the command line has none.
    """
    end, seed = time.monotonic() + float(sys.argv[1]), int((*sys.argv[2:3], "0")[0])
    types = sys.argv[3:] or random.Random(seed).sample(known, len(known))
    verdicts: dict[str, int] = {}
    with RankPool() as ranks:
        for told, outcome in tried(ranks, types, seed):
            verdicts[outcome.verdict] = verdicts.get(outcome.verdict, 0) + 1
            if outcome.verdict not in FINE:
                print(f"{outcome.verdict}: {told}: {outcome.why}", flush=True)
            if time.monotonic() > end:
                break
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())))
    sys.exit(bool(verdicts.keys() - set(FINE)))


if __name__ == "__main__":
    hunt(sorted(set(causal_lm_types()) - RANDOM), outcomes)
