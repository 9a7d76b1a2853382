"""The worker process of a task, its private socket and its exit."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from sparkhvd.config import SCRATCH, changed_environment
from sparkhvd.task.worker.import_path import IMPORT_PATH, import_path
from sparkhvd.task.worker.output import OutputPump, RankLog
from sparkhvd.task.worker.scratch import make_scratch, remove_scratch

# After the end of a process group: how long a process that left the group may still write to its pipes.
OUTPUT_SECONDS = 2.0


@dataclass(frozen=True)
class Exited:
    """The worker process ended.

    Attributes:
        returncode: negative numbers are signals, as in ``subprocess``.
        by_launcher: whether the program that started the ranks ended it, because something else had failed.
    """

    returncode: int
    by_launcher: bool = False


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
        process: its end.
        control: our end of its private socket.
        stdout: read end of its stdout.
        stderr: read end of its stderr.
        scratch: a folder to remove when the process has ended.
    """

    process: ProcessEnd
    control: socket.socket
    stdout: int
    stderr: int
    scratch: str | None = None


class ChildProcess:
    """The end of a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def wait(self) -> Exited:
        # WNOWAIT leaves a zombie behind that keeps the number of the process group ours until release().
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        killed = status is not None and status.si_code != os.CLD_EXITED
        code = 0 if status is None else status.si_status
        return Exited(-code if killed else code)

    def release(self) -> None:
        self._process.wait()


def spawn_worker(
    env: Mapping[str, str | None],
    env_defaults: Mapping[str, str],
    preload: Sequence[str],
    executable: str = "",
) -> Spawned:
    """Start ``python -m sparkhvd.task.worker.main`` in a session and process group of its own.

    Args:
        env: changes to this process's environment; None removes a variable.
        env_defaults: hold where neither the environment nor ``env`` says anything.
        preload: modules that the worker imports first.
        executable: the Python to use; empty is the one that runs this.
    """
    own, other = socket.socketpair()
    scratch = make_scratch()
    with other:
        try:
            process = subprocess.Popen(
                [
                    *(executable or sys.executable, "-m", "sparkhvd.task.worker.main"),
                    *("--control-fd", str(other.fileno()), *preload),
                ],
                pass_fds=(other.fileno(),),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=changed_environment({IMPORT_PATH: import_path(executable), **env, SCRATCH: scratch}, env_defaults),
            )
        except BaseException:
            own.close()
            remove_scratch(scratch)
            raise
    stdout, stderr = process.stdout, process.stderr
    if stdout is None or stderr is None:
        raise ValueError("The worker was started without pipes.")
    with stdout, stderr:
        return Spawned(ChildProcess(process), own, os.dup(stdout.fileno()), os.dup(stderr.fileno()), scratch)


def spawn_or_substitute(
    env: Mapping[str, str | None],
    env_defaults: Mapping[str, str],
    preload: Sequence[str],
    executable: str = "",
) -> tuple[Spawned, str]:
    """Start a worker, or an idle substitute when the worker cannot start.

    A retry would fail in the same way, so the task reports the failure to the others instead of raising. For that it
    needs a process to supervise.

    Returns:
        The process, and why it is a substitute, to complete "Rank 1 on host X ..."; empty for the worker itself.

    Raises:
        OSError: this host cannot start any process.
    """
    try:
        return spawn_worker(env, env_defaults, preload, executable), ""
    except OSError as error:
        return spawn_worker({}, {}, ()), not_started(executable, str(error.strerror))


def not_started(executable: str, why: str) -> str:
    """Return that this host cannot execute the Python of its ranks, to complete "Rank 1 on host X ..."."""
    program = f"executable={executable!r}" if executable else f"the executor's own Python {sys.executable!r}"
    advice = ". Set executable to the path of a Python that every executor has" if executable else ""
    return f"did not start: {program} cannot be executed on this host: {why}{advice}"


class WorkerProcess:
    """One worker and the private socket to it.

    What it reports, and its end, arrive in ``events``. ``close`` ends the whole process group: nothing survives it.
    """

    def __init__(self, spawned: Spawned, log: RankLog) -> None:
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._process = spawned.process
        self._scratch = spawned.scratch
        self._closed = False
        self._socket = spawned.control
        self._connection = Connection(os.dup(spawned.control.fileno()))
        self.output = OutputPump(spawned.stdout, spawned.stderr, log)
        self._reader = threading.Thread(target=self._read, name="sparkhvd-worker-reports", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="sparkhvd-worker-exit", daemon=True)
        self._exited = threading.Event()
        self._reader.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Send to the worker; does nothing when it is gone (its exit is an event of its own)."""
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:
            return

    def terminate(self, grace_seconds: float) -> None:
        """SIGTERM to the process group, SIGKILL after ``grace_seconds``; what it left on the disk is removed."""
        if not self._exited.is_set():
            self._signal(signal.SIGTERM)
        self._exited.wait(grace_seconds)
        self._signal(signal.SIGKILL)
        remove_scratch(self._scratch)

    def wait_for_exit(self, seconds: float) -> bool:
        return self._exited.wait(seconds)

    def close(self, grace_seconds: float = 1.0) -> None:
        """End the process group, join the threads, close the files. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.terminate(grace_seconds)
        self._waiter.join()
        # A process that left the group may still hold the other end; this wakes the reader regardless.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._process.release()
        remove_scratch(self._scratch)  # again: now nobody is left who writes
        self.output.finish(OUTPUT_SECONDS)
        self._connection.close()
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                self.events.put(pickle.loads(self._connection.recv_bytes()))
            except (OSError, EOFError):
                return

    def _wait(self) -> None:
        exited = self._process.wait()
        # A report that was sent just before the exit comes first.
        self._signal(signal.SIGKILL)
        self._reader.join(1.0)
        self._exited.set()
        self.events.put(exited)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # no process is left
