"""Short tracebacks for public functions: callers need the message, not the frames of this package."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sparkhvd.errors import ConfigError, DataError, ParamError, RankFailedError, SlotsError

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)

# Errors whose message is complete: it names the wrong value, or the error of a rank and its location.
_SELF_EXPLAINING = (ConfigError, DataError, ParamError, RankFailedError, SlotsError)


def brief_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with short tracebacks: its frames are dropped from argument errors and KeyboardInterrupt.

    A notebook shows ten lines of source per frame, which bury the message. The cause of an error stays, because it is
    in the user's own code. The log at level DEBUG has the whole traceback.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except _SELF_EXPLAINING as error:
            _note(error)
            raise error.with_traceback(None)  # noqa: B904 - the same error, so its cause stays
        except KeyboardInterrupt as error:
            _note(error)
            raise error.with_traceback(None) from None

    return call


def _note(error: BaseException) -> None:
    logger.debug("%s was raised here:", type(error).__name__, exc_info=error)
