"""Fixtures of several folders of unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sparkhvd.comm import session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext


@pytest.fixture(scope="session", autouse=True)
def _folder_for_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch creates this folder as soon as an optimizer is used, and keeps it for the life of the process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("torchinductor"))


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """Make this process a job of one rank; the test gets its communicator."""
    session.set_launch_context(LaunchContext())
    session.init()
    yield session.current()
    session.shutdown()
