"""Private names of transformers in the oldest that is supported: it has them, and the rest is public in it too."""

import pytest

from megasched.versions import TESTED
from tests.process import OLDEST, run_case


@pytest.fixture(scope="module")
def found():
    return run_case(OLDEST, "tests.oldest.names_case")


def test_it_has_every_name(found):
    assert f">={found['version']}".startswith(TESTED["transformers"].partition(",")[0])
    assert found["missing"] == []


def test_what_is_public_in_the_newest_is_so_in_it(found):
    assert found["unlisted"] == {}
