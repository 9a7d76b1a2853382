"""The end of a worker process: how it ended, and the processes that it leaves behind."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from sparkhvd.deadline import Deadline

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Exited:
    """A worker process has ended.

    Attributes:
        returncode: its return code; negative numbers are signals, as in ``subprocess``.
        ended_by_launcher: whether the program that started the ranks ended it, because something else had failed.
    """

    returncode: int
    ended_by_launcher: bool = False


def wait_for_child(pid: int) -> int:
    """Block until a child has ended, and return its ``returncode``.

    The child stays a zombie, so its id stays reserved. The child's process group has the same id, and may still have
    processes that must be ended.

    If the program ignores SIGCHLD or collects all children itself, the return code is unknown, and 0 as in
    ``subprocess``.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if status is None:
        return 0
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def child_ends_within(pid: int, seconds: float) -> bool:
    """Wait at most ``seconds`` for the end of a child, which stays a zombie, and return whether it has ended."""
    deadline = Deadline.after(seconds)
    with suppress(ChildProcessError):  # it has ended, see ``wait_for_child``
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if deadline.expired():
                return False
            time.sleep(deadline.capped(_POLL_SECONDS).remaining())
    return True


def keep_ended_children() -> None:
    """Keep the return codes of this process's children until they are asked for.

    A program that ignores SIGCHLD passes that on to the programs that it starts, where all children would seem to have
    succeeded.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def kill_session(session: int) -> None:
    """Kill all processes of a session except this one.

    A process group is not enough, because programs such as ``timeout`` and interactive shells make their own. A process
    that has made its own session is a daemon, which its user ends. The kernel does not reuse the session's id while it
    has any process, or while the parent of its leader keeps the leader's id reserved.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of path objects would take longer
        with suppress(OSError):  # the process has just ended
            if name.isdecimal() and os.getsid(pid := int(name)) == session and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


def end_process(code: int) -> NoReturn:
    """End this process as ``multiprocessing`` ends its processes: without freeing all objects.

    This runs the exit handlers, collects garbage, such as an unreachable writer that flushes when it is destroyed, and
    flushes the open files. Freeing the objects of a framework takes longer than a small training, because a process
    that was forked has to copy their memory first.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for the threads that are not daemons
    atexit._run_exitfuncs()  # noqa: SLF001
    gc.collect()
    flush_output()
    for one in gc.get_objects():
        with suppress(Exception):  # a closed file
            if type(one) in {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom} and _is_of_system(one):
                one.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed
    os._exit(code)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the user's code may have closed or replaced it
            stream.flush()


def _is_of_system(file: io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom) -> bool:
    """Return whether a file is one of the operating system's; flushing a remote file could upload half of it."""
    buffer = file.buffer if isinstance(file, io.TextIOWrapper) else file
    return isinstance(getattr(buffer, "raw", None), io.FileIO)
