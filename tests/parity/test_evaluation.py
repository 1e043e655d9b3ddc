"""The loss of a validation at a layout against that of one rank: evaluation may run other code than training."""

import pytest

from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.definition.small_models.small_models import write_small_model
from tests import remote
from tests.parity.cases import slow
from tests.parity.validation import validate
from tests.ways import BY_MODE

FLAGS = ["--eval-iters", "1", "--eval-interval", "1", "--split", "50,50,0"]
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


def assert_equal_losses(ranks, folder, layout, flags=(), **options):
    options |= {"iterations": 2, "timeout": 240}
    (expected,) = ranks.run(1, validate, folder, [*FLAGS, *flags], **options)
    found = ranks.run(2, validate, folder, [*layout.split(), *FLAGS, *flags], **options)
    assert len(expected) == 4
    assert [losses for losses in found if losses] != []
    for losses in filter(None, found):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("mamba2", TP2),
        slow("mamba2", PP2),
        slow("mamba2", "--context-parallel-size 2"),
        slow("phimoe", TP2),
        slow("xlnet", TP2),
        slow("xlnet", PP2),
        slow("gemma3n_text", TP2),
        slow("gemma3n_text", PP2),
        slow("nemotron_h", f"{TP2} --sequence-parallel"),
        slow("rwkv", TP2),
        ("rwkv", PP2),  # which divides weights of its layers when it evaluates
    ],
)
def test_of_models_that_evaluate_otherwise(ranks, tmp_path, model_type, layout):
    (folder,) = ranks.run(1, write_small_model, model_type, str(tmp_path / "model"), timeout=240)
    flags = ["--vocab-size", str(VOCABULARY)]
    assert_equal_losses(ranks, folder, layout, flags, random_init=False, tokens=TOKENS)


@pytest.mark.parametrize("name", BY_MODE)
def test_of_code_that_asks_for_the_mode(ranks, tmp_path, name):
    folder = remote.write(tmp_path / "model", BY_MODE[name])
    assert_equal_losses(ranks, folder, TP2, ["--trust-remote-code"])
