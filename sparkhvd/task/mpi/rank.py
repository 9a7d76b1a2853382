"""The program that ``orted`` starts as a rank: it connects to its host's task, forks the worker and reports its end.

The worker is a fork of this program, which saves a second start of Python and its memory. If the worker fails, this
program ends only after the task has recorded the failure: ``mpirun`` kills all other ranks once this program fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sparkhvd.config import SCRATCH, export, scratch_folder, take_variables
from sparkhvd.deadline import Deadline
from sparkhvd.rpc.fields import MessageError
from sparkhvd.rpc.frames import FrameSocket, connect_unix
from sparkhvd.rpc.messages import Preload, RankConnected, WorkerEnded, WorkerForked, decode, encode
from sparkhvd.task.mpi.job import EXECUTABLE, FOLDER, RANK_SECRET, RANK_SOCKET
from sparkhvd.task.worker.exit import end_process, wait_for_child
from sparkhvd.task.worker.main import main as worker_main
from sparkhvd.task.worker.scratch import make_scratch, remove_scratch

_CONNECT_SECONDS = 30.0
_NOTE_SECONDS = 30.0
# Variables that Open MPI sets: the rank, the world size, and the number of ranks on this host.
_WORLD_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def main() -> int:
    """Run the worker; return its exit code, or 128 plus the number of the signal that ended it."""
    variables = take_variables((EXECUTABLE, FOLDER, RANK_SOCKET, RANK_SECRET))
    deadline = Deadline.after(_CONNECT_SECONDS)
    with closing(connect_unix(variables[RANK_SOCKET], Path(variables[RANK_SECRET]).read_bytes(), deadline)) as link:
        link.send(encode(RankConnected(*(int(os.environ[name]) for name in _WORLD_VARIABLES))), deadline)
        preload = decode(link.receive(deadline))
        if not isinstance(preload, Preload):
            raise MessageError(f"The task of this host sent {type(preload).__name__} instead of Preload.")
        with socket.socket(fileno=os.dup(link.fileno())) as connection:
            connection.settimeout(_CONNECT_SECONDS)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        control, stdout, stderr = descriptors
        scratch = make_scratch(scratch_folder())  # inside orted's folder, with which it is removed
        pid = os.fork()
        if pid == 0:
            export({SCRATCH: scratch})
            link.close()
            _become_worker(control, stdout, stderr, preload.modules)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            return _report_end(link, pid)
        finally:
            remove_scratch(scratch)


def _become_worker(control: int, stdout: int, stderr: int, preload: Sequence[str]) -> NoReturn:
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    end_process(worker_main(["--control-fd", str(control), *preload]))


def _report_end(link: FrameSocket, pid: int) -> int:
    """Report the worker's end, and return its code once the task has recorded the end or has itself ended."""
    ended_by_orted = False

    def forward_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal ended_by_orted
        ended_by_orted = True
        os.killpg(pid, number)

    signal.signal(signal.SIGTERM, forward_signal)
    link.send(encode(WorkerForked(pid)), Deadline.after(_NOTE_SECONDS))
    returncode = wait_for_child(pid)
    with contextlib.suppress(OSError):  # the task has ended
        ended = WorkerEnded(returncode, ended_by_orted)
        link.send(encode(ended), Deadline.after(_NOTE_SECONDS))
        link.receive(Deadline.after(_NOTE_SECONDS))  # returns when the task closes the link
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from here on, the system may reuse the id of the worker's group
    os.waitpid(pid, 0)
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main())
