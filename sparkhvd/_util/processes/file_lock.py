"""Mutual exclusion among a user's threads and processes on one machine, so that work is done once and then reused.

The kernel releases a file lock when its holder ends.
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

_POLL_SECONDS = 0.05
_REMINDER_SECONDS = 3600.0


@contextmanager
def exclusive_on_machine(what: str, deadline: Deadline) -> Iterator[None]:
    """Hold this user's lock for ``what`` on this machine inside ``with``.

    The lock only avoids duplicate work. If no lock is available, or the deadline passes, the block runs without it.

    Args:
        what: the work, such as "preparing rows 7"; equal texts exclude each other.
        deadline: the end of the wait, for a holder that hangs; a holder that ends releases the lock.
    """
    digest = hashlib.sha256(what.encode()).hexdigest()[:32]
    path = Path(tempfile.gettempdir(), f"sparkhvd-turn-{os.getuid()}-{digest}")
    descriptor = _wait_for_lock(path, what, deadline)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # unlinked while locked: a process that locks an unlinked file tries again
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile also has it open
            os.close(descriptor)


def _wait_for_lock(path: Path, what: str, deadline: Deadline) -> int | None:
    level, silence = logging.INFO, Deadline.after(0)
    try:
        while (descriptor := _try_lock(path)) is None and not deadline.expired():
            if silence.expired():
                logger.log(level, "Another process on this machine is already %s; waiting for it (%s).", what, path)
                level, silence = logging.WARNING, Deadline.after(_REMINDER_SECONDS)
            time.sleep(_POLL_SECONDS)
    except OSError as error:  # the folder cannot be written, or its network file system has no locks
        logger.debug("No lock file can be used, so this process does not wait: %s", error)
        return None
    if descriptor is None:
        logger.warning("Another process on this machine is still %s; continuing without waiting for it.", what)
    return descriptor


def _try_lock(path: Path) -> int | None:
    """Return a locked descriptor of the file; None while another holder has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    is_locked = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = os.path.samestat(path.stat(), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not is_locked:
            os.close(descriptor)
    return descriptor if is_locked else None
