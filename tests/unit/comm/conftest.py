"""A communicator without a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """Open a communicator of one rank, without a session."""
    with Communicator(LaunchContext()) as communicator:
        yield communicator
