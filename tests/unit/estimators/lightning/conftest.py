from __future__ import annotations

import pytest

from tests.ranks import RankGroup
from tests.unit.estimators.lightning.networks import SIZE


@pytest.fixture(scope="package")
def group():
    with RankGroup(
        SIZE, imports=("torch._dynamo", "lightning.pytorch", "sparkhvd.estimators.lightning.plugin")
    ) as started:
        yield started
