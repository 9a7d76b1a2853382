"""The driver's side of the membership: receives the workers' reports and serves the generations' rendezvous."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from sparkhvd._util.addresses import LOOPBACK
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.comm.connect.membership import (
    Assignment,
    Report,
    assignment_key,
    generation_keys,
    loss_key,
    notice_key,
    report_key,
    token_of,
    unreachable_key,
    worker_keys,
)
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.driver.elastic.workers import Event, Reported
from sparkhvd.errors import DeadlineExceededError, SparkHvdError
from sparkhvd.task.supervision import JOB_SECONDS

logger = logging.getLogger(__name__)


class MembershipServer:
    """Serves one elastic job.

    Each generation has its own rendezvous server, so its keys disappear with the generation.

    Args:
        secret: the job's secret.
        inbox: receives the reports.
        encrypt: whether all traffic is encrypted.
        host: the address to bind.
        names: the names and addresses at which the workers may reach this server; if empty, ``host``.
    """

    def __init__(
        self,
        secret: bytes,
        inbox: queue.SimpleQueue[Event],
        *,
        encrypt: bool = False,
        host: str = LOOPBACK,
        names: Sequence[str] = (),
    ) -> None:
        self._secret = secret
        self._encrypt = encrypt
        self._host = host
        self._names = tuple(dict.fromkeys(names or [host]))
        self._inbox = inbox
        self._server = RendezvousServer(secret, host, encrypt=encrypt)
        self._rendezvous: RendezvousServer | None = None
        self._readers: dict[int, threading.Thread] = {}  # only the controller's thread uses them
        self._lock = threading.Lock()  # guards the next field
        self._awaited: dict[int, int] = {}  # the number of the next report, by worker; absent for a forgotten worker

    @property
    def address(self) -> MembershipAddress:
        """Return the address of this server, without a worker's number."""
        return MembershipAddress(-1, tuple((name, self._server.port) for name in self._names), self._secret)

    def listen_to(self, worker: int) -> None:
        """Receive the reports of a worker from now on."""
        self._awaited[worker] = 0
        reader = threading.Thread(target=self._read, args=(worker,), name="sparkhvd-elastic-reports", daemon=True)
        self._readers[worker] = reader
        reader.start()

    def forget(self, worker: int) -> None:
        """Receive no more reports of a worker that is lost."""
        with self._lock:
            number = self._awaited.pop(worker, None)
        if number is not None:
            self._server.set(report_key(worker, number), b"")  # wakes the reader, unless a report has woken it
            self._readers.pop(worker).join()
            self._server.erase(worker_keys(worker))

    def open_rendezvous(self, generation: int) -> int:
        """Start the rendezvous server of a generation, and return its port; its host names are those of this server.

        All members of the previous generation must have left it.
        """
        self.close_rendezvous()
        self._server.erase(generation_keys(generation - 1))
        self._rendezvous = RendezvousServer(token_of(self._secret, generation), self._host, encrypt=self._encrypt)
        return self._rendezvous.port

    def close_rendezvous(self) -> None:
        """End the rendezvous of the current generation; workers that still connect through it fail at once."""
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()

    def unreachable(self, generation: int, rank: int) -> list[int]:
        """Return the ranks of the current generation that a rank has reported as unreachable."""
        if self._rendezvous is None:
            return []
        try:
            content = self._rendezvous.get(unreachable_key(generation, rank), Deadline.after(0.0))
        except DeadlineExceededError:
            return []
        return [int(peer) for peer in content.split(b",")]

    def assign(self, worker: int, left: int, assignment: Assignment) -> None:
        """Send an assignment to a worker that waits for the generation after ``left``; its reports have all arrived."""
        self._server.erase(worker_keys(worker))
        self._server.set(assignment_key(worker, left), assignment.to_json())

    def notify(self, generation: int) -> None:
        """Ask the members of a generation to leave it at their next commit."""
        self._server.set(notice_key(generation), b"")

    def report_loss(self, generation: int, why: str) -> None:
        """Make the members of a generation leave its collectives at once; the first reason counts."""
        self._server.set(loss_key(generation), why.encode())
        self._server.set(notice_key(generation), b"")  # the members wait for this key first

    def close(self) -> None:
        """End the server and its threads."""
        self.close_rendezvous()
        self._server.close()
        for reader in self._readers.values():
            reader.join()

    def _read(self, worker: int) -> None:
        number = 0
        while True:
            try:
                content = self._server.get(report_key(worker, number), Deadline.after(JOB_SECONDS))
            except SparkHvdError:
                return  # the server is closed
            with self._lock:
                if worker not in self._awaited:
                    return
                number += 1
                self._awaited[worker] = number
            try:
                self._inbox.put(Reported(worker, Report.from_json(content)))
            except (ValueError, TypeError):
                logger.warning("Report %d of worker %d cannot be read and is ignored.", number - 1, worker)
