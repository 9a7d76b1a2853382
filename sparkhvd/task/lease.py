"""The lease of a task: its ranks live no longer than the driver's host answers."""

from __future__ import annotations

import queue
import threading

from sparkhvd.deadline import Deadline
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.frames import is_cut_off
from sparkhvd.task.job import Job
from sparkhvd.task.supervise import ServerLost

_CONNECT_SECONDS = 10.0


class DriverLease:
    """A silent connection; ``events`` gets ``ServerLost`` when the driver's host is cut off from this one.

    The driver gives up a host that does not answer at the same time. Where the driver cannot be reached in the first
    place there is no lease: Spark needs none of its own connections to run from here.

    Args:
        job: says where the driver is.
        events: those of the worker.
    """

    def __init__(self, job: Job, events: queue.SimpleQueue[object]) -> None:
        self._job = job
        self._events = events
        self._lock = threading.Lock()
        self._client: Client | None = None  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._thread = threading.Thread(target=self._watch, name="sparkhvd-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.wake()
        self._thread.join()

    def _watch(self) -> None:
        try:
            client = connect(self._job.log_addresses, self._job.log_secret, Deadline.after(_CONNECT_SECONDS))
        except OSError:
            return
        with self._lock:
            self._client = client
            if self._closed:
                client.wake()
        try:
            client.wait_for_end()
        except OSError as error:
            if is_cut_off(error):
                self._events.put(ServerLost(f"this host is cut off from that of the driver ({error})"))
        finally:
            client.close()
