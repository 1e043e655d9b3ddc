"""Prints what the checks find, model type -> layout -> outcome, in JSON."""

import json
import tempfile

import transformers

from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.parity import check_layout
from megasched.verify.ranks.pool import RankPool

# Model type -> layouts. Experts are known by what transformers' decorator leaves on them, which newer versions do
# otherwise; GPT-J has a plan of HF's in newer versions; Bart is an encoder and a decoder.
CHECKED = {"deepseek_v3": ("tp2-sp", "ep2"), "gptj": ("tp2-sp", "pp2-vpp2"), "bart": ("tp2-sp", "pp2-vpp2")}


def main() -> None:
    found = {"version": transformers.__version__, "types": {}}
    with RankPool() as ranks:
        for model_type, layouts in CHECKED.items():
            with tempfile.TemporaryDirectory() as folder:
                ranks.run(1, write_small_model, model_type, folder)
                outcomes = {layout: check_layout(ranks, folder, layout).as_dict() for layout in layouts}
            found["types"][model_type] = outcomes
    print(json.dumps(found))


if __name__ == "__main__":
    main()
