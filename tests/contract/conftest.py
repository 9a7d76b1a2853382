"""Start the servers of the contract suites before the first leak check."""

from __future__ import annotations

import pytest

from tests.contract.test_store import create


@pytest.fixture(scope="session", autouse=True)
def _servers(store_servers: None) -> None:
    """Start all servers, because the suites test all Stores."""


@pytest.fixture(params=["file", *(pytest.param(scheme, marks=pytest.mark.soak) for scheme in ("hdfs", "s3"))])
def store(request, tmp_path):
    """Provide one Store for each way of publishing a file.

    Their ways are equal by the contract in test_store.py, so `make test` uses one, unless a test names others.
    """
    created = create(request.param, request, tmp_path)
    yield created
    if hasattr(created, "_connection"):
        created._connection.close()
