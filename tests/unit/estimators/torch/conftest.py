from __future__ import annotations

import pytest

from tests.ranks import RankGroup


@pytest.fixture(scope="package", params=[2, pytest.param(3, marks=pytest.mark.soak)], ids=["2 ranks", "3 ranks"])
def group(request):
    with RankGroup(request.param, imports=("torch._dynamo", "sparkhvd.estimators.torch.plugin")) as started:
        yield started
