"""Retries after transient errors, with growing pauses, until a deadline."""

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
# Errors that a retry cannot change. Every other OSError counts as a transient failure of the connection.
_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT_ERRNOS = frozenset(
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
    """Return whether a retry may succeed after a built-in error."""
    if not isinstance(error, (OSError, EOFError)) or isinstance(error, _PERMANENT):
        return False
    return getattr(error, "errno", None) not in _PERMANENT_ERRNOS


def with_retries(
    action: Callable[[int], Result],
    *,
    should_retry: Callable[[Exception], bool],
    deadline: Deadline,
    what: str,
    pause: Callable[[float], None] = time.sleep,
) -> Result:
    """Return the result of ``action``, retried after errors for which ``should_retry`` is true.

    Pauses double from 0.1 s up to 5 s, each shortened by a random part so that ranks do not retry at the same time.

    Args:
        action: called with the number of the attempt, from 0.
        should_retry: returns whether to retry after an error.
        deadline: no attempt begins after it; the last error is then raised, with a note of the number of attempts.
        what: names the action in the log.
        pause: sleeps for a number of seconds.
    """
    attempt = 0
    while True:
        try:
            return action(attempt)
        except Exception as error:
            if isinstance(error, SparkHvdError) or not should_retry(error):  # our own errors are final
                raise
            seconds = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311
            if deadline.remaining() <= seconds:
                error.add_note(f"gave up after {attempt + 1} attempts")
                raise
            logger.info("%s failed (%s); retrying in %.1f s", what, type(error).__name__, seconds)
        attempt += 1
        pause(seconds)
