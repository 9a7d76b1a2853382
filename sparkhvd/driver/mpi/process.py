"""The ``mpirun`` process of a job."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd._util.processes.forks import close_in_children
from sparkhvd.comm.connect.inherited_world import memory_file
from sparkhvd.config import changed_environment
from sparkhvd.driver.mpi.command import agent_script, agent_setting, mpirun_defaults
from sparkhvd.driver.mpi.remote_shell import DRIVER_ADDRESSES, DRIVER_ENCRYPTS, DRIVER_SECRET
from sparkhvd.task.worker.exit import kill_session, wait_for_child
from sparkhvd.task.worker.import_path import IMPORT_PATH, import_path

logger = logging.getLogger(__name__)

_TERM_SECONDS = 2.0
_OUTPUT_SECONDS = 0.5
_TAIL_LINES = 60
# Waits until its stdin is closed, even by the driver's death. Then waits up to 10 s for mpirun, which uses the folder.
_REMOVE = 'cat; n=0; while kill -0 "$1" 2>/dev/null && [ $n -lt 100 ]; do sleep 0.1; n=$((n+1)); done; rm -rf "$0"'


@dataclass(frozen=True)
class ServiceAddress:
    """The addresses of the driver's service for agents, and the secret that authenticates them."""

    addresses: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)
    encrypt: bool = False  # whether agents require encryption


class Mpirun:
    """``mpirun`` in a session and process group of its own, with its agents.

    Args:
        path: the path of ``mpirun``.
        arguments: the arguments of ``mpirun``.
        settings: environment variables of Open MPI.
        service: the driver's service, for the agents.
        on_end: called with the exit code and the last output, from a thread of its own.

    Raises:
        OSError: ``mpirun`` cannot be started.
    """

    def __init__(
        self,
        path: str,
        arguments: Sequence[str],
        settings: Mapping[str, str],
        service: ServiceAddress,
        on_end: Callable[[int, str], None],
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="sparkhvd-")  # a killed mpirun does not remove its files
        self._on_end = on_end
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._secret = ExitStack()
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.callback(self._secret.close)
            variables = {
                "TMPDIR": self._folder,
                DRIVER_ADDRESSES: json.dumps(list(service.addresses)),
                DRIVER_SECRET: self._secret.enter_context(memory_file(service.secret)),
                DRIVER_ENCRYPTS: "1" if service.encrypt else "",
                IMPORT_PATH: import_path(),
                **agent_setting(self._secret.enter_context(memory_file(agent_script().encode()))),
                **settings,
            }
            self._process = subprocess.Popen(
                ["mpirun", *arguments],  # noqa: S607 - if called by a path, it would use that path on all hosts
                executable=path,
                env=changed_environment(variables, mpirun_defaults()),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            stack.enter_context(self._process)
            stack.callback(self._kill, signal.SIGKILL)
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE, self._folder, str(self._process.pid)],
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            close_in_children(self)
            stack.pop_all()
        self._output_ended = in_background(self._read, "sparkhvd-mpirun-output")
        self._ended = in_background(self._watch, "sparkhvd-mpirun")

    def close(self, grace_seconds: float) -> None:
        """Wait up to ``grace_seconds`` for the process to end, then end it by force."""
        with ExitStack() as stack:  # takes every step, even if Ctrl-C interrupts one
            stack.callback(self._remove_folder)
            stack.callback(self._secret.close)
            stack.callback(self._end_session)
            if not is_done_within(self._ended, grace_seconds):
                self._kill(signal.SIGTERM)
                is_done_within(self._ended, _TERM_SECONDS)

    def leave_to_parent(self) -> None:
        """Close a forked child's copy of the pipe whose end removes the folder."""
        if self._remover.stdin is not None:
            self._remover.stdin.close()

    def _end_session(self) -> None:
        """End all processes of the session at once."""
        kill_session(self._process.pid)  # each agent leads a process group of its own
        is_done_within(self._ended)
        is_done_within(self._output_ended)
        self._process.wait()  # only now may the system reuse the id of the session

    def _remove_folder(self) -> None:
        if self._remover.stdin is not None:
            self._remover.stdin.close()
        try:
            self._remover.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:  # a child that this process forked in the meantime holds the pipe open
            self._remover.kill()
            self._remover.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        code = wait_for_child(self._process.pid)
        is_done_within(self._output_ended, _OUTPUT_SECONDS)  # surviving agents keep its output open
        self._on_end(code, "".join(list(self._tail)).strip())

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is not None:
            with stream:
                for raw in stream:
                    line = raw.decode("utf-8", "replace")
                    self._tail.append(line)
                    logger.info("mpirun: %s", line.rstrip())

    def _kill(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
