"""The servers of the contract suites, started before the first test looks at what it might leave behind."""

from __future__ import annotations

import pytest

from tests.contract.test_store import create


@pytest.fixture(scope="session", autouse=True)
def _servers(store_servers: None) -> None:
    """All Stores are tested, so all servers are needed."""


@pytest.fixture(params=["file", "hdfs", "s3"])
def store(request, tmp_path):
    """A Store of each kind that publishes in its own way."""
    made = create(request.param, request, tmp_path)
    yield made
    if hasattr(made, "_connection"):
        made._connection.close()
