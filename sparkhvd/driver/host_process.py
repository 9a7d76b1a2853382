"""A host's process, started through ssh (or directly, on this machine), as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from sparkhvd._util.addresses import is_loopback
from sparkhvd.deadline import Deadline
from sparkhvd.task.failure_report import describe_exit
from sparkhvd.task.host.messages import MARKER
from sparkhvd.task.worker.import_path import IMPORT_PATH, import_path

_MODULE = "sparkhvd.task.host.main"
_TAIL_LINES = 30
_NOISE_BYTES = 1 << 20
_END_SECONDS = 8.0


@dataclass(frozen=True)
class SshOptions:
    """How to reach the hosts; None leaves it to ssh's own configuration."""

    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class Gone:
    """A host's process has ended; ``why`` says how, and what it wrote last."""

    why: str


def host_command(host: str, executable: str, options: SshOptions) -> list[str]:
    """The command that starts our process on a host. No secret and no user's variable is in it."""
    own = ["env", f"{IMPORT_PATH}={import_path(executable)}", executable or sys.executable, "-m", _MODULE]
    if is_loopback(host) or host == socket.gethostname():
        return own
    port = [] if options.port is None else ["-p", str(options.port)]
    identity = [] if options.identity_file is None else ["-i", options.identity_file]
    # Nobody is there to type a password, and a host that was cut off is to be noticed.
    alive = ["-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"]
    return ["ssh", "-T", "-o", "BatchMode=yes", *alive, *port, *identity, host, shlex.join(own)]


class HostProcess:
    """The connection to one host. What it says arrives in ``inbox`` as ``(number, message)``, last of all ``Gone``."""

    def __init__(self, number: int, command: Sequence[str], inbox: queue.SimpleQueue[tuple[int, object]]) -> None:
        self._number = number
        self._inbox = inbox
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._answered = False  # written by the thread that reads
        self._patience: Deadline | None = None
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C ends it through us
        )
        self._output = Connection(os.dup(self._fileno(self._process.stdin)), readable=False)
        if self._process.stdin is not None:
            self._process.stdin.close()  # so that the one that is left tells the host of the end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._read, "sparkhvd-host"),
                (self._read_stderr, "sparkhvd-host-stderr"),
                (self._write, "sparkhvd-host-stdin"),
            )
        ]
        for thread in reversed(self._threads):  # the first joins the second
            thread.start()

    def send(self, message: object) -> None:
        """Send to the host, without waiting for it to read; nothing when it is gone, which is a message of its own."""
        self._outbox.put(pickle.dumps(message))

    def hang_up(self) -> None:
        """End the host's ranks, without waiting for that."""
        self._outbox.put(None)
        # Where nobody has answered there are none.
        self._patience = self._patience or Deadline.after(_END_SECONDS if self._answered else 0.0)

    def close(self) -> None:
        """Hang up, and wait for the end."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self._patience is None else self._patience.remaining())
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        descriptor = self._fileno(self._process.stdout)
        if _skip_noise(descriptor):
            self._answered = True
            connection = Connection(os.dup(descriptor), writable=False)
            try:
                while True:
                    self._inbox.put((self._number, pickle.loads(connection.recv_bytes())))
            except (EOFError, OSError):
                connection.close()
        code = self._process.wait()
        self._threads[1].join(1.0)
        said = "".join(list(self._tail)).strip()
        self._inbox.put((self._number, Gone(f"its process {describe_exit(code)}. It says: {said or 'nothing'}")))

    def _write(self) -> None:
        # A host that does not read lets go of this thread when its process is ended.
        with contextlib.suppress(OSError), contextlib.closing(self._output):
            while (content := self._outbox.get()) is not None:
                self._output.send_bytes(content)

    def _read_stderr(self) -> None:
        stream = self._process.stderr
        if stream is not None:
            for line in stream:
                self._tail.append(line.decode("utf-8", "replace"))

    @staticmethod
    def _fileno(stream: object) -> int:
        fileno = getattr(stream, "fileno", None)
        if fileno is None:
            raise ValueError("The process was started without pipes.")
        return int(fileno())


def _skip_noise(descriptor: int) -> bool:
    """Read up to and with the marker; false when it does not come."""
    seen = b""
    while not seen.endswith(MARKER):
        piece = os.read(descriptor, 1)
        if not piece or len(seen) > _NOISE_BYTES:
            return False
        seen += piece
    return True
