from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.membership import SYNCED, WAITING, Assignment, Membership, Report, report_key, token_of
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.driver.elastic.membership_server import MembershipServer
from sparkhvd.driver.elastic.workers import Reported
from sparkhvd.errors import AuthenticationError, HorovodInternalError, PeerLostError
from sparkhvd.world import World
from tests.waiting import wait_for


@pytest.fixture
def _restored_environment() -> Iterator[None]:
    """Undo the variables that every generation sets for the rank."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def served() -> Iterator[tuple[MembershipServer, queue.SimpleQueue]]:
    """Make this process a worker; return its membership server and the server's inbox."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    server = MembershipServer(b"secret", inbox)
    server.listen_to(0)
    session.set_launch_context(LaunchContext(membership=replace(server.address, worker=0)))
    yield server, inbox
    session.shutdown()
    session.set_launch_context(LaunchContext())
    server.close()


def reader_threads() -> int:
    return sum(thread.name == "sparkhvd-elastic-reports" for thread in threading.enumerate())


def test_a_forgotten_worker_needs_no_thread_and_its_reports_are_ignored():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    server = MembershipServer(b"secret", inbox)
    address = server.address
    with RendezvousClient(address.addresses, address.token, Deadline.after(10)) as client:

        def report(worker: int, number: int, kind: str) -> None:
            client.set(report_key(worker, number), Report(kind, 0).to_json(), Deadline.after(10))

        for worker in range(20):
            server.listen_to(worker)
            report(worker, 0, WAITING)
            assert inbox.get(timeout=60) == Reported(worker, Report(WAITING, 0))
            if worker < 19:
                server.forget(worker)
                server.forget(worker)  # a second call does nothing
        assert reader_threads() == 1
        report(3, 1, SYNCED)
        report(3, 2, SYNCED)
        report(19, 1, SYNCED)
        assert inbox.get(timeout=60) == Reported(19, Report(SYNCED, 0))
        assert inbox.empty()
    server.close()
    assert reader_threads() == 0


def test_ranks_whose_training_has_ended_are_not_notified():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    server = MembershipServer(b"secret", inbox)
    server.listen_to(0)
    membership = Membership(LaunchContext(membership=replace(server.address, worker=0)))
    with membership.watch(lambda why: None):
        assert not membership.is_notified()
        server.notify(membership.generation)
        wait_for(membership.is_notified)
        membership.connected()
        membership.finished()
        assert not membership.is_notified()
    assert [inbox.get(timeout=60).report.kind for _ in range(2)] == ["connected", "finished"]
    membership.close()
    server.close()


def test_a_report_waits_for_a_driver_that_is_suspended_for_a_day(monkeypatch):
    reports = []

    def set_after_a_day(_client, key, _value, deadline):
        assert deadline.remaining() > 86400.0
        reports.append(key)

    server = MembershipServer(b"secret", queue.SimpleQueue())
    membership = Membership(LaunchContext(membership=replace(server.address, worker=0)))
    monkeypatch.setattr(RendezvousClient, "set", set_after_a_day)
    membership.synced()
    assert reports == [report_key(0, 0)]
    membership.close()
    server.close()


def test_the_server_knows_the_ranks_that_a_rank_of_the_current_generation_could_not_reach():
    server = MembershipServer(b"secret", queue.SimpleQueue())
    assert server.unreachable(1, 2) == [], "no generation has formed"
    address = ("127.0.0.1", server.open_rendezvous(3))
    with RendezvousClient([address], token_of(b"secret", 3), Deadline.after(10)) as client:
        client.set("generation-3/unreachable/2", b"1,0", Deadline.after(10))
    assert server.unreachable(3, 2) == [1, 0]
    assert server.unreachable(3, 1) == []
    server.close()


def test_a_worker_of_an_earlier_generation_cannot_speak_to_the_current_one():
    """Its secret is that of its own generation, and its reports name it."""
    server = MembershipServer(b"secret", queue.SimpleQueue())
    server.open_rendezvous(1)
    address = ("127.0.0.1", server.open_rendezvous(2))
    with pytest.raises(AuthenticationError):
        RendezvousClient([address], token_of(b"secret", 1), Deadline.after(10))
    with RendezvousClient([address], token_of(b"secret", 2), Deadline.after(10)) as client:
        assert client.missing("", range(1)) == [0]
    server.close()


def assignment_of_rank_0(generation: int, size: int, port: int) -> Assignment:
    return Assignment(generation, World(0, size, 0, size), port, "", "127.0.0.1", answer_timeout=5.0)


def peer(server: MembershipServer, generation: int, port: int) -> Communicator:
    """Connect to a generation as rank 1 of 2."""
    context = LaunchContext(
        World(1, 2, 1, 2), (("127.0.0.1", port),), token_of(server.address.token, generation), "", "127.0.0.1"
    )
    return Communicator(context, scope=f"generation-{generation}")


@pytest.mark.usefixtures("_restored_environment")
def test_a_loss_that_the_driver_reports_ends_only_the_collectives_of_its_generation(served):
    server, inbox = served
    peers: list[Communicator] = []

    def connect(generation: int) -> None:
        assert inbox.get(timeout=60) == Reported(0, Report(WAITING, generation - 1))
        port = server.open_rendezvous(generation)
        server.assign(0, generation - 1, assignment_of_rank_0(generation, 2, port))
        peers.append(peer(server, generation, port))

    try:
        for generation in (1, 2):
            thread = threading.Thread(target=connect, args=(generation,))
            thread.start()
            session.init()
            thread.join()
            if generation == 1:
                waiting = session.current().allreduce_async(np.ones(1), name="step")
                server.report_loss(1, "Rank 1 on host far was lost with its host.")
                with pytest.raises(PeerLostError, match="Rank 1 on host far was lost with its host") as caught:
                    waiting.wait(30)
                assert isinstance(caught.value, HorovodInternalError)
                session.shutdown()
                peers.pop().close()
        server.report_loss(1, "Rank 1 of the first generation is lost again.")
        peer_operation = peers[0].allreduce_async(np.ones(1), name="step")
        assert session.current().allreduce(np.ones(1), name="step") == peer_operation.wait(30) == 1
    finally:
        session.shutdown()
        for communicator in peers:
            communicator.close()


@pytest.mark.usefixtures("_restored_environment")
def test_a_rank_whose_generation_ends_while_it_connects_waits_for_the_next_one(served):
    server, inbox = served
    reports: list[Report] = []

    def form_generations() -> None:
        reports.append(inbox.get(timeout=60).report)
        with socket.create_server(("127.0.0.1", 0)) as rendezvous:
            server.assign(0, 0, assignment_of_rank_0(1, 2, rendezvous.getsockname()[1]))
            rendezvous.accept()[0].close()
        reports.append(inbox.get(timeout=60).report)
        server.assign(0, 1, assignment_of_rank_0(2, 1, 0))

    with ThreadPoolExecutor(1) as driver:
        formed = driver.submit(form_generations)
        session.init()
        formed.result()
    assert session.size() == 1
    assert [report.kind for report in reports] == [WAITING, WAITING]
    assert "could not connect: " in reports[1].reason


@pytest.mark.usefixtures("_restored_environment")
def test_two_hundred_generations_leave_as_few_keys_as_one():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    server = MembershipServer(b"secret", inbox)
    survivor = Membership(LaunchContext(membership=replace(server.address, worker=0)))
    server.listen_to(0)
    counts = []

    def run_generations(generations: int) -> None:
        for _ in range(generations):
            survivor.next_generation()
            survivor.synced()

    for generations in (1, 200):
        thread = threading.Thread(target=run_generations, args=(generations,))
        thread.start()
        for _ in range(generations):
            before = survivor.generation
            assert inbox.get(timeout=60).report.kind == WAITING
            lost = 1 + before  # a worker that is new in every generation
            server.listen_to(lost)
            with RendezvousClient(server.address.addresses, b"secret", Deadline.after(10)) as client:
                client.set(report_key(lost, 0), Report(WAITING, 0).to_json(), Deadline.after(10))
            assert inbox.get(timeout=60) == Reported(lost, Report(WAITING, 0))
            generation = before + 1
            port = server.open_rendezvous(generation)
            for worker, previous_generation in ((0, before), (lost, 0)):
                server.assign(worker, previous_generation, assignment_of_rank_0(generation, 1, port))
            assert inbox.get(timeout=60) == Reported(0, Report(SYNCED, generation))
            server.notify(generation)
            server.report_loss(generation, "why")
            server.forget(lost)
        thread.join()
        counts.append(server._server.erase(""))
    survivor.close()
    server.close()
    assert counts[0] == counts[1] == 4, "the assignment, a report, the notification and the loss of the last generation"
