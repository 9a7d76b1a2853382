"""A function that runs another function in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["in_thread"]


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``target``, and return it.

    Args:
        target: the function.
        args: its arguments.
        name: the thread's name.
        daemon: whether the process may exit while the thread is running.
        silent: whether to ignore exceptions that the function raises.

    Raises:
        ValueError: ``args`` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(  # noqa: TRY004  Horovod's error
            f"args must be a tuple, but is a {type(args).__name__}. Pass (value,) for one argument."
        )

    def run() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
