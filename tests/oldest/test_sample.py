"""The sample of architectures with the oldest transformers that megasched supports."""

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from tests.process import OLDEST, run_case
from tests.verify.sample import SAMPLE

LAYOUTS = ("tp2-sp", "pp2-vpp2")


@pytest.fixture(scope="module")
def found():
    return run_case(OLDEST, "tests.oldest.sample_case", *LAYOUTS, timeout=900)


def test_it_is_the_oldest_that_is_supported(found):
    (wanted,) = (r for r in map(Requirement, requires("megasched")) if r.name == "transformers")
    assert found["version"].startswith(next(s.version for s in wanted.specifier if s.operator == ">="))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_step_equals_the_unscheduled_model(found, model_type, layout):
    outcome = found["types"][model_type][layout]
    assert (outcome["verdict"], outcome["why"]) == ("equal", "")
    assert max(outcome["errors"].values()) <= 1e-5


def test_experts_are_shared_out(found):
    """They are known by what transformers' decorator leaves on them, which newer versions do otherwise."""
    outcome = found["types"]["deepseek_v3"]["ep2"]
    assert (outcome["verdict"], outcome["why"]) == ("equal", "")
