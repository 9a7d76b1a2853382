from __future__ import annotations

import threading

import pytest

from sparkhvd.comm.connect import generation_watch
from sparkhvd.comm.connect.generation_watch import GenerationWatch
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.errors import PeerLostError
from tests.waiting import wait_for


@pytest.fixture
def server():
    with RendezvousServer(b"secret") as running:
        yield running


def watch(server: RendezvousServer, generation: int, reasons: list[str]) -> GenerationWatch:
    client = RendezvousClient([("127.0.0.1", server.port)], b"secret", Deadline.after(10))
    return GenerationWatch(client, f"notice/{generation}", f"loss/{generation}", reasons.append)


def report_loss(server: RendezvousServer, generation: int, why: bytes) -> None:
    server.set(f"loss/{generation}", why)
    server.set(f"notice/{generation}", b"")


def threads() -> int:
    return sum(thread.name == "sparkhvd-generation-watch" for thread in threading.enumerate())


def test_a_loss_is_reported_once_even_if_it_precedes_the_watch(server):
    early: list[str] = []
    with watch(server, 1, early):
        assert not early
        report_loss(server, 1, b"Rank 1 is lost.")
        report_loss(server, 1, b"Rank 2 is lost, too.")
        wait_for(lambda: early == ["Rank 1 is lost."])
        wait_for(lambda: threads() == 0)
    late: list[str] = []
    with watch(server, 1, late):
        wait_for(lambda: late == ["Rank 1 is lost."])


def test_members_that_are_asked_to_leave_still_hear_of_a_loss(server):
    reasons: list[str] = []
    with watch(server, 1, reasons) as one:
        assert not one.is_notified
        server.set("notice/1", b"")
        wait_for(lambda: one.is_notified)
        assert threads() == 1
        assert not reasons
        report_loss(server, 1, b"Rank 1 is lost.")
        wait_for(lambda: reasons == ["Rank 1 is lost."])
        assert one.is_notified


def test_a_watch_that_is_closed_while_it_waits_ends_at_once_and_reports_no_later_loss(server):
    first: list[str] = []
    second: list[str] = []
    watch(server, 1, first).close()
    with watch(server, 2, second) as other:
        report_loss(server, 1, b"late")
        report_loss(server, 2, b"in time")
        wait_for(lambda: second == ["in time"])
        other.close()
        assert threads() == 0
    assert not first


def test_no_loss_is_reported_after_a_watch_is_closed_even_if_both_coincide(server):
    for number in range(200):
        reasons: list[str] = []
        one = watch(server, number, reasons)
        setter = threading.Thread(target=report_loss, args=(server, number, b"why"))
        setter.start()
        one.close()
        at_close = list(reasons)
        setter.join()
        assert threads() == 0
        assert reasons == at_close


def test_a_watch_sends_one_request_for_each_key_however_long_it_waits(server, monkeypatch):
    monkeypatch.setattr(generation_watch, "_POLL_SECONDS", 0.01)
    waits: list[str] = []

    class Counted(RendezvousClient):
        def get(self, key: str, deadline: Deadline) -> bytes:
            waits.append(key)
            return super().get(key, deadline)

    reasons: list[str] = []
    client = Counted([("127.0.0.1", server.port)], b"secret", Deadline.after(10))
    with GenerationWatch(client, "notice/1", "loss/1", reasons.append) as one:
        wait_for(lambda: waits.count("notice/1") > 20)
        for _ in range(100):
            assert not one.is_notified
        assert server.requests == 1
        server.set("notice/1", b"")
        wait_for(lambda: waits.count("loss/1") > 20)
        assert server.requests == 2
        report_loss(server, 1, b"Rank 1 is lost.")
        wait_for(lambda: reasons == ["Rank 1 is lost."])
        assert server.requests == 2


def test_a_watch_ends_with_its_server():
    reasons: list[str] = []
    with RendezvousServer(b"secret") as server:
        one = watch(server, 1, reasons)
    wait_for(lambda: threads() == 0)
    with pytest.raises(PeerLostError):
        _ = one.is_notified
    one.close()
    assert not reasons
