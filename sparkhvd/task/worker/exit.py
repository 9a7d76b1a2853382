"""How a worker process ended."""

from __future__ import annotations

import os
from dataclasses import dataclass


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
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if status is None:
        return 0
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
