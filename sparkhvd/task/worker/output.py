"""Forwards a worker's stdout and stderr to the driver, or to the task's stderr if the driver is unreachable."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sparkhvd.deadline import Deadline
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.messages import Flush, Message, Output, Started
from sparkhvd.task.job import Job
from sparkhvd.task.log_files import StoreOutput

logger = logging.getLogger(__name__)

# Longer lines are forwarded in pieces, so that a rank that never ends its line cannot fill the memory.
MAX_LINE_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_CONNECT_SECONDS = 10.0
# How long a busy driver may take to accept a piece. The rank waits meanwhile, so no output accumulates.
_SEND_SECONDS = 60.0
_TAIL_LINES = 40


class LineBuffer:
    r"""Splits a stream of bytes after complete lines.

    Text that a progress bar will overwrite (``"\r 10%\r 20%"``, or ``"10%\r20%\r"``) counts as a complete line, with
    its carriage return, as soon as the carriage return that overwrites it has arrived.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._rest = b""
        self._ended_with_return = False  # whether the last forwarded text ended with a carriage return
        self._max_line_bytes = max_line_bytes

    def add(self, piece: bytes) -> bytes | None:
        """Add a piece, and return the lines that are now complete, without the last newline; None if there are none."""
        self._rest += piece
        if self._ended_with_return and self._rest[:1] == b"\n":  # the carriage return has already ended that line
            self._rest = self._rest[1:]
        self._ended_with_return = self._ended_with_return and not self._rest
        newline = self._rest.rfind(b"\n")
        end = self._overwritten(newline + 1)
        if end:
            lines, self._rest = self._rest[:end], self._rest[end:]
        elif newline >= 0:
            lines, self._rest = self._rest[:newline], self._rest[newline + 1 :]
        elif len(self._rest) >= self._max_line_bytes:
            lines, self._rest = self._rest, b""
        else:
            return None
        self._ended_with_return = end > 0 and lines.endswith(b"\r")
        return lines

    def _overwritten(self, start: int) -> int:
        """Return the end of the part of the last line that a progress bar will overwrite; 0 without one."""
        last_line = self._rest[start:]
        if not last_line.strip(b"\r"):
            return 0
        end = len(last_line) if last_line.endswith(b"\r") else last_line.rfind(b"\r")
        return start + end if last_line[: max(end, 0)].strip(b"\r") else 0

    def flush(self) -> bytes | None:
        """Return the remaining text, which has no newline; None if there is none."""
        rest, self._rest = self._rest, b""
        return rest or None


class RankLog(Protocol):
    """A destination of one rank's output."""

    rank: int

    def started(self) -> None:
        """Report that all tasks of the job run and that their ranks are assigned."""

    def write(self, stream: str, content: bytes) -> None:
        """Write whole lines."""

    def close(self) -> None:
        """Wait until everything has been written."""


class HandlerLog:
    """A log that passes output to a handler in the same process."""

    def __init__(self, handle: Callable[[Message], object], num_proc: int) -> None:
        self._handle = handle
        self._num_proc = num_proc
        self.rank = -1

    def started(self) -> None:
        self._handle(Started(self._num_proc))

    def write(self, stream: str, content: bytes) -> None:
        self._handle(Output(self.rank, stream, content))

    def close(self) -> None:
        return


class DriverLog:
    """Sends output to the driver's log stream, over a connection that it opens on first use.

    If the driver is unreachable, all further output goes to this task's stderr. Output for the files of a Store is
    written to the Store directly, or to this task's stderr if the Store fails.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # Used only by the pump's thread, until close. It has both streams under the current and the previous rank.
        self._files = StoreOutput(_write_notice, self._write_here, most_writers=4)
        self._lock = threading.Lock()
        self._client: Client | None = None  # guarded by _lock
        self._unreachable = not job.driver_addresses  # guarded by _lock
        self.rank = -1

    def started(self) -> None:
        """Report to the driver that all tasks of the job run and that their ranks are assigned."""
        self._send(Started(self._job.num_proc))

    def write(self, stream: str, content: bytes) -> None:
        """Write whole lines."""
        destination = dict(self._job.log_files).get(stream)
        if destination is not None:
            self._files.write(destination, self.rank, stream, content)
        elif stream not in self._job.streamed or not self._send(Output(self.rank, stream, content)):
            self._write_here(self.rank, stream, content)

    def close(self) -> None:
        """Wait until the driver and the Store have all output, then disconnect."""
        self._files.close()
        with self._lock:
            client, self._client, self._unreachable = self._client, None, True
        if client is None:
            return
        try:
            client.ask(Flush(), Deadline.after(_SEND_SECONDS))
        except OSError as error:
            logger.warning("The driver did not confirm the last output of rank %d: %s", self.rank, error)
        finally:
            client.close()

    def _write_here(self, rank: int, stream: str, content: bytes) -> None:
        text = content.decode("utf-8", "replace")
        sys.stderr.writelines(f"[{rank}]<{stream}>:{line}\n" for line in text.split("\n"))

    def _send(self, message: Message) -> bool:
        with self._lock:
            if self._unreachable:
                return False
            try:
                if self._client is None:
                    self._client = connect(
                        self._job.driver_addresses,
                        self._job.secret,
                        Deadline.after(_CONNECT_SECONDS),
                        encrypt=self._job.config.encrypt,
                    )
                self._client.send(message, Deadline.after(_SEND_SECONDS))
            except OSError as error:
                self._unreachable = True
                if self._client is not None:
                    self._client.close()
                    self._client = None
                _write_notice(
                    f"the driver cannot be reached, so the output of rank {self.rank} is written here: {error}"
                )
                return False
            return True


def _write_notice(text: str) -> None:
    sys.stderr.write(f"sparkhvd: {text}\n")


class OutputPump:
    """A thread that reads a worker's stdout and stderr until they end or ``finish`` gives up on them.

    It owns the two file descriptors. Before ``start``, it reads nothing: a worker writes little until then, and the
    pipes hold it.
    """

    def __init__(self, stdout: int, stderr: int, log: RankLog) -> None:
        self._log = log
        self._streams = {stdout: "stdout", stderr: "stderr"}
        self._buffers = {stdout: LineBuffer(), stderr: LineBuffer()}
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._lost = False  # used only by the pump's thread
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="sparkhvd-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` for both streams to end; a process that outlives the worker may hold them open."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
            self._wake_sender.send(b"x")
            self._thread.join()
        for descriptor in self._streams:
            os.close(descriptor)
        self._wake_sender.close()
        self._wake_receiver.close()

    def add(self, stream: str, text: str) -> None:
        """Write a line of sparkhvd's own; call it after ``finish``."""
        self._log.write(stream, text.encode())

    def stderr_tail(self) -> str:
        """Return the last lines of stderr so far."""
        return "\n".join(list(self._tail))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for descriptor in self._streams:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            still_open = len(self._streams)
            while still_open:
                ready = [key.fd for key, _ in selector.select()]
                for descriptor in (ready_fd for ready_fd in ready if ready_fd in self._streams):
                    if not self._pass_on(descriptor):
                        selector.unregister(descriptor)
                        still_open -= 1
                if self._wake_receiver.fileno() in ready:
                    break
        for descriptor in self._streams:
            self._write(descriptor, self._buffers[descriptor].flush())

    def _pass_on(self, descriptor: int) -> bool:
        piece = os.read(descriptor, _READ_BYTES)
        self._write(descriptor, self._buffers[descriptor].add(piece))
        return bool(piece)

    def _write(self, descriptor: int, lines: bytes | None) -> None:
        if lines is None:
            return
        stream = self._streams[descriptor]
        if stream == "stderr":
            text = lines.decode("utf-8", "replace")
            for line in text.split("\n")[-_TAIL_LINES:]:
                if self._tail and "\r" in line and "\r" in self._tail[-1]:
                    self._tail.pop()  # a progress bar wrote over itself
                self._tail.append(line[:500])
        try:
            self._log.write(stream, lines)
        except Exception as error:
            if not self._lost:
                logger.warning("Output of rank %d is lost: %s", self._log.rank, error, exc_info=True)
            self._lost = True  # keep reading the pipes: a rank that cannot write would wait forever
