from __future__ import annotations

import pytest

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.comm.stall import stragglers
from sparkhvd.comm.stall.stragglers import (
    INIT,
    Straggler,
    published_straggler,
    straggler_error,
    warning_of_stragglers,
)
from sparkhvd.config import Config
from sparkhvd.deadline import Deadline
from sparkhvd.world import World
from tests.waiting import wait_for

SIZE = 500


@pytest.fixture
def server():
    with RendezvousServer(b"secret") as running:
        yield running


@pytest.fixture
def client(server):
    with RendezvousClient([("127.0.0.1", server.port)], b"secret", Deadline.after(30.0)) as connected:
        yield connected


def context(rank: int) -> LaunchContext:
    return LaunchContext(world=World(rank=rank, size=SIZE), config=Config(start_timeout=7.0, stall_check_seconds=0.01))


def test_a_rank_finds_the_stragglers_among_many_with_one_request(server, client):
    for rank in set(range(SIZE)) - {4, 100, 101, 102, 499}:
        server.set(f"init/{rank}", b"")
    error = straggler_error(client, context(3), "init/", range(SIZE), INIT)
    assert str(error) == (
        "Rank 3 waited start_timeout=7 s for ranks 4, 100, 101, 102 to reach init(). Check what these ranks are doing, "
        "or raise SPARKHVD_START_TIMEOUT."
    )
    assert server.requests == 2, "the missing ranks, and the report"
    assert published_straggler(client) == Straggler(
        4, "rank 3 waited start_timeout=7 s for ranks 4, 100, 101, 102 to reach init()", joined=False
    )


def test_a_rank_that_has_not_arrived_itself_reports_no_straggler(server, client):
    server.set("init/0", b"")
    assert straggler_error(client, context(3), "init/", range(SIZE), INIT) is None
    for rank in range(SIZE):
        server.set(f"init/{rank}", b"")
    assert straggler_error(client, context(3), "init/", range(SIZE), INIT) is None


def test_a_warning_costs_one_request(server, client, caplog, monkeypatch):
    monkeypatch.setattr(stragglers, "_LEAST_PAUSE_SECONDS", 0.01)
    for rank in range(SIZE - 1):
        server.set(f"init/{rank}", b"")
    with warning_of_stragglers(client, context(0), "init/", range(SIZE), INIT):
        wait_for(lambda: len(caplog.messages) >= 3)
    assert caplog.messages[0] == (
        "Rank 0 has waited 0 s for rank 499 to reach init(). It gives up after start_timeout=7 s."
    )
    assert len(caplog.messages) <= server.requests <= len(caplog.messages) + 1, "the last one may come too late"
