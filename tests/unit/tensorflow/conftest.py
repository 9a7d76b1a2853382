from __future__ import annotations

import pytest

from tests.ranks import RankGroup


@pytest.fixture(scope="package")
def group():
    with RankGroup(2, imports=("tensorflow", "sparkhvd.tensorflow")) as started:
        yield started
