from __future__ import annotations

import pytest


@pytest.fixture(scope="package", params=["tensorflow", "torch"])
def group(request):
    from tests.unit.keras.networks import ranks_with  # noqa: PLC0415  (imports Keras, which must follow PyTorch)

    with ranks_with(request.param) as started:
        yield started
