"""Three architectures with the oldest transformers that megasched supports.

`make matrix` checks every architecture with the newest; here is that what differs between the two is met.
"""

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from tests.oldest.sample_case import CHECKED
from tests.process import OLDEST, run_case


@pytest.fixture(scope="module")
def found():
    return run_case(OLDEST, "tests.oldest.sample_case")


def test_it_is_the_oldest_that_is_supported(found):
    (wanted,) = (r for r in map(Requirement, requires("megasched")) if r.name == "transformers")
    assert found["version"].startswith(next(s.version for s in wanted.specifier if s.operator == ">="))


@pytest.mark.parametrize(("model_type", "layout"), [(one, layout) for one in CHECKED for layout in CHECKED[one]])
def test_a_step_equals_the_unscheduled_model(found, model_type, layout):
    outcome = found["types"][model_type][layout]
    assert (outcome["verdict"], outcome["why"]) == ("equal", "")
    assert max(outcome["errors"].values()) <= 1e-5
