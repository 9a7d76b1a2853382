"""Warm starts: a process that has imported the frameworks stays behind and forks the workers of later jobs.

The first worker splits it off right after its imports and before any code of the user, so that a template costs no
import of its own. The process that starts the workers holds the only socket to the template, which ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from sparkhvd.config import SCRATCH, export
from sparkhvd.deadline import Deadline
from sparkhvd.task.worker.exit import Exited, wait_for_child

logger = logging.getLogger(__name__)

TEMPLATE_NAME = "sparkhvd-warm"  # in the output of ps and top
_COMMAND_NAME = Path("/proc/self/comm")
_NUMBER = struct.Struct("!q")
_READY = b"ready"
_FORK_SECONDS = 5.0
# The longest that workers wait for the imports of the one that splits the template off.
_SPLIT_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_LONGEST_REQUEST = 8192
# Each holds the memory of its imports: as many as there are frameworks with an estimator.
_MOST_TEMPLATES = 3
# Threads of Arrow's allocator, which starts them again after a fork.
_RESTARTED_THREADS = frozenset({"jemalloc_bg_thd"})


@dataclass(frozen=True)
class Origin:
    """What determines the state of a worker after its imports. Only workers of equal origins share a template.

    Attributes:
        owner: the id of the process that starts them.
        command: Python and the modules to import.
        environment: all variables but that of the scratch folder.
        folder: the current folder.
    """

    owner: int
    command: tuple[str, ...]
    environment: frozenset[tuple[str, str]]
    folder: str

    @classmethod
    def of(cls, command: Sequence[str], environment: Mapping[str, str]) -> Origin:
        variables = frozenset((name, value) for name, value in environment.items() if name != SCRATCH)
        return cls(os.getpid(), tuple(command), variables, str(Path.cwd()))


class ForkedProcess:
    """The end of a worker that a template forked; the worker's parent reports it."""

    def __init__(self, pid: int, parent: socket.socket) -> None:
        self.pid = pid
        self._parent = parent

    def wait(self) -> Exited:
        returncode = _receive_number(self._parent)
        return Exited(-signal.SIGKILL if returncode is None else returncode)  # None: the parent was killed

    def release(self) -> None:
        with self._parent, contextlib.suppress(OSError):
            self._parent.settimeout(_FORK_SECONDS)
            self._parent.shutdown(socket.SHUT_WR)
            self._parent.recv(1)  # returns when the worker's parent has released the id


@dataclass
class _Template:
    """The link to a template, and whether it has split off and serves requests."""

    link: socket.socket
    ready: bool = False

    def has_ended(self) -> bool:
        """Read what came from the template: that it is ready, then its end."""
        try:
            while self.link.recv(len(_READY)):
                self.ready = True
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def await_news(self, deadline: Deadline) -> None:
        """Return when something came from the template, at the deadline, or soon after the link was closed."""
        news: list[socket.socket] = []
        while not news and not deadline.expired():
            try:
                news, _, _ = select.select([self.link], [], [], deadline.capped(_LOOK_SECONDS).remaining())
            except (OSError, ValueError):  # another thread has closed it
                return


class Templates:
    """The templates of this process, one per origin: those of the origins that were last used.

    Jobs of different frameworks, and functions between fits, alternate without losing each other's template.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_origin: dict[Origin, _Template] = {}  # in the order of their last use
        self._failed: set[int] = set()  # hashes of origins whose last template ended before it was ready

    @property
    def links(self) -> list[socket.socket]:
        """The sockets to the templates."""
        with self._lock:
            return [template.link for template in self._by_origin.values()]

    def fork(self, origin: Origin, descriptors: Sequence[int], scratch: str | None) -> ForkedProcess | None:
        """Fork a worker from the template.

        If another worker is about to split it off, wait for that: it takes as long as this worker's own imports would,
        but no processor time and little memory. After a failure, the next workers of the origin do not wait.

        Args:
            origin: the worker's.
            descriptors: its private socket, its stdout and its stderr.
            scratch: its scratch folder.

        Returns:
            The worker; None if no template of this origin is ready. A worker that came too late finds its private
            socket closed, once the caller has closed the descriptors, and ends.
        """
        with self._lock:
            template = self._living(origin)
            waits = template is not None and not template.ready and hash(origin) not in self._failed
        if template is not None and waits:
            template.await_news(Deadline.after(_SPLIT_SECONDS))
        with self._lock:
            template = self._living(origin)
            if template is None or not template.ready:
                return None
            own, other = socket.socketpair()
            own.settimeout(_FORK_SECONDS)
            with other, contextlib.suppress(OSError):
                socket.send_fds(template.link, [pickle.dumps(scratch)], [*descriptors, other.fileno()])
            if (pid := _receive_number(own)) is None:
                own.close()
                self._drop(origin)
                return None
            own.settimeout(None)
            return ForkedProcess(pid, own)

    def offer(self, origin: Origin) -> socket.socket | None:
        """Return the template's end of a new link, for a worker of this origin to split the template off with.

        Returns:
            None if the template of this origin exists, or another worker is about to split it off.
        """
        with self._lock:
            if self._living(origin) is not None:
                return None
            while len(self._by_origin) >= _MOST_TEMPLATES:
                self._drop(next(iter(self._by_origin)))
            own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            own.setblocking(False)
            self._by_origin[origin] = _Template(own)
            return other

    def close(self) -> None:
        """End the templates; the workers that they forked go on."""
        with self._lock:
            for origin in list(self._by_origin):
                self._drop(origin)

    def _living(self, origin: Origin) -> _Template | None:
        """Return the template of an origin, which is then the last used one; those that have ended are dropped."""
        for other, template in list(self._by_origin.items()):
            has_ended = template.has_ended()
            if template.ready:
                self._failed.discard(hash(other))
            elif has_ended:
                self._failed.add(hash(other))
            if has_ended:
                self._drop(other)
        if (found := self._by_origin.pop(origin, None)) is not None:
            self._by_origin[origin] = found
        return found

    def _drop(self, origin: Origin) -> None:
        self._by_origin.pop(origin).link.close()


def split_off_template(
    link: socket.socket, idle_seconds: float, control: Connection, known_threads: frozenset[int]
) -> int | None:
    """Fork the template, which serves ``link`` until the link closes or is idle for too long.

    Call it in the main thread. A fork copies no other thread, so nothing is forked where an import has started threads,
    which its library would miss.

    Args:
        link: the template's end of the link; closed here.
        idle_seconds: how long the template waits for the next request.
        control: this worker's private socket, which the template closes.
        known_threads: those from before the imports: the one that reads ``control``, and those of NumPy's BLAS, which
            starts its own again.

    Returns:
        None in this process; in every worker that the template forks, the descriptor of its private socket.
    """
    with link:
        if native_threads() - known_threads:
            logger.debug("No warm start: an import has started threads, which a fork would end.")
            return None
        waiting, leaving = os.pipe()
        if os.fork() != 0:
            os.close(leaving)
            # The end of this worker's process group must not end the template, and a job that follows must find it.
            select.select([waiting], [], [], _FORK_SECONDS)
            os.close(waiting)
            return None
        try:
            os.close(waiting)
            os.setsid()  # it outlives the process group of this worker
            link.sendall(_READY)
            os.close(leaving)
            own_name = _COMMAND_NAME.read_text()
            _COMMAND_NAME.write_text(TEMPLATE_NAME)
            control.close()
            nowhere = os.open(os.devnull, os.O_RDWR)
            _redirect(nowhere, nowhere)
            return _serve(link, idle_seconds, own_name)
        except BaseException:  # noqa: BLE001 - a process that nobody supervises must not run what follows
            os._exit(1)


def _serve(link: socket.socket, idle_seconds: float, name: str) -> int:
    """Fork a worker for every request; return only in a worker."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of the workers
    link.settimeout(idle_seconds)
    while True:
        try:
            request, descriptors, _, _ = socket.recv_fds(link, _LONGEST_REQUEST, 4)
        except TimeoutError:
            os._exit(0)
        if not request:
            os._exit(0)
        # A process of its own waits for the worker, so that the template may end first.
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _COMMAND_NAME.write_text(name)
            link.close()
            control, stdout, stderr, report = descriptors
            if (pid := os.fork()) != 0:
                _report_end(pid, socket.socket(fileno=report), (control, stdout, stderr))
            os.close(report)
            _become_worker(stdout, stderr, pickle.loads(request))
            return control
        for descriptor in descriptors:
            os.close(descriptor)


def _report_end(pid: int, report: socket.socket, of_worker: Sequence[int]) -> NoReturn:
    """Send the id of the worker, then its ``returncode``; keep the id reserved until the link closes."""
    for descriptor in of_worker:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the process that started the worker is gone
        report.sendall(_NUMBER.pack(pid))
        report.sendall(_NUMBER.pack(wait_for_child(pid)))
        report.recv(1)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    os._exit(0)


def _become_worker(stdout: int, stderr: int, scratch: str | None) -> None:
    """Make the state of this process that of a newly started one."""
    os.setsid()
    _redirect(stdout, stderr)
    export({SCRATCH: scratch})
    importlib.invalidate_caches()
    if (numpy := sys.modules.get("numpy")) is not None:  # ``random`` does it by itself
        numpy.random.seed()


def _redirect(stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in {stdout, stderr}:
        os.close(descriptor)


def _receive_number(link: socket.socket) -> int | None:
    try:
        received = link.recv(_NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_NUMBER.unpack(received)[0]) if len(received) == _NUMBER.size else None


def native_threads() -> frozenset[int]:
    """Return the ids of this process's threads, but for those that a library starts again after a fork."""
    folders = Path("/proc/self/task").iterdir()
    return frozenset(
        int(folder.name) for folder in folders if (folder / "comm").read_text().strip() not in _RESTARTED_THREADS
    )
