"""The host's side of the connection between a launcher and its process on a host."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from sparkhvd.config import export
from sparkhvd.task.host.messages import MARKER, HostSetup
from sparkhvd.task.worker.import_path import IMPORT_PATH
from sparkhvd.task.worker.template import descriptor_of


class LauncherConnection:
    """The connection to the launcher, over the stdin and stdout of this process.

    It ends with the parent of this process, too, which is the launcher or belongs to ssh or srun: a process that the
    launcher has forked keeps its end of the stdin open.
    """

    def __init__(self) -> None:
        self._input = Connection(os.dup(0), writable=False)
        self._watched = [self._input.fileno()]
        with suppress(OSError):
            self._watched.append(descriptor_of(os.getppid()))
        output = os.dup(1)
        os.dup2(2, 1)  # user code that prints must not write between the messages
        os.write(output, MARKER)
        self._output = Connection(output, readable=False)
        self._lock = threading.Lock()  # the messages of several threads must not interleave

    def receive(self) -> object:
        """Return the next message; raise ``EOFError`` when the launcher has ended."""
        if self._input.fileno() not in wait(self._watched):
            raise EOFError
        return pickle.loads(self._input.recv_bytes())

    def send(self, message: object) -> None:
        with self._lock:
            self._output.send_bytes(pickle.dumps(message))


def apply_setup(setup: HostSetup) -> None:
    """Apply the environment, the import path and the working directory of the launcher's process to this one."""
    export({IMPORT_PATH: None, **setup.environment})
    sys.path[:0] = [entry for entry in setup.environment.get(IMPORT_PATH, "").split(os.pathsep) if entry]
    if Path(setup.folder).is_dir():
        os.chdir(setup.folder)
