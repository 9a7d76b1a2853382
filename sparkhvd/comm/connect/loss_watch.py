"""The watch over a generation: ends its collectives once the driver reports that it has lost a member."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparkhvd._util.closable import Closable
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, SparkHvdError

# The longest that the thread delays the exit of a process that did not call shutdown().
_POLL_SECONDS = 0.5


class LossWatch(Closable):
    """Waits for the report of a loss, in a thread from construction to ``close()``.

    The driver often knows first: links to a host that is cut off look idle for a long time.

    Args:
        client: a connection to the membership server; the watch closes it.
        key: where the driver reports the first loss of the generation.
        abort: called once with the report, from the thread; must affect only this generation.
    """

    def __init__(self, client: RendezvousClient, key: str, abort: Callable[[str], None]) -> None:
        self._client = client
        self._key = key
        self._abort = abort
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkhvd-loss-watch")
        self._thread.start()

    def close(self) -> None:
        """End the thread, even while it calls ``abort``, and disconnect. Closing twice is fine."""
        self._closing.set()
        self._client.close()
        self._thread.join()

    def leave_to_parent(self) -> None:
        """Close a forked child's copy of the connection."""
        self._client.close()

    def _run(self) -> None:
        # The interpreter waits for this thread at exit, so it ends once the main thread has ended.
        while not self._closing.is_set() and threading.main_thread().is_alive():
            try:
                why = self._client.get(self._key, Deadline.after(_POLL_SECONDS))
            except DeadlineExceededError:
                continue
            except SparkHvdError:
                return  # closed, or the driver has ended, and its workers end with it
            if not self._closing.is_set():
                self._abort(why.decode())
            return
