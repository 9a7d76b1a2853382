"""The user's function on its way to the workers."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import cloudpickle

from sparkhvd.errors import LaunchError

# A larger closure is refused by Spark Connect (128 MB) and slow everywhere.
PAYLOAD_CAP_BYTES = 100 * 1024 * 1024

# cloudpickle's table of modules to pickle by value belongs to the process; this keeps two jobs from undoing each other.
_PICKLE_TABLE = threading.Lock()


def pickle_call(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    """``(fn, args, kwargs)`` as bytes that a worker can unpickle.

    A function from a module that is no installed package (a script's neighbour, a test) is pickled with its module's
    code, because workers elsewhere could not import it.

    Raises:
        LaunchError: it cannot be pickled, or is too large.
    """
    call = (fn, tuple(args), dict(kwargs))
    try:
        payload = _dumps(call, _module_to_send(fn))
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


def _dumps(call: object, by_value: ModuleType | None) -> bytes:
    if by_value is None:
        return bytes(cloudpickle.dumps(call))
    with _PICKLE_TABLE:
        if by_value.__name__ in cloudpickle.list_registry_pickle_by_value():
            return bytes(cloudpickle.dumps(call))
        cloudpickle.register_pickle_by_value(by_value)
        try:
            return bytes(cloudpickle.dumps(call))
        finally:
            cloudpickle.unregister_pickle_by_value(by_value)


def _module_to_send(fn: object) -> ModuleType | None:
    name = getattr(fn, "__module__", None) or type(fn).__module__
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if module is None or path is None or name == "__main__" or name.partition(".")[0] == "sparkhvd":
        return None
    return None if is_installed(Path(path)) else module


def is_installed(path: Path) -> bool:
    """Whether a module's file belongs to Python or an installed package, so that executors have it too."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return path.is_relative_to(sysconfig.get_path("stdlib"))


def _name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))
