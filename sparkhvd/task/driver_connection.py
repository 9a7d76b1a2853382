"""The line of a task to its driver: the tasks meet over it, and their ranks live no longer than the driver answers."""

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
from sparkhvd.task.failure_report import STARTING
from sparkhvd.task.job import Job
from sparkhvd.task.supervision import ServerLost
from sparkhvd.task.task_info import TaskInfo

_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 30.0
# How often the driver gets a sign of life, and how long its host may take to acknowledge one. Together as long as the
# kernel takes to give up a host from which nothing is expected (``frames.enable_keepalive``).
_BEAT_SECONDS = 3.0
_SILENT_SECONDS = 6.0


class DriverConnection:
    """One connection, opened in the background, over which signs of life go; ``close`` hangs up.

    The driver gives up a host that does not answer any more, and this task its rank when the driver does not: both
    notice at the same time. Where the driver cannot be reached in the first place there is no line, and all goes on
    without: Spark needs none of its own connections to run from here.

    Args:
        job: says where the driver is.
        place: of the task.
    """

    def __init__(self, job: Job, place: TaskInfo) -> None:
        self._job = job
        self._place = place
        self._lock = threading.Lock()
        self._client: Client | None = None  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._rank, self._phase = -1, ""  # written before _news is set
        self._news = threading.Event()
        self._events: queue.SimpleQueue[object] | None = None  # written before _attends is set
        self._attends = threading.Event()
        self._opened = in_background(self._open, "sparkhvd-driver-line")
        self._ended = in_background(self._watch, "sparkhvd-driver-watch")

    def is_open(self) -> bool:
        """Whether the driver could be reached; waits until that is known."""
        return self._opened.result() is not None

    def meet(self, own: Introduction) -> tuple[Introduction, ...] | None:
        """Exchange introductions with the other tasks, however long their rows take; None when not all have a line.

        Raises:
            LaunchError: the driver is gone, or the job.
        """
        client = self._opened.result()
        if client is None:
            return None
        where = f"Task {self._place.index} on host {self._place.host}"
        try:
            answer = client.ask(ExchangeIntroductions(own), Deadline(math.inf))
        except OSError as error:
            raise LaunchError(
                f"{where} lost its connection to the driver before the ranks were assigned: {error}"
            ) from error
        if isinstance(answer, Introductions):
            return answer.introductions
        if isinstance(answer, ExchangeUnavailable):
            return None
        raise LaunchError(f"{where}: {answer.reason if isinstance(answer, Rejected) else answer}")

    def attend(self, rank: int, events: queue.SimpleQueue[object]) -> None:
        """Tell the driver whose line this is.

        Args:
            rank: of this task.
            events: get ``ServerLost`` when the driver's host is cut off from this one.
        """
        self._events = events
        self._attends.set()
        self._rank = rank
        self.reach(STARTING)

    def reach(self, phase: str) -> None:
        """Let the driver know how far the rank is, as soon as it answers: nobody waits for that here."""
        self._phase = phase
        self._news.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.wake()
        self._attends.set()
        self._news.set()
        client = self._opened.result()
        self._ended.result()
        if client is not None:
            client.close()

    def _open(self) -> Client | None:
        try:
            deadline, encrypt = Deadline.after(_CONNECT_SECONDS), self._job.config.encrypt
            client = connect(self._job.driver_addresses, self._job.secret, deadline, encrypt=encrypt)
        except OSError:
            return None
        with self._lock:
            self._client = client
            if self._closed:
                client.wake()
        self._say(client)
        return client

    def _watch(self) -> None:
        client = self._opened.result()
        if client is None:
            return
        forever = Deadline(math.inf)  # a driver that is stopped for a while may go on with the job
        try:
            client.set_ack_timeout(_SILENT_SECONDS)
            while True:  # another thread may wait for an answer over this line
                if self._news.wait(_BEAT_SECONDS):
                    self._news.clear()
                    self._say(client)
                client.ask(Flush(), forever)
        except OSError as error:
            self._attends.wait()
            if is_host_unreachable(error) and self._events is not None:
                self._events.put(ServerLost(f"this host cannot reach the driver's host any more ({error})"))

    def _say(self, client: Client) -> None:
        message = TaskStatus(self._place.index, self._rank, self._place.host, self._place.attempt, self._phase)
        try:
            client.send(message, Deadline.after(_SEND_SECONDS))
        except OSError:
            return  # whoever reads from the line next is told
