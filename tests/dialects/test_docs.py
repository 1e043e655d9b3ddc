"""The code of docs/deepspeed.md runs, and prints what the page shows."""

from __future__ import annotations

import itertools
import re
from typing import Any

from tests.test_docs import ROOT, blocks, run_code_on_a_rank


def test_the_page_runs(deepspeed_ranks: Any) -> None:
    found, ran = blocks(ROOT / "docs" / "deepspeed.md"), 0
    for block, after in itertools.pairwise(found):
        if on_ranks := re.fullmatch(r"ranks=(\d+)", block.info):
            printed = deepspeed_ranks.run(int(on_ranks[1]), run_code_on_a_rank, block.text)[0]
            assert after.language == "text"
            assert printed.splitlines()[-1] == after.text.rstrip()
            ran += 1
    assert ran == 4
