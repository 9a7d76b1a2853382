"""The watch over a generation: receives the driver's request to leave it, and its report of a lost member."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparkhvd._util.closable import Closable
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, SparkHvdError

# The longest that the thread delays the exit of a process that did not call shutdown().
_POLL_SECONDS = 0.5


class GenerationWatch(Closable):
    """Waits for the driver's notice and for its report of a loss, in a thread from construction to ``close()``.

    So a training step reads an attribute instead of asking the driver. The driver often knows of a loss first: links to
    a host that is cut off look idle for a long time.

    Args:
        client: a connection to the membership server; the watch closes it.
        notice: the key that the driver sets when the members should leave the generation, also after a loss.
        loss: where the driver reports the first loss of the generation, before it sets ``notice``.
        abort: called once with the report, from the thread; must affect only this generation.
    """

    def __init__(self, client: RendezvousClient, notice: str, loss: str, abort: Callable[[str], None]) -> None:
        self._client = client
        self._notice = notice
        self._loss = loss
        self._abort = abort
        self._is_notified = False  # the thread sets this field and the next one, once
        self._error: SparkHvdError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkhvd-generation-watch")
        self._thread.start()

    @property
    def is_notified(self) -> bool:
        """Return whether the driver has asked the members to leave the generation.

        Raises:
            SparkHvdError: the connection to the driver has ended.
        """
        if self._error is not None:
            raise self._error
        return self._is_notified

    def close(self) -> None:
        """End the thread, even while it calls ``abort``, and disconnect. Closing twice is fine."""
        self._closing.set()
        self._client.close()
        self._thread.join()

    def leave_to_parent(self) -> None:
        """Close a forked child's copy of the connection."""
        self._client.close()

    def _run(self) -> None:
        try:
            if self._await(self._notice) is None:
                return
            self._is_notified = True
            why = self._await(self._loss)
        except SparkHvdError as error:  # closed, or the driver has ended, and its workers end with it
            self._error = error
            return
        if why is not None and not self._closing.is_set():
            self._abort(why.decode())

    def _await(self, key: str) -> bytes | None:
        """Return the value of a key once it is set; None at the end of the watch or of the main thread."""
        # The interpreter waits for this thread at exit, so it ends once the main thread has ended.
        while not self._closing.is_set() and threading.main_thread().is_alive():
            try:
                return self._client.get(key, Deadline.after(_POLL_SECONDS))
            except DeadlineExceededError:
                continue
        return None
