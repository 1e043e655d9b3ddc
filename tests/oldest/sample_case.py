"""Prints what the checks of the sample find, model type -> layout -> outcome, in JSON."""

import json
import sys
import tempfile

import transformers

from megasched.verify.parity import check_layout
from megasched.verify.rank_pool import RankPool
from megasched.verify.small_models import write_small_model
from tests.verify.sample import SAMPLE

# Model type -> layouts that share out its experts.
EXPERTS = {"deepseek_v3": ["ep2"]}


def main() -> None:
    found = {"version": transformers.__version__, "types": {}}
    with RankPool() as ranks:
        for model_type in SAMPLE:
            with tempfile.TemporaryDirectory() as folder:
                ranks.run(1, write_small_model, model_type, folder)
                layouts = [*sys.argv[1:], *EXPERTS.get(model_type, ())]
                outcomes = {layout: check_layout(ranks, folder, layout).as_dict() for layout in layouts}
            found["types"][model_type] = outcomes
    print(json.dumps(found))


if __name__ == "__main__":
    main()
