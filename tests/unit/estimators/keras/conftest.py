from __future__ import annotations

import pytest

from tests.ranks import RankGroup


@pytest.fixture(scope="package", params=["tensorflow", "torch"])
def group(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", request.param)
        started = RankGroup(2, imports=("keras", "sparkhvd.estimators.keras.trainer"))
    with started:
        yield started
