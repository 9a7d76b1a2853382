"""The process that a launcher starts on a host: through ssh, through Slurm, or directly if the host is this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import shlex
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

from sparkhvd._util.addresses import is_loopback
from sparkhvd._util.processes.forks import close_in_children
from sparkhvd.config import environment_for_hosts
from sparkhvd.deadline import Deadline
from sparkhvd.task.failure_report import describe_exit
from sparkhvd.task.host.messages import MARKER, HostSetup
from sparkhvd.task.worker.exit import child_ends_within, wait_for_child
from sparkhvd.task.worker.import_path import IMPORT_PATH, import_path, python_module

FIXED_JOB = "sparkhvd.task.host.main"
ELASTIC_JOB = "sparkhvd.task.elastic.host"
_TAIL_LINES = 30
_NOISE_BYTES = 1 << 20
_END_SECONDS = 8.0


@dataclass(frozen=True)
class SshOptions:
    """How ``ssh`` reaches the hosts; None leaves an option to ssh's own configuration."""

    check: ClassVar[str] = "ssh HOST true"  # the command that tests access to a host

    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class SrunOptions:
    """How ``srun`` reaches the hosts of a Slurm job. It needs no ssh, and Slurm accounts the ranks to the job."""

    check: ClassVar[str] = "srun --nodelist=HOST true"

    job_id: str


@dataclass(frozen=True)
class HostEnded:
    """The process of a host has ended or cannot be understood; ``why`` has its last output or the error."""

    why: str


def host_command(host: str, executable: str, options: SshOptions | SrunOptions, module: str = FIXED_JOB) -> list[str]:
    """Return the command that starts the host process. Its only variable is the import path, so it has no secrets."""
    program = ["env", f"{IMPORT_PATH}={import_path(executable)}", *python_module(executable, module)]
    if is_this_machine(host):
        return program
    if isinstance(options, SrunOptions):
        # One task gets all processors and all memory that the job has on the host; the ranks share them.
        resources = ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mem=0", "--quiet", "--unbuffered"]
        return ["srun", f"--jobid={options.job_id}", f"--nodelist={host}", *resources, *program]
    port = [] if options.port is None else ["-p", str(options.port)]
    identity = [] if options.identity_file is None else ["-i", options.identity_file]
    # BatchMode: nobody can type a password. ServerAlive: ssh must notice that a host is unreachable. ControlMaster: the
    # user's other connections must not run through this one, and so end with the job.
    settings = ("BatchMode=yes", "ServerAliveInterval=3", "ServerAliveCountMax=3", "ControlMaster=no")
    options_of_ssh = [word for setting in settings for word in ("-o", setting)]
    return ["ssh", "-T", *options_of_ssh, *port, *identity, host, shlex.join(program)]


def is_this_machine(host: str) -> bool:
    """Return whether a name or address is a loopback address or the host name of this machine."""
    return is_loopback(host) or host == socket.gethostname()


def host_setup() -> HostSetup:
    """Return the environment and the working directory of this process, for a host process to adopt."""
    return HostSetup(environment_for_hosts(), str(Path.cwd()))


class HostProcess:
    """The process on one host, with a connection for messages in both directions.

    Args:
        command: the command that starts the process.
        receive: a thread of this object calls it with every message from the host; the last is ``HostEnded``.
        end_seconds: seconds that the process may take to end after ``hang_up``.
    """

    def __init__(
        self, command: Sequence[str], receive: Callable[[object], None], end_seconds: float = _END_SECONDS
    ) -> None:
        self._receive = receive
        self._end_seconds = end_seconds
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._answered = False  # written by the reading thread
        self._end_deadline: Deadline | None = None
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the host process
        )
        self._output = Connection(os.dup(self._fileno(self._process.stdin)), readable=False)
        if self._process.stdin is not None:
            self._process.stdin.close()  # closing the duplicate then ends the host's input
        close_in_children(self)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._read, "sparkhvd-host"),
                (self._read_stderr, "sparkhvd-host-stderr"),
                (self._write, "sparkhvd-host-stdin"),
            )
        ]
        for thread in reversed(self._threads):  # stderr before stdout, because the thread of stdout joins it
            thread.start()

    def send(self, message: object) -> None:
        """Queue a message for the host, and return at once. If the host has ended, the message is lost."""
        self._outbox.put(pickle.dumps(message))

    def hang_up(self, *, is_lost: bool = False) -> None:
        """Make the host end its ranks; return at once. If the host is lost, ``close`` does not wait for it."""
        self._outbox.put(None)
        has_ranks = self._answered and not is_lost  # a host that has not answered runs no ranks
        self._end_deadline = self._end_deadline or Deadline.after(self._end_seconds if has_ranks else 0.0)

    def leave_to_parent(self) -> None:
        """Close a forked child's copy of the host's input, whose end is how a host behind ssh notices our end."""
        self._output.close()

    def close(self) -> None:
        """Hang up, wait at most ``end_seconds`` for the process to end, then kill the rest of its process group."""
        self.hang_up()
        if self._process.returncode is not None:
            return  # closed before
        child_ends_within(self._process.pid, 0.0 if self._end_deadline is None else self._end_deadline.remaining())
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(self._process.pid, signal_number)
        for thread in self._threads:
            thread.join()
        self._process.wait()  # only now may the system reuse the process id
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        descriptor = self._fileno(self._process.stdout)
        if _skip_noise(descriptor):
            self._answered = True
            with Connection(os.dup(descriptor), writable=False) as connection:
                problem = self._receive_all(connection)
            if problem is not None:
                self.hang_up()
                self._receive(HostEnded(problem))
                return
        code = wait_for_child(self._process.pid)
        self._threads[1].join(1.0)
        output = "".join(list(self._tail)).strip()
        why = f"its process {describe_exit(code)}. Its last output: {output or 'none'}"
        self._receive(HostEnded(why))

    def _receive_all(self, connection: Connection) -> str | None:
        """Receive messages until the host ends the connection; return why a message cannot be read, if one cannot."""
        while True:
            try:
                content = connection.recv_bytes()
            except (EOFError, OSError):
                return None
            try:
                message = pickle.loads(content)
            except Exception as error:  # noqa: BLE001 - unpickling runs code of any module
                return (
                    f"it sent a message that this machine cannot read ({type(error).__name__}: {error}). Install the "
                    "same version of sparkhvd and its requirements on all hosts"
                )
            self._receive(message)

    def _write(self) -> None:
        # If the host process stops reading, a write blocks until close() kills that process, and then fails.
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
    """Skip output up to and including the marker; return False if the marker does not arrive."""
    content = b""
    while not content.endswith(MARKER):
        byte = os.read(descriptor, 1)
        if not byte or len(content) > _NOISE_BYTES:
            return False
        content += byte
    return True
