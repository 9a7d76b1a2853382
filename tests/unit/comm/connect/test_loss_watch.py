from __future__ import annotations

import threading

import pytest

from sparkhvd.comm.connect import loss_watch
from sparkhvd.comm.connect.loss_watch import LossWatch
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.deadline import Deadline
from tests.waiting import wait_for


@pytest.fixture
def server():
    with RendezvousServer(b"secret") as running:
        yield running


def watch(server: RendezvousServer, key: str, reasons: list[str]) -> LossWatch:
    client = RendezvousClient([("127.0.0.1", server.port)], b"secret", Deadline.after(10))
    return LossWatch(client, key, reasons.append)


def threads() -> int:
    return sum(thread.name == "sparkhvd-loss-watch" for thread in threading.enumerate())


def test_a_loss_is_reported_once_even_if_it_precedes_the_watch(server):
    early: list[str] = []
    with watch(server, "loss", early):
        assert not early
        server.set("loss", b"Rank 1 is lost.")
        server.set("loss", b"Rank 2 is lost, too.")
        wait_for(lambda: early == ["Rank 1 is lost."])
        wait_for(lambda: threads() == 0)
    late: list[str] = []
    with watch(server, "loss", late):
        wait_for(lambda: late == ["Rank 1 is lost."])


def test_a_watch_that_is_closed_while_it_waits_ends_at_once_and_reports_no_later_loss(server):
    first: list[str] = []
    second: list[str] = []
    watch(server, "loss/1", first).close()
    with watch(server, "loss/2", second) as other:
        server.set("loss/1", b"late")
        server.set("loss/2", b"in time")
        wait_for(lambda: second == ["in time"])
        other.close()
        assert threads() == 0
    assert not first


def test_no_loss_is_reported_after_a_watch_is_closed_even_if_both_coincide(server):
    for number in range(200):
        reasons: list[str] = []
        one = watch(server, f"loss/{number}", reasons)
        setter = threading.Thread(target=server.set, args=(f"loss/{number}", b"why"))
        setter.start()
        one.close()
        at_close = list(reasons)
        setter.join()
        assert threads() == 0
        assert reasons == at_close


def test_a_watch_sends_one_request_however_long_it_waits(server, monkeypatch):
    monkeypatch.setattr(loss_watch, "_POLL_SECONDS", 0.01)
    waits: list[str] = []

    class Counted(RendezvousClient):
        def get(self, key: str, deadline: Deadline) -> bytes:
            waits.append(key)
            return super().get(key, deadline)

    reasons: list[str] = []
    with LossWatch(Counted([("127.0.0.1", server.port)], b"secret", Deadline.after(10)), "loss", reasons.append):
        wait_for(lambda: len(waits) > 20)
        assert server.requests == 1
        server.set("loss", b"Rank 1 is lost.")
        wait_for(lambda: reasons == ["Rank 1 is lost."])
        assert server.requests == 1


def test_a_watch_ends_with_its_server():
    reasons: list[str] = []
    with RendezvousServer(b"secret") as server:
        one = watch(server, "loss", reasons)
    wait_for(lambda: threads() == 0)
    one.close()
    assert not reasons
