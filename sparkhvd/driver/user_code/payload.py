"""Pickles the user's function for the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparkhvd.driver.user_code.importable import importable_elsewhere
from sparkhvd.driver.user_code.pickling import Importable, dumps
from sparkhvd.errors import LaunchError, SparkHvdError

# Spark Connect rejects closures above 128 MB, and large ones are slow everywhere.
PAYLOAD_CAP_BYTES = 100 * 1024 * 1024


def pickle_call(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    importable: Importable = importable_elsewhere,
) -> bytes:
    """Return ``(fn, args, kwargs)`` as bytes that a worker can unpickle.

    The code of modules that the workers cannot import, such as modules in a script's folder, is pickled with them.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        importable: returns the modules that the workers can import.

    Raises:
        LaunchError: the call cannot be pickled, or is too large.
    """
    call = (fn, tuple(args), dict(kwargs))
    try:
        payload = dumps(call, importable)
    except SparkHvdError:
        raise
    except Exception as error:
        raise LaunchError(
            f"{_function_name(fn)} and its arguments cannot be sent to the workers: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. "
            "Create objects that cannot be pickled (sessions, locks, open files) inside fn, or pass them another way."
        ) from error
    if len(payload) > PAYLOAD_CAP_BYTES:
        raise LaunchError(
            f"{_function_name(fn)} and its arguments have {len(payload):,} bytes, more than the limit of "
            f"{PAYLOAD_CAP_BYTES:,}. Write large data to a Store and pass its path."
        )
    return payload


def _function_name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))
