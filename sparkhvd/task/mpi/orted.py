"""Running ``orted`` for ``mpirun``: the only command that a task executes for others."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.config import SCRATCH
from sparkhvd.errors import LaunchError
from sparkhvd.task.worker.exit import wait_for_child

_TERM_SECONDS = 2.0
_TAIL_LINES = 40
# This shell survives SIGTERM and the death of the task, and removes the folder after orted has ended.
_THEN_REMOVE = 'trap : TERM; "$@"; code=$?; rm -rf "$0"; exit $code'


def orted_command(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Parse, as a remote shell would, the command line that ``mpirun`` passes to its agent.

    An Open MPI that was built with a prefix puts assignments of PATH and LD_LIBRARY_PATH first.

    Returns:
        The assignments, with unexpanded references to the variable itself, and the command with its arguments.

    Raises:
        LaunchError: the command is not ``orted``; no other command is executed.
    """
    try:
        words = shlex.split(" ".join(arguments))
    except ValueError as error:
        raise LaunchError(f"A task executes only orted, and this command line cannot be parsed: {error}.") from error
    command_index = next((i for i, word in enumerate(words) if Path(word).name == "orted"), None)
    if command_index is None:
        raise LaunchError(f"A task executes only orted, got {' '.join(words[:3])!r}.")
    assignments = dict(word.split("=", 1) for word in words[:command_index] if "=" in word)
    return {name: value.rstrip(";").strip() for name, value in assignments.items()}, words[command_index:]


class Orted:
    """One ``orted`` in a session and process group of its own.

    Args:
        arguments: the command line that ``mpirun`` passed to its agent.
        environment: the environment of the process; its ranks inherit it.

    Raises:
        LaunchError: ``orted`` cannot be started.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        assignments, command = orted_command(arguments)
        try:
            self._folder = tempfile.mkdtemp(prefix="sparkhvd-")
        except OSError as error:
            raise LaunchError(f"orted cannot be started: its temporary folder cannot be created: {error}.") from error
        # Hosts of a job that Open MPI sees as one machine would otherwise share these folders by accident.
        shared = ("OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_btl_vader_backing_directory", SCRATCH)
        own_variables = dict.fromkeys(shared, self._folder)
        orted_environment = {**environment, **own_variables}
        for name, value in assignments.items():
            orted_environment[name] = value.replace(f"${name}", orted_environment.get(name, "")).strip(":")
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _THEN_REMOVE, self._folder, *command],
                env=orted_environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except (OSError, ValueError) as error:  # ValueError: a character that no argument can contain
            self._remove_folder()
            raise LaunchError(f"orted cannot be started: {error}.") from error
        self._lock = threading.Lock()
        self._released = False  # whether the system may reuse the process id; guarded by _lock
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader = threading.Thread(target=self._read, name="sparkhvd-orted", daemon=True)
        try:
            self._ended = in_background(lambda: wait_for_child(self._process.pid), "sparkhvd-orted-end")
            self._reader.start()
        except RuntimeError as error:  # the limit of threads or of memory is reached
            self._abandon()
            raise LaunchError(f"orted cannot be started: {error}.") from error

    def wait(self) -> tuple[int, str]:
        """Block until ``orted`` has ended; return its exit code and its last output."""
        code = self._ended.result()
        self._kill(signal.SIGKILL)
        self._reader.join(1.0)  # ranks that left the process group may hold its output open
        return code, "".join(list(self._tail))

    def close(self) -> None:
        """End ``orted``; the tasks that supervise its ranks end the ranks."""
        self._kill(signal.SIGTERM)
        if not is_done_within(self._ended, _TERM_SECONDS):
            self._kill(signal.SIGKILL)
            is_done_within(self._ended)
        with self._lock:
            self._released = True
            self._process.wait()
        self._remove_folder()

    def _abandon(self) -> None:
        """Kill ``orted`` before its output is read."""
        self._kill(signal.SIGKILL)
        if self._process.stdout is not None:
            self._process.stdout.close()  # not read to its end: ranks that left the process group may hold it open
        self._process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._released:
                os.killpg(self._process.pid, number)

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                self._tail.append(line.decode("utf-8", "replace"))
