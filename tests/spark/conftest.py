from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _start_ranks_quickly(warm_ranks):
    """Every module of this folder starts ranks."""
