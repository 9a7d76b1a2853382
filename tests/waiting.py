"""Wait for conditions that another thread or process changes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparkhvd.deadline import Deadline


def soon() -> Deadline:
    """Return a deadline that leaves ample time for an action that takes a moment."""
    return Deadline.after(60.0)


def happens(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether ``condition`` becomes true within this many seconds."""
    deadline, pause = Deadline.after(seconds), threading.Event()
    while not condition():
        if deadline.expired():
            return False
        pause.wait(0.02)  # not time.sleep, which tests replace
    return True


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until ``condition`` is true; fail if it does not become true."""
    assert happens(condition, seconds), f"the condition did not become true within {seconds:g} s"
