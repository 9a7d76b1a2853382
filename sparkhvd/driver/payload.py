"""The user's function on its way to the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import cloudpickle

from sparkhvd.driver.pickling import by_value
from sparkhvd.errors import LaunchError

# A larger closure is refused by Spark Connect (128 MB) and slow everywhere.
PAYLOAD_CAP_BYTES = 100 * 1024 * 1024


def pickle_call(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    """``(fn, args, kwargs)`` as bytes that a worker can unpickle.

    A function from a module that is no installed package (a script's neighbour, a test) is pickled with its module's
    code, because workers elsewhere could not import it.

    Raises:
        LaunchError: it cannot be pickled, or is too large.
    """
    call = (fn, tuple(args), dict(kwargs))
    try:
        with by_value([fn]):
            payload = bytes(cloudpickle.dumps(call))
    except Exception as error:
        raise LaunchError(
            f"{_name(fn)} and its arguments cannot be sent to the workers: {type(error).__name__}: {error}. "
            "Make what cannot be pickled (sessions, locks, open files) inside fn, or pass it another way."
        ) from error
    if len(payload) > PAYLOAD_CAP_BYTES:
        raise LaunchError(
            f"{_name(fn)} and its arguments are {len(payload):,} bytes; more than {PAYLOAD_CAP_BYTES:,} are not sent "
            "with the job. Put large data into a Store and pass its path."
        )
    return payload


def _name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))
