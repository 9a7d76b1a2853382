from __future__ import annotations

import queue
from types import SimpleNamespace

from sparkhvd.driver.elastic.lease_book import LeaseBook
from sparkhvd.driver.elastic.lease_workers import LeaseWorkers
from sparkhvd.rpc.messages import Acknowledged, EndLease, NextCommand, OfferSlot, Rejected, StartWorker, TaskStatus
from sparkhvd.rpc.registration import Introduction, TaskOffer
from sparkhvd.task.elastic.worker import WorkerLocation


class Failing(LeaseWorkers):
    """Leases whose tasks all fail; it ends after some pauses, which it records instead of waiting."""

    def __init__(self, pauses):
        self._cluster = SimpleNamespace(
            run=lambda *_: RuntimeError("cannot reach the driver"),
            explain=lambda error: (str(error), False),
            is_stopped=lambda: False,
        )
        self._inbox, self._runs, self.pauses = queue.SimpleQueue(), {}, []
        self._run_task = self._cluster.run
        self._book = LeaseBook(None, None, self._inbox, "was lost")
        self._book.heard.set()  # another lease works, so these failures are not final
        self._closing = SimpleNamespace(is_set=lambda: len(self.pauses) == pauses, wait=self.pauses.append)


def test_a_lease_that_fails_for_days_is_still_submitted_again():
    workers = Failing(pauses=2000)
    workers._keep_lease(0)
    assert workers.pauses[:3] == [0.5, 1.0, 2.0]
    assert workers.pauses[-1] == 30.0


class Interrupted(LeaseBook):
    """A task and its lease, which another thread ends between a decision to send a command and the command."""

    def __init__(self):
        super().__init__(SimpleNamespace(versions=()), None, queue.SimpleQueue(), "was lost")
        self.interrupt = lambda: None
        self.handle(OfferSlot(Introduction(7, TaskOffer(0, "a", "node", "127.0.0.1"), 0)))

    def ask(self):
        return self.handle(NextCommand(0, 7))

    def _command(self, lease, command):
        self.interrupt()
        super()._command(lease, command)


def test_a_task_whose_slot_is_withdrawn_while_its_worker_is_stopped_gets_one_answer():
    book = Interrupted()
    assert book.start(5, "node")
    assert book.ask() == StartWorker(5)
    request = book.ask()
    book.interrupt = lambda: book.withdraw(0, 7, "Spark decommissions the executor")
    book.stop(5)
    assert request.result(0) == book.ask() == EndLease()


def test_a_task_whose_slot_is_given_back_while_a_worker_is_started_gets_one_answer():
    book = Interrupted()
    request = book.ask()
    book.interrupt = lambda: book.give_back(2)
    book.start(5, "node")
    assert request.result(0) == book.ask() == EndLease()


def test_hosts_with_one_name_have_slots_of_their_own():
    """Containers may all have the same name; two of them are also at one address, behind different networks."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    book = LeaseBook(SimpleNamespace(versions=()), None, inbox, "was lost")
    places = [("a", "10.0.0.1"), ("b", "10.0.0.2"), ("a", "10.0.0.1"), ("c", "10.0.0.2")]
    for number, (key, address) in enumerate(places):
        book.handle(OfferSlot(Introduction(7, TaskOffer(number, key, "node", address), 0)))
    offers = [inbox.get() for _ in places]
    assert offers[-1].capacity == {"node": 2, "node (10.0.0.2)": 1, "node (c)": 1}
    assert book.start(5, "node (10.0.0.2)")
    assert inbox.get().location == WorkerLocation("b", "node (10.0.0.2)", "10.0.0.2")
    assert not book.start(6, "node (10.0.0.2)"), "this host has no other slot"
    book.on_ended(TaskStatus(1, -1, "node", 7), EOFError())
    assert inbox.get().failure.host == "node (10.0.0.2)"
    assert inbox.get().capacity == {"node": 2, "node (c)": 1}


def test_a_speculative_attempt_is_rejected_and_a_late_task_ends_at_once():
    book = LeaseBook(SimpleNamespace(versions=()), None, queue.SimpleQueue(), "was lost")

    def offer(attempt):
        return book.handle(OfferSlot(Introduction(attempt, TaskOffer(0, "a", "node", "127.0.0.1"), 0)))

    assert offer(7) == Acknowledged()
    assert offer(8) == Rejected("Another attempt of the task holds this lease.")
    assert book.handle(NextCommand(0, 8)) == EndLease()
    book.on_ended(TaskStatus(0, -1, "node", 7), EOFError())
    assert offer(9) == Acknowledged(), "the attempt that replaces a lost one"
    book.end()
    assert offer(10) == EndLease()
