"""Each fault that ``mutations.py`` plants has its place in the product."""

import pytest

from tests.process import ROOT
from tests.suite.mutations import MUTATIONS


@pytest.mark.parametrize("name", MUTATIONS)
def test_its_place_is_there(name):
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests)
