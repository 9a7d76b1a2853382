"""The host's side of the connection between a launcher and its process on a host."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from sparkhvd.config import export
from sparkhvd.task.host.messages import MARKER, HostSetup
from sparkhvd.task.worker.import_path import IMPORT_PATH


class LauncherConnection:
    """The connection to the launcher, over the stdin and stdout of this process."""

    def __init__(self) -> None:
        self._input = Connection(os.dup(0), writable=False)
        output = os.dup(1)
        os.dup2(2, 1)  # user code that prints must not write between the messages
        os.write(output, MARKER)
        self._output = Connection(output, readable=False)
        self._lock = threading.Lock()  # the messages of several threads must not interleave

    def receive(self) -> object:
        """Return the next message; raise ``EOFError`` when the launcher has ended."""
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
