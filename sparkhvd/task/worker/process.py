"""The worker process of a task, its private socket and its exit."""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from sparkhvd.config import SCRATCH, changed_environment
from sparkhvd.task.worker.exit import Exited, kill_session, wait_for_child
from sparkhvd.task.worker.import_path import IMPORT_PATH, import_path, python_module
from sparkhvd.task.worker.output import OutputPump, RankLog
from sparkhvd.task.worker.scratch import make_scratch, remove_scratch
from sparkhvd.task.worker.template import ForkedProcess, Offer, Origin, Templates

# How long a process that left the worker's session may still write to the pipes after the end of the session.
OUTPUT_SECONDS = 2.0


class ProcessEnd(Protocol):
    """The process of a worker, which leads a process group of its own."""

    pid: int

    def wait(self) -> Exited:
        """Block until the process has ended, and keep its process id reserved."""

    def release(self) -> None:
        """Release the process id of the ended process."""


@dataclass(frozen=True)
class Spawned:
    """A worker process that was just started. Its owner closes ``control`` and the two descriptors.

    Attributes:
        process: the process.
        control: this process's end of the worker's private socket.
        stdout: the read end of the worker's stdout.
        stderr: the read end of the worker's stderr.
        scratch: a folder to remove when the worker has ended.
    """

    process: ProcessEnd
    control: socket.socket
    stdout: int
    stderr: int
    scratch: str | None = None


class ChildProcess:
    """A worker that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def wait(self) -> Exited:
        return Exited(wait_for_child(self.pid))

    def release(self) -> None:
        self._process.wait()


TEMPLATES = Templates()
atexit.register(TEMPLATES.close)


def spawn_worker(
    env: Mapping[str, str | None],
    env_defaults: Mapping[str, str],
    preload: Sequence[str],
    executable: str = "",
    warm_seconds: float = 0.0,
) -> Spawned:
    """Start ``python -m sparkhvd.task.worker.main`` in a session and process group of its own.

    Args:
        env: changes to this process's environment; None removes a variable.
        env_defaults: variables that apply unless the environment or ``env`` sets them.
        preload: modules that the worker imports first.
        executable: the Python to use; empty is the Python of this process.
        warm_seconds: how long an idle template waits for the next job; 0 uses and starts none.
    """
    path = import_path(executable, env.get(IMPORT_PATH))
    environment = changed_environment({**env, IMPORT_PATH: path}, env_defaults)
    command = (*python_module(executable, "sparkhvd.task.worker.main"), *preload)
    if warm_seconds <= 0:
        return _start_worker(command, environment)
    forked = _fork_worker(Origin.of(command, environment))
    if isinstance(forked, Spawned):
        return forked
    if forked is None:
        return _start_worker(command, environment)
    with closing(forked) as offer:
        template = ("--template-fds", *map(str, offer.descriptors), "--warm-seconds", str(warm_seconds))
        return _start_worker((*command, *template), environment, offer.descriptors)


def _fork_worker(origin: Origin) -> Spawned | Offer | None:
    """Fork a worker; see ``Templates.fork``."""
    with _channels() as channels:
        forked = TEMPLATES.fork(origin, channels.worker_ends)
        return channels.spawned(forked, forked.scratch) if isinstance(forked, ForkedProcess) else forked


def _start_worker(command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> Spawned:
    """Start a worker that inherits the descriptors."""
    scratch = make_scratch()
    variables = {name: value for name, value in environment.items() if name != SCRATCH}
    if scratch is not None:
        variables[SCRATCH] = scratch
    try:
        with _channels() as channels:
            control, stdout, stderr = channels.worker_ends
            process = subprocess.Popen(
                [*command, "--control-fd", str(control)],
                pass_fds=(*descriptors, control),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=variables,
            )
            return channels.spawned(ChildProcess(process), scratch)
    except BaseException:
        remove_scratch(scratch)
        raise


@dataclass(frozen=True)
class _Channels:
    """The private socket and the output pipes of a worker that is about to start.

    Attributes:
        own_ends: descriptors of this process's ends of the socket, stdout and stderr.
        worker_ends: descriptors of the worker's ends.
    """

    own_ends: tuple[int, int, int]
    worker_ends: tuple[int, int, int]

    def spawned(self, process: ProcessEnd, scratch: str | None) -> Spawned:
        control, stdout, stderr = map(os.dup, self.own_ends)
        return Spawned(process, socket.socket(fileno=control), stdout, stderr, scratch)


@contextmanager
def _channels() -> Iterator[_Channels]:
    """Open the channels of a worker; leaving ``with`` closes them, but not the duplicates that ``spawned`` made."""
    with ExitStack() as stack:

        def closed_with_stack(ends: tuple[int, int]) -> tuple[int, int]:
            for end in ends:
                stack.callback(os.close, end)
            return ends

        own_socket, worker_socket = socket.socketpair()
        control = closed_with_stack((own_socket.detach(), worker_socket.detach()))
        stdout, stderr = closed_with_stack(os.pipe()), closed_with_stack(os.pipe())
        yield _Channels((control[0], stdout[0], stderr[0]), (control[1], stdout[1], stderr[1]))


def spawn_or_substitute(
    env: Mapping[str, str | None],
    env_defaults: Mapping[str, str],
    preload: Sequence[str],
    executable: str = "",
    warm_seconds: float = 0.0,
) -> tuple[Spawned, str]:
    """Start a worker, or a substitute that stays idle when the worker cannot start.

    A retry would fail in the same way, so the task does not raise an error but reports the failure to the other tasks.
    The report needs a process to supervise.

    Returns:
        The process, and why it is a substitute, to complete "Rank 1 on host X ..."; empty for the worker itself.

    Raises:
        OSError: this host cannot start any process.
    """
    try:
        return spawn_worker(env, env_defaults, preload, executable, warm_seconds), ""
    except OSError as error:
        return spawn_worker({}, {}, ()), not_started(executable, str(error.strerror))


def not_started(executable: str, why: str) -> str:
    """Return a message that this host cannot execute the ranks' Python, to complete "Rank 1 on host X ..."."""
    program = f"executable={executable!r}" if executable else f"the executor's own Python {sys.executable!r}"
    advice = ". Set executable to the path of a Python that every executor has" if executable else ""
    return f"did not start: {program} cannot be executed on this host: {why}{advice}"


class WorkerProcess:
    """One worker and the private socket to it.

    The worker's reports and its exit arrive in ``events``. ``close`` ends the whole session.
    """

    def __init__(self, spawned: Spawned, log: RankLog) -> None:
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._process = spawned.process
        self._scratch = spawned.scratch
        self._closed = False
        self._socket = spawned.control
        self._connection = Connection(os.dup(spawned.control.fileno()))
        self.output = OutputPump(spawned.stdout, spawned.stderr, log)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="sparkhvd-worker-reports", daemon=True)
        self._writer = threading.Thread(target=self._write, name="sparkhvd-worker-messages", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="sparkhvd-worker-exit", daemon=True)
        self._exited = threading.Event()
        self._reader.start()
        self._writer.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Queue a message for the worker, and return at once. If the worker has ended, the message is lost."""
        self._outbox.put(pickle.dumps(message))

    def terminate(self, grace_seconds: float) -> None:
        """Send SIGTERM to the group, after ``grace_seconds`` SIGKILL to the session; then remove the scratch folder."""
        if not self._exited.is_set():
            self._signal(signal.SIGTERM)
        if not self._exited.wait(grace_seconds):
            self._kill()
        remove_scratch(self._scratch)

    def wait_for_exit(self, seconds: float) -> bool:
        return self._exited.wait(seconds)

    def close(self, grace_seconds: float = 1.0) -> None:
        """End the session, join the threads, close the files. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.terminate(grace_seconds)
        self._waiter.join()
        # A process that left the session may still hold the other end; this wakes the reader and the writer regardless.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._outbox.put(None)
        self._reader.join()
        self._writer.join()
        self._process.release()
        remove_scratch(self._scratch)  # again: no process writes to it any more
        self.output.finish(OUTPUT_SECONDS)
        self._connection.close()
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                self.events.put(pickle.loads(self._connection.recv_bytes()))
            except (OSError, EOFError):
                return

    def _write(self) -> None:
        # A spec may be large. If the worker hangs before it reads the spec, this write blocks until ``close``.
        with suppress(OSError):  # the worker has ended, which is a separate event
            while (content := self._outbox.get()) is not None:
                self._connection.send_bytes(content)

    def _wait(self) -> None:
        exited = self._process.wait()
        # Wait for a report that was sent just before the exit, so that it comes first.
        self._kill()
        self._reader.join(1.0)
        self._exited.set()
        self.events.put(exited)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        kill_session(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # no process is left
