"""Those who want to do the same thing on one machine, threads as well as processes, do it one after the other.

So that the second finds what the first has made. The turn is a locked file: the kernel takes it from whoever dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkhvd.deadline import Deadline

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05


@contextmanager
def in_turn(what: str, deadline: Deadline) -> Iterator[None]:
    """Hold the turn for ``what`` inside ``with``.

    Without it, work is done twice but not wrong: where no turn can be had, by the deadline or at all, it goes on so.
    """
    digest = hashlib.sha256(what.encode()).hexdigest()[:32]
    path = Path(tempfile.gettempdir(), f"sparkhvd-turn-{os.getuid()}-{digest}")
    descriptor = _taken(path, deadline)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # while it is held: whoever gets the lock of a file without name tries again
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
            os.close(descriptor)


def _taken(path: Path, deadline: Deadline) -> int | None:
    waits = False
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.debug("Nobody can be waited for: %s", error)
            return None
        try:
            if _locked(descriptor, path):
                return descriptor
        except OSError as error:  # some network file systems have no locks
            logger.debug("Nobody can be waited for: %s", error)
            os.close(descriptor)
            return None
        os.close(descriptor)
        if not waits:
            waits = True
            logger.info("Somebody on this machine prepares the same rows; waiting for them.")
        if deadline.expired():
            logger.info("Somebody on this machine prepares the same rows and has not finished; not waiting any longer.")
            return None
        time.sleep(_LOOK_SECONDS)


def _locked(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there, mine = path.stat(), os.fstat(descriptor)
    except (BlockingIOError, FileNotFoundError):
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
