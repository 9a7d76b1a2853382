"""The servers of the contract suites, started before the first test looks at what it might leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hdfs_server import Hdfs
    from tests.s3_server import S3


@pytest.fixture(scope="session", autouse=True)
def _servers(hdfs: Hdfs, s3: S3) -> None:
    """All Stores are tested, so all servers are needed."""
