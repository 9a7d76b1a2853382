from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _start_ranks_quickly(warm_ranks):
    """Fork the ranks of all modules of this folder from a warm process."""
