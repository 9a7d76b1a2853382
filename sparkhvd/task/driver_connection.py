"""The connection of a task to its driver: tasks exchange introductions over it and end when the driver is lost."""

from __future__ import annotations

import math
import queue
import threading

from sparkhvd._util.background import in_background
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.frames import is_host_unreachable
from sparkhvd.rpc.messages import ExchangeIntroductions, ExchangeUnavailable, Flush, Introductions, Rejected, TaskStatus
from sparkhvd.rpc.registration import Introduction
from sparkhvd.task.failure_report import LAUNCH, STARTING, FailureReport
from sparkhvd.task.job import Job
from sparkhvd.task.supervision import ServerLost
from sparkhvd.task.task_info import TaskInfo

_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 30.0
# The period of heartbeats, and the time for the driver's host to acknowledge one. Together they are as long as the
# kernel takes to declare an idle host unreachable (``kSilentRendezvous`` of the core).
_BEAT_SECONDS = 3.0
_SILENT_SECONDS = 6.0


class DriverEndedError(LaunchError):
    """The driver has ended, so a retry of the task by Spark would be in vain."""


class DriverConnection:
    """A connection that opens in the background and carries heartbeats until ``close``.

    If a host becomes unreachable, the driver and the task notice it at the same time. If the driver ends, the task ends
    the job: a process that the driver has forked may keep Spark's JVM alive. If the task cannot connect at first, the
    job continues without this connection, because a task need not be able to reach the driver; unless the driver ran on
    this machine and has ended.

    Args:
        job: contains the addresses of the driver.
        task: this task.
    """

    def __init__(self, job: Job, task: TaskInfo) -> None:
        self._job = job
        self._task = task
        self._lock = threading.Lock()
        self._client: Client | None = None  # the newest one; guarded by _lock
        self._closed = False  # written with _lock held
        self._rank, self._phase = -1, ""  # written before _phase_changed is set
        self._phase_changed = threading.Event()
        self._events: queue.SimpleQueue[object] | None = None  # written before _has_rank is set
        self._has_rank = threading.Event()
        self._opened = in_background(self._open, "sparkhvd-driver-connect")
        self._ended = in_background(self._watch, "sparkhvd-driver-watch")

    def is_open(self) -> bool:
        """Return whether the driver was reached; wait for the attempt to end."""
        return self._opened.result() is not None

    def exchange_introductions(self, own: Introduction) -> tuple[Introduction, ...] | None:
        """Exchange introductions with the other tasks, however long their rows take.

        Returns:
            The introductions by task index, or None when not all tasks are connected to the driver.

        Raises:
            DriverEndedError: the driver has ended.
            LaunchError: the driver's host is lost, or the job has ended.
        """
        client = self._opened.result()
        where = f"Task {self._task.index} on host {self._task.host}"
        if client is None:
            if self._job.driver is not None and self._job.driver.has_ended():
                raise DriverEndedError(f"{where} cannot connect to the driver of its job, which has ended.")
            return None
        try:
            answer = client.ask(ExchangeIntroductions(own), Deadline(math.inf))
        except OSError as error:
            kind = LaunchError if is_host_unreachable(error) or self._open() is not None else DriverEndedError
            raise kind(f"{where} lost its connection to the driver before the ranks were assigned: {error}") from error
        if isinstance(answer, Introductions):
            return answer.introductions
        if isinstance(answer, ExchangeUnavailable):
            return None
        raise LaunchError(f"{where}: {answer.reason if isinstance(answer, Rejected) else answer}")

    def attend(self, rank: int, events: queue.SimpleQueue[object]) -> None:
        """Report the rank of this task to the driver.

        Args:
            rank: the rank of this task.
            events: receives ``ServerLost`` when the driver's host becomes unreachable, and a ``FailureReport`` when the
                driver has ended: there is nobody for whom Spark should retry the job.
        """
        self._rank, self._events = rank, events
        self._has_rank.set()
        self.report_phase(STARTING)

    def report_phase(self, phase: str) -> None:
        """Report the rank's phase to the driver in the background, without waiting."""
        self._phase = phase
        self._phase_changed.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.wake()
        self._has_rank.set()
        self._phase_changed.set()
        self._ended.result()
        if self._client is not None:
            self._client.close()

    def _open(self) -> Client | None:
        try:
            deadline, encrypt = Deadline.after(_CONNECT_SECONDS), self._job.config.encrypt
            client = connect(self._job.driver_addresses, self._job.secret, deadline, encrypt=encrypt)
        except OSError:
            return None
        with self._lock:
            previous, self._client = self._client, client
            if self._closed:
                client.wake()
        if previous is not None:
            previous.close()
        self._send_status(client)
        return client

    def _watch(self) -> None:
        client = self._opened.result()
        while client is not None:
            error = self._send_heartbeats(client)
            self._has_rank.wait()
            if self._closed or self._events is None:
                return
            if is_host_unreachable(error):
                self._events.put(ServerLost(f"this host cannot reach the driver's host any more ({error})"))
                return
            client = self._open()  # a device of the network may have broken the connection
            if client is None and not self._closed:
                self._events.put(_driver_ended(self._task.host, error))

    def _send_heartbeats(self, client: Client) -> OSError:
        """Send heartbeats until the connection breaks, and return its error."""
        forever = Deadline(math.inf)  # a stopped driver may resume later
        try:
            client.set_ack_timeout(_SILENT_SECONDS)
            while True:  # another thread may use the connection meanwhile
                if self._phase_changed.wait(_BEAT_SECONDS):
                    self._phase_changed.clear()
                    self._send_status(client)
                client.ask(Flush(), forever)
        except OSError as error:
            return error

    def _send_status(self, client: Client) -> None:
        message = TaskStatus(self._task.index, self._rank, self._task.host, self._task.attempt, self._phase)
        try:
            client.send(message, Deadline.after(_SEND_SECONDS))
        except OSError:
            return  # the next read from the connection raises


def _driver_ended(host: str, error: OSError) -> FailureReport:
    cause = (
        f"The driver of this job has ended, so its ranks were ended, too. The task on host {host} lost its connection "
        f"to the driver ({str(error).removesuffix('.')}) and cannot connect again. See the driver's log."
    )
    return FailureReport(-1, "", cause, kind=LAUNCH)
