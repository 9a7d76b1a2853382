"""The key-value store through which the processes of a job find each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from sparkhvd import _core
from sparkhvd._util.closable import Closable
from sparkhvd._util.processes.forks import close_copies, close_in_children, keep_in_children
from sparkhvd.comm.failures import translated
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, NotInitializedError

# The time limit for requests that the server answers at once, without waiting for another process.
_RESPONSE_SECONDS = 10.0


class RendezvousServer(Closable):
    """Serves keys and values to holders of ``token``, from construction until ``close()``.

    Args:
        token: the job's secret. The server refuses a client that does not know the secret, before it parses anything.
        host: the local address to bind.
        port: the port to bind, 0 for any free one.
        encrypt: whether to encrypt all traffic; clients adapt to the server.

    Raises:
        CollectiveError: the address cannot be bound, or OpenSSL is missing.
    """

    def __init__(self, token: bytes, host: str = "127.0.0.1", port: int = 0, *, encrypt: bool = False) -> None:
        with translated():
            self._core: _core.RendezvousServer | None = _core.RendezvousServer(token, host, port, encrypt)
        self._address, self._port = host, self._core.port
        close_in_children(self)

    @property
    def port(self) -> int:
        """Return the port that clients connect to."""
        return self._port

    @property
    def requests(self) -> int:
        """Return the number of requests that clients have sent. A renewed wait for a key is not a new request."""
        return self._open().requests

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` and wake all threads and clients that wait for ``key``."""
        with translated():
            self._open().set(key, value)

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Return the value of ``key``, waiting until it is set.

        Raises:
            DeadlineExceededError: the key was not set in time.
        """
        with translated():
            return self._open().get(key, deadline.remaining())

    def erase(self, prefix: str) -> int:
        """Delete all keys that begin with ``prefix``, and return their number. Nothing may wait for these keys."""
        with translated():
            return self._open().erase(prefix)

    def close(self) -> None:
        """Stop serving; waiting clients get an error. Closing twice is fine."""
        server, self._core = self._core, None  # the core's object frees its last descriptor when it is dropped
        if server is not None:
            with translated():
                server.close()
            keep_in_children(self)

    def leave_to_parent(self) -> None:
        """Close a forked child's copies of the connections."""
        close_copies(self._address, self._port)

    def _open(self) -> _core.RendezvousServer:
        if self._core is None:
            raise NotInitializedError("This rendezvous server is closed; start a new one.")
        return self._core


class RendezvousClient(Closable):
    """Connection to a ``RendezvousServer``; several threads may use it at once.

    Args:
        addresses: the addresses of the server, tried in order.
        token: the job's secret; the server must know it too.
        deadline: the end of all attempts to connect.
        encrypt: whether to refuse a server that does not encrypt.

    Raises:
        AuthenticationError: the other side does not know the secret, or does not encrypt.
        CollectiveError: no address answers.
        DeadlineExceededError: none answered in time.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], token: bytes, deadline: Deadline, *, encrypt: bool = False
    ) -> None:
        with translated():
            self.core = _core.RendezvousClient(list(addresses), token, deadline.remaining(), encrypt)

    def set(self, key: str, value: bytes, deadline: Deadline) -> None:
        """Store ``value`` and wake all threads and clients that wait for ``key``."""
        with translated():
            self.core.set(key, value, deadline.remaining())

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Return the value of ``key``, waiting until it is set.

        Raises:
            DeadlineExceededError: the key was not set in time.
            PeerLostError: the server has ended.
        """
        with translated():
            return self.core.get(key, deadline.remaining())

    def get_all(self, prefix: str, numbers: range, deadline: Deadline) -> list[bytes]:
        """Return the values of the keys ``prefix`` + number, waiting until all are set; one request.

        Raises:
            DeadlineExceededError: not all of them were set in time.
            PeerLostError: the server has ended.
        """
        with translated():
            return self.core.get_all(prefix, numbers.start, numbers.stop, deadline.remaining())

    def missing(self, prefix: str, numbers: range) -> list[int]:
        """Return the numbers whose keys ``prefix`` + number are not set now; one request.

        Raises:
            DeadlineExceededError: the server does not respond.
            PeerLostError: the server has ended.
        """
        with translated():
            return self.core.missing(prefix, numbers.start, numbers.stop, _RESPONSE_SECONDS)

    def get_present(self, prefix: str, numbers: range, deadline: Deadline | None = None) -> dict[int, bytes]:
        """Return the values of the keys ``prefix`` + number that are set, by number.

        If all keys are set within the deadline, this takes one request. Otherwise, another request finds the missing
        keys, and each run of consecutive numbers between them takes one more. If the server does not respond in time,
        the result lacks the remaining values.

        Args:
            prefix: the keys without their numbers.
            numbers: consecutive numbers.
            deadline: how long to wait for all keys; None does not wait.

        Raises:
            PeerLostError: the server has ended.
        """
        if deadline is not None:
            with suppress(DeadlineExceededError):
                return dict(zip(numbers, self.get_all(prefix, numbers, deadline), strict=True))
        values: dict[int, bytes] = {}
        with suppress(DeadlineExceededError):  # the server or its host is overloaded
            first = numbers.start
            for missing in (*self.missing(prefix, numbers), numbers.stop):
                run, first = range(first, missing), missing + 1
                if run:
                    values.update(zip(run, self.get_all(prefix, run, Deadline.after(_RESPONSE_SECONDS)), strict=True))
        return values

    def close(self) -> None:
        """Disconnect from the server. Closing twice is fine."""
        with translated():
            self.core.close()
