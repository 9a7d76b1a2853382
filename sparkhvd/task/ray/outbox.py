"""The messages of an actor that wait for the driver to fetch them."""

from __future__ import annotations

import threading
from collections import deque

from sparkhvd.deadline import Deadline
from sparkhvd.rpc.messages import Output

# A rank that writes faster than the driver reads waits, so that its output cannot fill the memory.
_MAX_BYTES = 8 * 1024 * 1024


class Outbox:
    """A queue of messages with a limit for the bytes of output in it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[object] = deque()  # guarded by _changed
        self._bytes = 0  # guarded by _changed
        self._closed = False  # guarded by _changed

    def put(self, message: object) -> None:
        """Add a message; wait until there is room for output, unless the outbox is closed."""
        with self._changed:
            if isinstance(message, Output):
                # The driver fetches messages for as long as this process lives, and closes the outbox at the end.
                self._changed.wait_for(lambda: self._bytes < _MAX_BYTES or self._closed)
                self._bytes += len(message.content)
            self._messages.append(message)
            self._changed.notify_all()

    def take(self, deadline: Deadline) -> list[object]:
        """Return all messages; wait for the first until the deadline or the end of the outbox."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed, deadline.remaining())
            messages = list(self._messages)
            self._messages.clear()
            self._bytes = 0
            self._changed.notify_all()
            return messages

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
