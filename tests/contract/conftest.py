"""The servers of the contract suites, started before the first test looks at what it might leave behind."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _servers(store_servers: None) -> None:
    """All Stores are tested, so all servers are needed."""
