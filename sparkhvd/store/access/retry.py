"""Trying again what may succeed the next time, with growing pauses, until a deadline."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sparkhvd.deadline import Deadline
from sparkhvd.errors import SparkHvdError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
# What repeating cannot change. Every other OSError is taken for a disturbance of the connection.
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_LASTING_NUMBERS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EINVAL,
        errno.ENAMETOOLONG,
        errno.ENOSYS,
        errno.EPERM,
        errno.EMSGSIZE,
    }
)


def is_transient(error: Exception) -> bool:
    """Whether an error of Python's own kind may be gone the next time."""
    if not isinstance(error, (OSError, EOFError)) or isinstance(error, _LASTING):
        return False
    return getattr(error, "errno", None) not in _LASTING_NUMBERS


def with_retries(
    action: Callable[[int], Result],
    *,
    passing: Callable[[Exception], bool],
    deadline: Deadline,
    what: str,
    pause: Callable[[float], None] = time.sleep,
) -> Result:
    """What ``action`` gives, called again after errors that are ``passing``.

    Pauses double from 0.1 s up to 5 s, each shortened by a random part so that many ranks do not come back together.

    Args:
        action: gets the number of the attempt, from 0.
        passing: tells whether another attempt makes sense after an error.
        deadline: no attempt begins after it; the last error is raised then, with a note of the attempts.
        what: names the action in the log.
        pause: waits for a number of seconds.
    """
    attempt = 0
    while True:
        try:
            return action(attempt)
        except Exception as error:
            if isinstance(error, SparkHvdError) or not passing(error):  # what we say on purpose is final
                raise
            seconds = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311
            if deadline.remaining() <= seconds:
                error.add_note(f"gave up after {attempt + 1} attempts")
                raise
            logger.info("%s failed (%s); retrying in %.1f s", what, type(error).__name__, seconds)
        attempt += 1
        pause(seconds)
